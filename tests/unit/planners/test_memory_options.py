"""Planners keep a rank's memory under every choice of how a run holds its state."""

from __future__ import annotations

import dataclasses

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.memory import MemoryOptions
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import Capabilities
from nestsp.planners import PLANNERS
from nestsp.planners.task import PlanningTask

GIB = 2**30
TASK = PlanningTask(
    planner="nsp",
    degree=None,
    max_tokens_per_rank=None,
    shape=known_model("qwen3-0.6b"),
    cluster=Cluster(1, 4),
    tree=GroupTree((2, 2)),
    profile="h100",
    memory_per_rank_bytes=24 * GIB,
    can=Capabilities(),
)
OPTIONS = {
    "a whole model on each rank": MemoryOptions(num_shards=1),
    "two copies": MemoryOptions(num_shards=2),
    "adapters": MemoryOptions(num_trained=1_000_000),
    "slices": MemoryOptions(mlp_slice_tokens=1024),
    "offloaded": MemoryOptions(offloads_inputs=True),
    "forward only": MemoryOptions(forward_only=True),
    "all together": MemoryOptions(2, 1_000_000, 1024, True, True),
}
BATCH = SequenceBatch.of_lengths([40_000, 9_000, 7_000, 4_000, 2_000, 900, 300, 1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_keeps_the_limit(planner: str, options: MemoryOptions) -> None:
    task = dataclasses.replace(TASK, planner=planner, memory=options, degree=4 if planner == "static" else None)
    planned = task.solver()(BATCH)
    task.check(planned.plan, task.cost())
    assert planned.gap >= -1e-9


def longest(options: MemoryOptions) -> int:
    """Tokens of the longest sequence that fits, to a hundredth."""
    task = dataclasses.replace(TASK, memory=options)
    low, high = 1, 2**24
    while high - low > low // 100 + 1:
        middle = (low + high) // 2
        try:
            task.check_longest(SequenceBatch.of_lengths([middle]))
            low = middle
        except InfeasibleError:
            high = middle
    return low


def test_what_saves_memory_lets_longer_sequences_fit() -> None:
    plain = longest(MemoryOptions())
    assert longest(MemoryOptions(num_shards=1)) < plain
    assert longest(MemoryOptions(num_trained=1_000_000)) > plain
    assert longest(MemoryOptions(mlp_slice_tokens=1024)) > 1.05 * plain
    assert longest(MemoryOptions(offloads_inputs=True)) > 1.2 * plain
    assert longest(MemoryOptions(forward_only=True)) > 1.5 * plain
