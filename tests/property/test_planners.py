"""What every planner keeps."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.cost.work import sequence_work
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners import NspPlanner, Planner, StaticPlanner
from nestsp.planners.packing import Loads
from nestsp.shape import ModelShape
from nestsp.simulate import imbalance, plan_work, slowest_work
from tests.property.strategies import batches, plans, shapes, trees


@st.composite
def caps(draw: st.DrawFn, batch: SequenceBatch, degree: int) -> int:
    """Caps that the longest sequence just meets on so many ranks, misses, or leaves room under."""
    least = -(-max(batch.lengths, default=1) // degree)
    return max(1, least + draw(st.sampled_from([-1, 0, 0, 0, 1, 7, 100, 5000])))


def all_planners(tree: GroupTree, shape: ModelShape, cap: int) -> list[tuple[int, Planner]]:
    """Each planner with the largest degree it can use."""
    static = [(d, StaticPlanner(tree, shape, cap, d)) for d in map(tree.degree, range(tree.num_levels))]
    return [(tree.num_ranks, NspPlanner(tree, shape, cap)), *static]


@given(st.data(), trees(16), shapes(), batches())
def test_a_planner_keeps_the_cap_or_names_a_sequence_that_no_plan_can_fit(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    """G15, B11: feasible exactly when the longest sequence fits alone on the largest group; never a silent way out."""
    cap = data.draw(caps(batch, tree.num_ranks))
    for degree, planner in all_planners(tree, shape, cap):
        if all(-(-length // degree) <= cap for length in batch.lengths):
            plan = planner.plan(batch)
            plan.check(max_tokens_per_rank=cap)
            assert plan.max_rank_tokens <= cap
            assert (plan.batch, plan.tree) == (batch, tree)
        else:
            with pytest.raises(InfeasibleError) as refused:
                planner.plan(batch)
            named = re.match(r"sequence (\d+) ", str(refused.value))
            assert named
            assert batch.lengths[batch.ids.index(int(named[1]))] == max(batch.lengths)


@given(st.data(), trees(16), shapes(), batches())
def test_planners_are_deterministic(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = -(-max(batch.lengths, default=1) // 1) + data.draw(st.integers(0, 50))
    for (_, first), (_, second) in zip(all_planners(tree, shape, cap), all_planners(tree, shape, cap), strict=True):
        assert first.plan(batch) == second.plan(batch)


def _contents(plan: Plan) -> list[list[tuple[Group, list[int]]]]:
    return [
        [(p.group, [plan.batch.lengths[s] for s in p.sequences]) for p in microbatch.placements]
        for microbatch in plan.microbatches
    ]


@given(st.data(), trees(16), shapes(), batches())
def test_a_plan_does_not_depend_on_the_order_of_the_batch(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, 1))
    order = data.draw(st.permutations(range(batch.num_sequences)))
    permuted = SequenceBatch(tuple(batch.ids[i] for i in order), tuple(batch.lengths[i] for i in order))
    for _, planner in all_planners(tree, shape, max(cap, max(batch.lengths, default=1))):
        assert _contents(planner.plan(batch)) == _contents(planner.plan(permuted))


@given(st.data(), trees(16), shapes(), batches())
def test_nsp_never_needs_more_microbatches_than_a_static_degree_nor_a_ninth_more_work(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, data.draw(st.sampled_from([tree.degree(v) for v in range(tree.num_levels)]))))
    planners = all_planners(tree, shape, cap)
    if any(-(-length // tree.num_ranks) > cap for length in batch.lengths):
        return
    nested = planners[0][1].plan(batch)
    work = slowest_work(plan_work(nested, shape)).total
    for _, static in planners[1:]:
        try:
            plan = static.plan(batch)
        except InfeasibleError:
            continue
        assert len(nested.microbatches) <= len(plan.microbatches)
        if len(nested.microbatches) == len(plan.microbatches):
            assert 0.9 * work <= slowest_work(plan_work(plan, shape)).total * (1 + 1e-12)


@given(st.data(), trees(16), shapes(), batches())
def test_no_microbatch_is_empty_unless_the_batch_is(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    cap = data.draw(caps(batch, 1))
    for _, planner in all_planners(tree, shape, max(cap, max(batch.lengths, default=1))):
        plan = planner.plan(batch)
        assert len(plan.microbatches) >= 1
        assert all(m.placements for m in plan.microbatches) or not batch.num_sequences


@given(st.data(), trees(16), shapes(), batches())
def test_static_places_every_sequence_at_its_degree(
    data: st.DataObject, tree: GroupTree, shape: ModelShape, batch: SequenceBatch
) -> None:
    degree = data.draw(st.sampled_from([tree.degree(level) for level in range(tree.num_levels)]))
    plan = StaticPlanner(tree, shape, max(batch.lengths, default=1), degree).plan(batch)
    assert plan.num_sequences_by_degree() == ({degree: batch.num_sequences} if batch.num_sequences else {})


@given(plans(max_ranks=16), shapes())
def test_the_work_of_all_ranks_is_the_work_of_all_sequences(plan: Plan, shape: ModelShape) -> None:
    work = plan_work(plan, shape)
    whole = [sequence_work(shape, length) for length in plan.batch.lengths]
    ranks = [rank for microbatch in work for rank in microbatch]
    assert math.isclose(sum(r.linear for r in ranks), sum(w.linear for w in whole), rel_tol=1e-9)
    assert math.isclose(sum(r.attention for r in ranks), sum(w.attention for w in whole), rel_tol=1e-9)
    assert imbalance(work) >= -1e-9
    assert slowest_work(work).total >= sum(w.total for w in whole) / plan.tree.num_ranks * (1 - 1e-9)


@given(st.data(), plans(max_ranks=16), shapes())
def test_loads_know_each_ranks_tokens_to_the_token_and_find_the_best_bin(
    data: st.DataObject, plan: Plan, shape: ModelShape
) -> None:
    """Against the plan's own counts, and against trying every bin."""
    tree, batch = plan.tree, plan.batch
    cap = data.draw(st.integers(1, 4000))
    loads = Loads.empty(tree, shape, cap, len(plan.microbatches))
    for number, placement in plan.placements():
        for position in placement.sequences:
            loads.place(number, placement.group, position, batch.lengths[position])
    assert [list(row) for row in loads.tokens] == [plan.rank_tokens(m) for m in range(len(plan.microbatches))]

    length, level = data.draw(st.integers(1, 3000)), data.draw(st.integers(0, tree.num_levels - 1))
    larger = SequenceBatch.of_lengths([*batch.lengths, length])
    peaks = []
    for number in range(len(plan.microbatches)):
        for group in tree.groups(level):
            groups = [{p.group: p.sequences for p in m.placements} for m in plan.microbatches]
            groups[number][group] = (*groups[number].get(group, ()), batch.num_sequences)
            if max(Plan.of_groups(tree, larger, groups, "tried").rank_tokens(number)[r] for r in group.ranks) <= cap:
                after = Loads.empty(tree, shape, cap, len(plan.microbatches))
                after.work = loads.work.copy()
                after.place(number, group, 0, length)
                peaks.append((float(np.max(after.work[number, list(group.ranks)])), number, group))
    assert loads.best_bin(level, length) == min(peaks, default=None)
