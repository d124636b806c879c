"""Long context for real: one sequence of 131,072 tokens beside 500 short ones, one step on 4 CPU ranks.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.long_context

A tiny Qwen3-MoE (2 layers, hidden 64, 4 query and 2 key/value heads of 16), planned by ``nsp``, sharded, recomputed.

- *Peak*: how far each rank's resident memory rises, at its high-water mark during the step, above what it was just
  before; after one warm step of the short sequences. Target: within 15 % of the memory model on the fullest rank.
- *Exact*: every gradient against one process that runs each sequence alone, loss in slices, with PyTorch's own
  attention, on all cores once the ranks are done. Both are float32, so sums of 131,072 tokens differ by rounding, and a
  few tokens may go to another expert.

``--length`` shortens it: time grows with the square. Processor time is printed beside wall time, which on a machine
that does other things too says little. Leaves with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import plain_nll, where
from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.comm.groups import make_links
from nestsp.execute.capability import executor_capabilities
from nestsp.execute.executor import Executor
from nestsp.execute.local import load_local, weighted_sum
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import full_gradients
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.shard import rank_spans
from nestsp.simulate import plan_peak_bytes
from nestsp.train.parallelize import shard_root

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 1 << 20,
}
NUM_SHORT = 500
SLICE_TOKENS = 2048
MEMORY_TARGET = 0.15
# Relative, of each parameter's gradient: sums of 131,072 float32 numbers in two orders; measured 6e-7 at 8,192.
GRADIENT_TARGET = 1e-5
TREE = GroupTree((2, 2))
CPU = torch.device("cpu")
# glibc's mallopt: what is larger is mapped, and given back to the system when it is freed.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 16


def resident_bytes(name: str) -> int:
    """``VmRSS``, what is resident, or ``VmHWM``, the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def make_plan(lengths: list[int]) -> tuple[Plan, float]:
    """The planner's plan, and what the memory model says of its fullest rank beyond the model's states, bytes."""
    shape = model_shape(model_config(MODEL))
    task = PlanningTask(
        planner="nsp",
        degree=None,
        max_tokens_per_rank=-(-sum(lengths) * 5 // (4 * TREE.num_ranks)),
        shape=shape,
        cluster=Cluster(1, TREE.num_ranks),
        tree=TREE,
        profile="cpu",
        memory_per_rank_bytes=4 << 30,
        can=executor_capabilities(shape, recompute=True),
        loss_slice_tokens=SLICE_TOKENS,
        element_bytes=4,
    )
    plan = task.solver()(SequenceBatch.of_lengths(lengths)).plan
    cost = task.cost()
    return plan, float(plan_peak_bytes(plan, cost).max()) - cost.memory.states


def reference(lengths: list[int], tokens: Mapping[int, Any]) -> dict[str, Tensor]:
    """Gradients of one process, each sequence alone; all is kept, some GiB, which spares a second attention."""
    model = build_model(model_config(MODEL), seed=0, attention="sdpa")
    alone = GroupTree(())
    for number, length in enumerate(lengths):
        torch.set_num_threads(os.cpu_count() or 1 if length >= SLICE_TOKENS else 1)  # short ones only wait for threads
        batch = SequenceBatch((number,), (length,))
        plan = Plan.of_groups(alone, batch, [{alone.group(0, 0): [0]}], "reference")
        local = load_local(rank_spans(plan, 0)[0], batch, lambda i, a, b: tokens[i][a:b], CPU)
        weighted_sum(local, plain_nll(model, local, SLICE_TOKENS)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131_072)
    length = parser.parse_args().length
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    rank = dist.get_rank()
    random = np.random.default_rng(0)
    lengths = [length, *random.integers(8, 200, NUM_SHORT).tolist()]
    tokens = {number: random.integers(0, MODEL["vocab_size"], n) for number, n in enumerate(lengths)}
    plan, model_bytes = make_plan(lengths)
    warm = Plan.of_groups(
        TREE,
        SequenceBatch(tuple(range(1, NUM_SHORT + 1)), tuple(lengths[1:])),
        [
            {
                TREE.group(0, 0): list(range(100)),
                **{TREE.group(2, n): list(range(100 * n + 100, 100 * n + 200)) for n in range(4)},
            }
        ],
        "warm-up",
    )
    executor = make_executor(rank)
    start_s = time.perf_counter()
    executor.run(executor.load(warm, lambda i, a, b: tokens[i][a:b]))
    executor.root.zero_grad(set_to_none=False)
    warm_s = time.perf_counter() - start_s
    gc.collect()
    libc.malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, start_s, start_cpu_s = resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    executor.run(executor.load(plan, lambda i, a, b: tokens[i][a:b]))
    step_s, rise = time.perf_counter() - start_s, resident_bytes("VmHWM") - before
    ranks: list[Any] = [None] * TREE.num_ranks
    dist.all_gather_object(ranks, (rise, time.process_time() - start_cpu_s))
    rises, cpu_s = zip(*ranks, strict=True)
    gradients = full_gradients(executor.root, keep=rank == 0)
    dist.destroy_process_group()
    if rank != 0:
        return
    print(f"one of {length:,} tokens and {NUM_SHORT} short ones, {sum(lengths):,} in all, 4 ranks; {where()}")
    print(plan.format_tree())
    print(f"warm step {warm_s:.1f} s, step {step_s:.1f} s, processor time of its ranks {sum(cpu_s):.0f} s")
    off = model_bytes / max(rises) - 1
    print(f"rise of resident memory {', '.join(f'{r / 2**20:.0f}' for r in rises)} MiB", end=", ")
    print(f"memory model {model_bytes / 2**20:.0f} MiB, off by {off:+.1%}; target {MEMORY_TARGET:.0%}", flush=True)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    expected = reference(lengths, tokens)
    reference_s, reference_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    errors = {name: _error(gradients[name], grad) for name, grad in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"reference {reference_s:.1f} s, processor time {reference_cpu_s:.0f} s")
    print(f"{len(errors)} gradients, furthest off: {worst} {errors[worst]:.1e}; target {GRADIENT_TARGET:.0e}")
    reached = abs(off) <= MEMORY_TARGET and errors[worst] <= GRADIENT_TARGET
    print("reached" if reached else "MISSED")
    sys.exit(0 if reached else 1)


def make_executor(rank: int) -> Executor:
    """The model, sharded over all ranks, in float32."""
    config = model_config(MODEL)
    root = LossRoot(build_model(config, seed=0), SLICE_TOKENS)
    install_layer_runner(root.model)
    shard_root(
        root, init_device_mesh("cpu", (TREE.num_ranks,)), compute_dtype=torch.float32, reduce_dtype=torch.float32
    )
    links = make_links(TREE, rank, CPU, ranks_per_host=TREE.num_ranks, timeout=timedelta(hours=1))
    return Executor(root, model_shape(config), links, rank, CPU, CpuFlash(), AttentionTimer(CPU))


def _error(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
