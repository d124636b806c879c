"""What nestsp costs where there is nothing to parallelise: one rank, 8,192 tokens of mixed lengths.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.one_rank

The rival has the same weights, recomputation, sliced loss and optimizer, no FSDP, and runs Transformers' model on the
same packed tokens with PyTorch's causal attention over each sequence. Target: at most 1.05 × its time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from benchmarks.common import interleave, make_executor, plain_nll, quickstart, ratio, recompute_every_layer, where
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.executor import Executor
from nestsp.execute.local import weighted_sum
from nestsp.model.adapter import build_model, model_config
from nestsp.plan import Plan
from nestsp.train.update import make_optimizer, update

LENGTHS = (2903, 1811, 1201, 733, 521, 389, 283, 151, 97, 61, 29, 13)
TARGET = 1.05
NUM_PAIRS = 15


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's own causal attention over each sequence of a pack."""
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in zip(*(x.split(LENGTHS, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def main() -> None:
    """Measure and print."""
    dist.init_process_group("gloo")
    config = quickstart("planner.max_tokens_per_rank=8192")
    tree = GroupTree(())
    plan = Plan.of_groups(
        tree, SequenceBatch.of_lengths(LENGTHS), [{tree.group(0, 0): list(range(len(LENGTHS)))}], "benchmark"
    )
    tokens = np.random.default_rng(0).integers(0, 256, (len(LENGTHS), max(LENGTHS)))
    num_targets = sum(length - 1 for length in LENGTHS)

    executor = make_executor(config, tree, 0)
    optimizer = make_optimizer(executor.root, config.train, fused=False)
    ours = step_of(executor, plan, tokens, optimizer, num_targets)

    AttentionInterface.register("packed_sdpa", packed_sdpa)
    slice_tokens = config.train.loss_slice_tokens
    rival_model = build_model(model_config(config.model.config), seed=0, attention="packed_sdpa")
    recompute_every_layer(rival_model)  # as ours does
    rival_optimizer = make_optimizer(rival_model, config.train, fused=False)
    local = executor.load(plan, lambda i, a, b: tokens[i, a:b]).microbatches[0]

    def rival() -> float:
        start = time.perf_counter()
        weighted_sum(local.tokens, plain_nll(rival_model, local.tokens, slice_tokens)).backward()
        update(rival_model, rival_optimizer, total_weight=num_targets, max_grad_norm=1.0, lr=1e-3)
        return time.perf_counter() - start

    a, b = interleave(ours, rival, NUM_PAIRS)
    result = ratio(a, b)
    print(f"one rank, {sum(LENGTHS):,} tokens in {len(LENGTHS)} sequences; {where()}")
    print(f"nestsp {np.median(a):.3f} s, rival {np.median(b):.3f} s a step")
    print(f"ratio {result}; target at most {TARGET}: {'reached' if result.median <= TARGET else 'MISSED'}")
    dist.destroy_process_group()


def step_of(
    executor: Executor, plan: Plan, tokens: np.ndarray[Any, Any], optimizer: torch.optim.Optimizer, num_targets: int
) -> Any:
    """A function that runs one step, loading included, and returns its seconds."""

    def step() -> float:
        start = time.perf_counter()
        executor.run(executor.load(plan, lambda i, a, b: tokens[i, a:b]))
        update(executor.root, optimizer, total_weight=num_targets, max_grad_norm=1.0, lr=1e-3)
        return time.perf_counter() - start

    return step


if __name__ == "__main__":
    main()
