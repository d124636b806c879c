"""Parameters are gathered where the Schedule says: once a layer and pass, one layer ahead, in one order on all ranks.

That the order of everything issued is the Schedule's, also for drawn plans, is part of every comparison; see
`schedule_faults`. Here are the runs that have no such order: frozen layers, evaluation, other shardings, a failed run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from nestsp.attention.gathers import Gathers
from nestsp.cluster import GroupTree
from nestsp.model.adapter import decoder_layers
from nestsp.plan import GatherTurns, Plan
from nestsp.schedule import Pass
from tests.distributed.equivalence import (
    GATHER,
    LLAMA,
    QWEN3_MOE,
    ROOT,
    Case,
    load,
    make_executor,
    make_tokens,
    order_faults,
    recorded,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import check, nested_plan

TREE = GroupTree((2, 2))
FORWARD, BACKWARD = [ROOT, 0, 1, 2], [2, 1, 0]


def plan_with(forward: int, backward: int, num_levels: int = TREE.num_levels, keep: Any = "none") -> Plan:
    return replace(nested_plan(TREE, keep), gathers=GatherTurns(forward, backward, num_levels))


def test_nested_plans_with_gathers_anywhere_give_the_gradients_of_one_process(pool: RankPool) -> None:
    """At the layers' start, between exchanges, after the last, and among those of some levels only."""
    places = [(0, 3), (1, 2), (2, 1), (3, 0)]
    cases = [Case(LLAMA, plan_with(*place).to_json(), number % 2 == 0) for number, place in enumerate(places)]
    cases += [Case(QWEN3_MOE, plan_with(9, 9, num_levels, "output").to_json()) for num_levels in (1, 2)]
    check(pool, cases)


def gathered(rank: int, num_ranks: int, case: Case, num_shards: int) -> tuple[list[list[int]], list[str]]:
    """Units that were gathered in each microbatch of a run and of an evaluation, and faults of the order."""
    executor = make_executor(case, rank, num_shards=num_shards)
    local = load(executor, case.made, make_tokens(case.made))
    found, logs = [], []
    for run in (executor.run, executor.measure):
        for microbatch in local.microbatches:
            with recorded(executor, case.made) as log:
                run(replace(local, microbatches=(microbatch,)))
            found.append([unit for level, unit in log.issued if level == GATHER])
            every: list[Any] = [None] * num_ranks
            dist.all_gather_object(every, log)
            logs.append(every)
    return found, [fault for every in logs for fault in order_faults(every)]


@pytest.mark.parametrize(
    ("trainable", "backward"),
    [
        (None, BACKWARD),
        (("layers.1.",), [2, 1]),  # nothing comes to the frozen layer before
        (("layers.1.mlp.down",), [2, 1]),  # nor does anything to that layer's attention
        (("layers.2.self_attn.q_proj",), [2]),
        (("embed_tokens",), BACKWARD),
    ],
)
def test_frozen_layers_are_gathered_no_more_often_than_they_run(
    pool: RankPool, trainable: tuple[str, ...] | None, backward: list[int]
) -> None:
    case = Case(LLAMA, plan_with(1, 1).to_json(), trainable=trainable)
    for found, faults in pool.run(gathered, case, 4, ranks=4):
        assert found == [FORWARD + backward] * 3 + [FORWARD] * 3
        assert faults == []


@pytest.mark.parametrize(("num_shards", "run"), [(2, FORWARD + BACKWARD), (1, [])])
def test_replicas_gather_among_their_own_shards(pool: RankPool, num_shards: int, run: list[int]) -> None:
    """Where every rank has all parameters, there is nothing to gather."""
    for found, faults in pool.run(gathered, Case(LLAMA, plan_with(1, 2).to_json()), num_shards, ranks=4):
        assert found == [run] * 3 + [run[: len(FORWARD)]] * 3
        assert faults == []


class AttentionError(Exception):
    pass


def run_after_failures(rank: int, num_ranks: int, case: Case) -> list[list[torch.Tensor]]:
    """Gradients of a run; then again, each time after one that failed on all ranks in one of two passes."""
    executor = make_executor(case, rank)
    local = load(executor, case.made, make_tokens(case.made))
    found = []
    for failing in (None, Pass.FORWARD, Pass.BACKWARD):
        if failing is not None:
            fail_in(executor, local, failing)
        executor.root.zero_grad()
        executor.run(local)
        assert not any(is_gathered(layer) for layer in decoder_layers(executor.root))
        found.append([p.grad.full_tensor() for p in executor.root.parameters()])  # type: ignore[union-attr]
    return found


def fail_in(executor: Any, local: Any, failing: Pass) -> None:
    """Fail when the first layer of a pass has issued the next one's gather, with its parameters in flight."""
    took = Gathers.took

    def fail(gathers: Gathers, layer: int, which: Pass, num_turns: int) -> None:
        was_due = gathers._is_due.get((which, layer))
        took(gathers, layer, which, num_turns)
        if which is failing and was_due and not gathers._is_due[which, layer]:
            raise AttentionError

    with patch.object(Gathers, "took", fail), pytest.raises(AttentionError):
        executor.run(local)


def is_gathered(layer: Any) -> bool:
    assert isinstance(layer, FSDPModule)
    (group,) = layer._get_fsdp_state()._fsdp_param_groups
    return bool(group._all_gather_result is not None or group.is_unsharded)


def test_a_run_that_fails_with_a_gather_in_flight_leaves_none_behind_and_the_next_is_right(pool: RankPool) -> None:
    for first, *others in pool.run(run_after_failures, Case(LLAMA, plan_with(1, 1).to_json()), ranks=4):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
