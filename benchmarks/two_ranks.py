"""What nesting saves on two ranks: bytes exchanged and wall time against static degree 2, on the same batches.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.two_ranks

Batches are those of the quickstart's corpus in which at least a quarter of the tokens lie in sequences over the cap of
one rank, so that some must be split; what share they are is printed, for nesting cannot exchange less than that share.
Targets: at most half of the bytes, at most the time.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import make_executor, quickstart, ratio, where
from nestsp.cluster import Cluster, GroupTree
from nestsp.data.samples import open_samples
from nestsp.data.stream import DataState, SampleStream
from nestsp.execute.capability import executor_capabilities
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.train.update import make_optimizer, update

CAP = 4608
PROFILE = str(Path(__file__).parent.parent / "examples" / "slow-links.yaml")
TOKENS_PER_STEP = 24_576
NUM_BATCHES = 10
LEAST_SHARE = 0.25
BYTES_TARGET, TIME_TARGET = 0.5, 1.0


class BytesSent:
    """Counts what `all_to_all_single` sends to other ranks, by standing in front of it."""

    def __init__(self, rank: int) -> None:
        self.total = 0
        self._rank = rank
        self._send = dist.all_to_all_single
        setattr(dist, "all_to_all_single", self._counted)  # noqa: B010  (mypy will not have a function assigned)

    def _counted(self, output: Any, input: Any, out_sizes: Any, in_sizes: Any, **kwargs: Any) -> Any:
        mine = dist.get_group_rank(kwargs["group"], self._rank)
        self.total += (sum(in_sizes) - in_sizes[mine]) * input.element_size()
        return self._send(output, input, out_sizes, in_sizes, **kwargs)

    def take(self) -> int:
        """Bytes since the last call."""
        total, self.total = self.total, 0
        return total


def main() -> None:
    """Measure and print."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = quickstart()
    tree = GroupTree((2,))
    executor = make_executor(config, tree, rank)
    optimizer = make_optimizer(executor.root, config.train, fused=False)
    samples = open_samples(config.data)
    stream = SampleStream(samples.lengths, seed=1, tokens_per_step=TOKENS_PER_STEP)
    nested = PlanningTask(
        planner="nsp",
        degree=None,
        max_tokens_per_rank=CAP,
        shape=executor.shape,
        cluster=Cluster(1, 2),
        tree=tree,
        profile=PROFILE,
        memory_per_rank_bytes=4 * 2**30,
        can=executor_capabilities(executor.shape, recompute=True),
        element_bytes=4,
    )
    solvers = (nested.solver(), dataclasses.replace(nested, planner="static", degree=2).solver())
    counter = BytesSent(rank)

    def measure(plan: Plan) -> tuple[float, int]:
        dist.barrier()
        start = time.perf_counter()
        executor.run(executor.load(plan, samples.read))
        update(executor.root, optimizer, total_weight=samples.targets(plan.batch).weight, max_grad_norm=1.0, lr=1e-4)
        dist.barrier()
        return time.perf_counter() - start, counter.take()

    seconds: tuple[list[float], list[float]] = ([], [])
    sent: tuple[list[int], list[int]] = ([], [])
    shares: list[float] = []
    state = DataState()
    number = 0
    while len(shares) < NUM_BATCHES:
        batch, state = stream.take(state)
        share = sum(n for n in batch.lengths if n > CAP) / batch.num_tokens
        if share < LEAST_SHARE:
            continue
        plans = [solve(batch).plan for solve in solvers]
        if number == 0:
            for plan in plans:
                measure(plan)
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            step_s, num_bytes = measure(plans[which])
            seconds[which].append(step_s)
            sent[which].append(num_bytes)
        shares.append(share)
        number += 1
    totals = torch.tensor([sum(sent[0]), sum(sent[1])])
    dist.all_reduce(totals)
    if rank == 0:
        by_bytes = totals[0].item() / totals[1].item()
        by_time = ratio(seconds[0], seconds[1])
        print(f"two ranks, {NUM_BATCHES} batches, cap {CAP:,} tokens a rank; {where()}")
        print(
            f"tokens in sequences over the cap: median {np.median(shares):.0%} of a batch, {min(shares):.0%} to "
            f"{max(shares):.0%}"
        )
        print(
            f"bytes exchanged, nested / static: {by_bytes:.3f}; target at most {BYTES_TARGET}: "
            f"{'reached' if by_bytes <= BYTES_TARGET else 'MISSED'}"
        )
        print(
            f"time, nested / static: {by_time}; target at most {TIME_TARGET}: "
            f"{'reached' if by_time.median <= TIME_TARGET else 'MISSED'}"
        )
        for name, index in (("nested", 0), ("static", 1)):
            print(f"{name}: {np.median(seconds[index]):.3f} s a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
