"""A loss of whole sequences on nestsp's executor, without its trainer: preferences (DPO) between pairs of sequences.

Run it on four ranks of this machine: torchrun --nproc-per-node 4 examples/preference.py

Each step's pairs are placed by the planner; a chosen sequence and its rejected one may sit in groups that share no
rank. What is learnt: that sorted letters are better than shuffled ones.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nestsp.attention.choice import choose_kernel
from nestsp.batch import SequenceBatch
from nestsp.comm.groups import make_links
from nestsp.config import ClusterConfig
from nestsp.execute.capability import executor_capabilities
from nestsp.execute.executor import Executor
from nestsp.execute.losses import SequenceSums, measure_sequences, run_sequence_loss
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.planners.task import PlanningTask
from nestsp.train.parallelize import make_mesh, shard_root
from nestsp.train.update import update
from nestsp.train.world import World, join_world

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}
BETA = 0.1
STEPS = 8


def main() -> None:
    """Train for a few steps and print the loss and how often the chosen sequence is preferred."""
    world = join_world(ClusterConfig(device="cpu"))
    executor, task = make_executor(world)
    optimizer = torch.optim.AdamW(executor.root.parameters(), lr=3e-3)
    pairs = make_pairs(32)
    batch = SequenceBatch(tuple(range(len(pairs))), tuple(len(tokens) for tokens in pairs))
    # Plans are deterministic, so every rank makes its own; `nestsp train` plans ahead on one and compares digests.
    plan = task.solver()(batch).plan
    executor.check(plan)
    local = executor.load(plan, lambda identity, start, stop: pairs[identity][start:stop])
    reference = measure_sequences(executor, local, batch)

    def preference(sums: SequenceSums) -> Tensor:
        gain_S = reference.nll_S - sums.nll_S
        return -F.logsigmoid(BETA * (gain_S[0::2] - gain_S[1::2])).mean()

    for step in range(1, STEPS + 1):
        loss = run_sequence_loss(executor, local, batch, preference)
        update(executor.root, optimizer, total_weight=1.0, max_grad_norm=1.0, lr=3e-3)
        sums = measure_sequences(executor, local, batch)
        gain_S = reference.nll_S - sums.nll_S
        preferred = (gain_S[0::2] > gain_S[1::2]).double().mean()
        if world.is_first:
            print(f"step {step}/{STEPS}  loss {loss:.4f}  chosen preferred {preferred:.0%}", flush=True)
    dist.destroy_process_group()


def make_executor(world: World) -> tuple[Executor, PlanningTask]:
    """The model, sharded over all ranks, and what its plans are made for."""
    config = model_config(MODEL)
    shape, tree = model_shape(config), world.cluster.default_tree()
    model = build_model(config, seed=0)
    install_layer_runner(model)
    root = LossRoot(model, slice_tokens=2048)
    mesh = make_mesh(world.device.type, tree.num_ranks, tree.num_ranks)
    shard_root(root, mesh, compute_dtype=torch.float32, reduce_dtype=torch.float32)
    links = make_links(
        tree, world.rank, world.device, ranks_per_host=world.cluster.ranks_per_host, timeout=timedelta(seconds=120)
    )
    kernel = choose_kernel(world.device, torch.float32, shape.head_dim)
    executor = Executor(root, shape, links, world.rank, world.device, kernel, AttentionTimer(world.device))
    task = PlanningTask(
        planner="nsp",
        degree=None,
        max_tokens_per_rank=256,  # so small that some sequences are split, and the batch takes several microbatches
        shape=shape,
        cluster=world.cluster,
        tree=tree,
        profile="cpu",
        memory_per_rank_bytes=2**31,
        can=executor_capabilities(shape),
        element_bytes=4,
    )
    return executor, task


def make_pairs(number: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Token ids of pairs of unequal lengths: sorted letters, then shuffled ones."""
    letters = random.Random(0)
    pairs = []
    for _ in range(number):
        length = min(int(letters.paretovariate(1.1) * 8), 400)
        text = letters.choices(range(97, 123), k=length)
        pairs += [np.array(sorted(text)), np.array(text)]
    return pairs


if __name__ == "__main__":
    main()
