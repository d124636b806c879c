"""What every planner keeps, on the ground of a run."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, Group, GroupTree
from nestsp.cost.work import sequence_work
from nestsp.errors import InfeasibleError
from nestsp.plan import Capabilities, Plan
from nestsp.planners import PLANNERS
from nestsp.planners.task import PlanningTask
from nestsp.shape import ModelShape
from nestsp.simulate import imbalance, plan_work
from tests.property.strategies import batches, plans, shapes, trees

# Plans are judged by simulation, 10 to 200 ms each, and every example makes one by every planner. A failing example is
# small as it is, and making it smaller takes minutes: only the profile that looks for new ones does it.
_EXPLORES = not settings().derandomize
_SLOW = settings(max_examples=200) if _EXPLORES else settings(max_examples=15, phases=(Phase.explicit, Phase.generate))
_NUM_SEQUENCES = 10


@st.composite
def caps(draw: st.DrawFn, batch: SequenceBatch, degree: int) -> int:
    """Caps that the longest sequence just meets on so many ranks, misses, or leaves room under."""
    least = -(-max(batch.lengths, default=1) // degree)
    return max(1, least + draw(st.sampled_from([-1, 0, 0, 0, 1, 7, 100, 5000])))


def all_tasks(tree: GroupTree, shape: ModelShape, cap: int | None, recompute: bool = True) -> list[PlanningTask]:
    """Each planner, static with every degree; flexsp apart, whose programmes take seconds."""
    nsp = PlanningTask(
        planner="nsp",
        degree=None,
        max_tokens_per_rank=cap,
        shape=shape,
        cluster=Cluster(1, tree.num_ranks),
        tree=tree,
        profile="h100",
        memory_per_rank_bytes=10**14,
        can=Capabilities(rings=False, num_kept_layers=0 if recompute else shape.num_layers),
    )
    static = [
        dataclasses.replace(nsp, planner="static", degree=degree) for degree in map(tree.degree, range(tree.num_levels))
    ]
    others = [dataclasses.replace(nsp, planner=name) for name in PLANNERS if name not in ("nsp", "static", "flexsp")]
    return [nsp, *others, *static]


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES), st.booleans())
@_SLOW
def test_a_planner_keeps_the_cap_or_names_a_sequence_that_no_plan_can_fit(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch, recompute: bool
) -> None:
    """G15, B11: feasible exactly when the longest sequence fits alone on the largest group; never a silent way out."""
    cap = data.draw(caps(batch, tree.num_ranks))
    for task in all_tasks(tree, shape, cap, recompute):
        degree = task.degree or tree.num_ranks
        if all(-(-length // degree) <= cap for length in batch.lengths):
            planned = task.solver()(batch)
            task.check(planned.plan, task.cost())
            assert planned.plan.max_rank_tokens <= cap
            assert (planned.plan.batch, planned.plan.tree) == (batch, tree)
            assert planned.makespan_s >= planned.bound_s * (1 - 1e-9)
        else:
            with pytest.raises(InfeasibleError) as refused:
                task.solver()(batch)
            named = re.match(r"sequence (\d+) ", str(refused.value))
            assert named
            assert batch.lengths[batch.ids.index(int(named[1]))] == max(batch.lengths)


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES))
@_SLOW
def test_planners_are_deterministic(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = -(-max(batch.lengths, default=1) // 1) + data.draw(st.integers(0, 50))
    for task in all_tasks(tree, shape, cap):
        assert task.solver()(batch).plan == task.solver()(batch).plan


def _contents(plan: Plan) -> list[list[tuple[Group, list[int]]]]:
    return [
        [(p.group, [plan.batch.lengths[s] for s in p.sequences]) for p in microbatch.placements]
        for microbatch in plan.microbatches
    ]


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES))
@_SLOW
def test_a_plan_does_not_depend_on_the_order_of_the_batch(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, 1))
    order = data.draw(st.permutations(range(batch.num_sequences)))
    permuted = SequenceBatch(tuple(batch.ids[i] for i in order), tuple(batch.lengths[i] for i in order))
    for task in all_tasks(tree, shape, max(cap, max(batch.lengths, default=1))):
        assert _contents(task.solver()(batch).plan) == _contents(task.solver()(permuted).plan)


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES))
@_SLOW
def test_nsp_is_never_slower_than_any_other_planner(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, data.draw(st.sampled_from([tree.degree(v) for v in range(tree.num_levels)]))))
    nsp, *others = all_tasks(tree, shape, cap)
    if any(-(-length // tree.num_ranks) > cap for length in batch.lengths):
        return
    nested = nsp.solver()(batch)
    for task in others:
        try:
            other = task.solver()(batch)
        except InfeasibleError:
            continue
        assert nested.makespan_s <= other.makespan_s * (1 + 1e-12)


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES))
@_SLOW
def test_no_microbatch_is_empty_unless_the_batch_is(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, 1))
    for task in all_tasks(tree, shape, max(cap, max(batch.lengths, default=1))):
        plan = task.solver()(batch).plan
        assert len(plan.microbatches) >= 1
        assert all(m.placements for m in plan.microbatches) or not batch.num_sequences


@given(st.data(), trees(16), shapes(), batches(_NUM_SEQUENCES))
@_SLOW
def test_static_places_every_sequence_at_its_degree(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    for task in all_tasks(tree, shape, max(batch.lengths, default=1)):
        if task.degree is not None:
            wanted = {task.degree: batch.num_sequences} if batch.num_sequences else {}
            assert task.solver()(batch).plan.num_sequences_by_degree() == wanted


@given(plans(max_ranks=16), shapes())
def test_the_work_of_all_ranks_is_the_work_of_all_sequences(plan: Plan, shape: ModelShape) -> None:
    work = plan_work(plan, shape)
    whole = [sequence_work(shape, length) for length in plan.batch.lengths]
    ranks = [rank for microbatch in work for rank in microbatch]
    assert math.isclose(sum(r.linear for r in ranks), sum(w.linear for w in whole), rel_tol=1e-9)
    assert math.isclose(sum(r.attention for r in ranks), sum(w.attention for w in whole), rel_tol=1e-9)
    assert imbalance(work) >= -1e-9
    slowest = sum(max(rank.total for rank in microbatch) for microbatch in work)
    assert slowest >= sum(w.total for w in whole) / plan.tree.num_ranks * (1 - 1e-9)
