"""What an executor refuses of a plan, before any collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.comm.groups import Link
from nestsp.errors import PlanError
from nestsp.execute.capability import executor_capabilities
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.plan import Plan
from nestsp.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=8,
    vocab_size=11,
)


def make_executor(tree: GroupTree) -> Executor:
    degrees = {level: tree.degree(level) for level in range(tree.num_levels)}
    no_group = None  # nothing may be sent in these tests
    links: Mapping[int, Link] = {
        level: Link(no_group, degree, None)  # type: ignore[arg-type]
        for level, degree in degrees.items()
        if degree > 1
    }
    return Executor(nn.Linear(1, 1), SHAPE, links, 0, CPU, CpuFlash(), AttentionTimer(CPU))


def plan_for(tree: GroupTree) -> Plan:
    return Plan.of_groups(tree, SequenceBatch.of_lengths([6, 3]), [{tree.group(0, 0): [0, 1]}], "test")


@pytest.mark.parametrize("fanouts", [(), (2,), (2, 2), (3, 2)])
def test_a_plan_for_the_executors_tree_is_accepted(fanouts: tuple[int, ...]) -> None:
    make_executor(GroupTree(fanouts)).check(plan_for(GroupTree(fanouts)))


@pytest.mark.parametrize(("mine", "plans"), [((2, 3), (3, 2)), ((2, 2), (4,)), ((4,), (2, 2)), ((2,), ()), ((), (2,))])
def test_a_plan_for_another_tree_is_refused(mine: tuple[int, ...], plans: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"the plan's tree is \S+, but the ranks have groups of another one"):
        make_executor(GroupTree(mine)).check(plan_for(GroupTree(plans)))


def with_ring(plan: Plan, ring_degree: int) -> Plan:
    (microbatch,) = plan.microbatches
    (placement,) = microbatch.placements
    return replace(plan, microbatches=(replace(microbatch, placements=(replace(placement, ring_degree=ring_degree),)),))


@pytest.mark.parametrize("ring_degree", [1, 2, 4])
def test_ulysses_hybrid_and_ring_are_accepted(ring_degree: int) -> None:
    make_executor(GroupTree((2, 2))).check(with_ring(plan_for(GroupTree((2, 2))), ring_degree))


def test_a_ring_is_refused_where_layers_have_windows() -> None:
    """E3."""
    tree = GroupTree((2, 2))
    windowed = replace(make_executor(tree), shape=replace(SHAPE, window=16))
    windowed.check(plan_for(tree))
    with pytest.raises(
        PlanError, match="microbatch 1, ranks 0-3 has ring degree 2, but the model has layers with a sl"
    ):
        windowed.check(with_ring(plan_for(tree), 2))


def test_any_number_of_the_models_layers_may_be_kept_and_no_more() -> None:
    tree = GroupTree((2, 2))
    plan = plan_for(tree)
    (microbatch,) = plan.microbatches
    for number in range(SHAPE.num_layers + 1):
        make_executor(tree).check(replace(plan, microbatches=(replace(microbatch, num_kept_layers=number),)))
    with pytest.raises(PlanError, match="microbatch 1 keeps 3 layers, but the model has 2; plan for this model"):
        make_executor(tree).check(replace(plan, microbatches=(replace(microbatch, num_kept_layers=3),)))


def test_what_a_run_does_not_want_kept_is_refused() -> None:
    """`train.recompute` as true or false leaves the planner no choice."""
    tree = GroupTree((2, 2))
    (microbatch,) = plan_for(tree).microbatches
    kept = replace(plan_for(tree), microbatches=(replace(microbatch, num_kept_layers=1),))
    executor_capabilities(SHAPE).check(kept)
    for recompute, number in ((True, 0), (False, 2)):
        with pytest.raises(PlanError, match=f"microbatch 1 keeps 1 layer, but this run keeps {number}; plan with"):
            executor_capabilities(SHAPE, recompute=recompute).check(kept)
