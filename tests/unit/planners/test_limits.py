"""The ground of a run: both limits, and what the executor can run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import Capabilities, Keep
from nestsp.planners.ground import cost_ground
from nestsp.planners.limits import CappedGround, check_cap, run_ground
from nestsp.planners.search import NestedGroups
from nestsp.simulate import plan_peak_bytes

SHAPE = dataclasses.replace(known_model("llama-3.2-1b"), num_layers=4)
TREE = GroupTree((2, 2))
RECOMPUTES = Capabilities(rings=False, num_kept_layers=0)
KEEPS = Capabilities(rings=False, num_kept_layers=4)


def cost(memory_gib: float) -> CostModel:
    profile = dataclasses.replace(load_profile("h100"), communicator_bytes=0.0, margin_bytes=0.0)
    return make_cost_model(SHAPE, Cluster(2, 2), profile, tree=TREE, memory_per_rank_bytes=memory_gib * 2**30)


BATCH = SequenceBatch.of_lengths([40_000, 9_000, 3_000, 500, 20])


def test_without_a_cap_and_with_every_capability_it_is_the_cost_models_own_ground() -> None:
    own, ours = cost_ground(cost(60)), run_ground(cost(60), Capabilities())
    assert ours.bytes_per_token == own.bytes_per_token
    assert NestedGroups(ours).plan(BATCH) == NestedGroups(own).plan(BATCH)


@pytest.mark.parametrize("cap", [1, 7, 1024, 2304, 100_003])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sequences_fill_a_cap_to_the_token_and_no_further(cap: int, level: int) -> None:
    ground = run_ground(cost(1e6), RECOMPUTES, cap)
    degree = TREE.degree(level)
    sizes = ground.bytes(np.array([1.0, cap * degree, cap * degree + 1.0]))[level]
    assert cap * sizes[0] <= ground.free_bytes < (cap + 1) * sizes[0]
    assert sizes[1] <= ground.free_bytes < sizes[2]
    assert ground.least_microbatches(SequenceBatch.of_lengths([4 * cap])) == 1
    assert ground.least_microbatches(SequenceBatch.of_lengths([4 * cap, 1])) == 2


def test_where_memory_is_scarcer_than_the_cap_memory_decides() -> None:
    free, capped = run_ground(cost(16), RECOMPUTES), run_ground(cost(16), RECOMPUTES, 10**9)
    assert isinstance(capped, CappedGround)
    lengths = np.array([1.0, 700.0, 90_000.0])
    assert (free.bytes(lengths) == capped.bytes(lengths)).all()
    assert capped.bytes_per_token == free.bytes_per_token


@pytest.mark.parametrize("cap", [None, 14_000])
@pytest.mark.parametrize("memory_gib", [16.0, 17.0, 40.0])
def test_plans_keep_both_limits_and_recompute_every_layer(memory_gib: float, cap: int | None) -> None:
    model = cost(memory_gib)
    plan = NestedGroups(run_ground(model, RECOMPUTES, cap)).plan(BATCH)
    plan.check(max_tokens_per_rank=cap)
    RECOMPUTES.check(plan)
    assert plan_peak_bytes(plan, model).max() <= model.memory_per_rank_bytes


def test_outputs_are_kept_where_memory_allows_longest_first() -> None:
    kept: list[set[Keep]] = []
    for memory_gib in (15.2, 40.0):
        plan = NestedGroups(run_ground(cost(memory_gib), RECOMPUTES)).plan(BATCH)
        kept.append({placement.keep for _, placement in plan.placements()})
    assert kept[1] == {"output"}
    keeps_none = dataclasses.replace(RECOMPUTES, kept_outputs=False)
    plan = NestedGroups(run_ground(cost(40.0), keeps_none)).plan(BATCH)
    assert {placement.keep for _, placement in plan.placements()} == {"none"}


def test_a_plan_that_keeps_outputs_is_estimated_faster() -> None:
    keeps_none = dataclasses.replace(RECOMPUTES, kept_outputs=False)
    with_outputs, without = (NestedGroups(run_ground(cost(60), can)).judge(BATCH) for can in (RECOMPUTES, keeps_none))
    assert with_outputs.makespan_s < without.makespan_s


def test_without_recomputation_every_layer_is_kept_and_fits() -> None:
    model = cost(24)
    plan = NestedGroups(run_ground(model, KEEPS)).plan(BATCH)
    KEEPS.check(plan)
    assert plan_peak_bytes(plan, model).max() <= model.memory_per_rank_bytes
    assert {placement.keep for _, placement in plan.placements()} == {"none"}


def test_a_sequence_that_only_recomputation_makes_fit_is_refused_without() -> None:
    model, batch = cost(20), SequenceBatch((7,), (300_000,))
    run_ground(model, RECOMPUTES).check(batch)
    with pytest.raises(
        InfeasibleError, match=r"sequence 7 \(300,000 tokens\) needs .* GiB on a rank even on the group"
    ):
        run_ground(model, KEEPS).check(batch)


def test_a_sequence_over_the_cap_is_named_with_need_cap_and_remedies() -> None:
    ground = run_ground(cost(60), RECOMPUTES, 1023)
    with pytest.raises(InfeasibleError) as refused:
        ground.check(SequenceBatch((77, 78), (9, 4096)))
    assert str(refused.value) == (
        "sequence 78 (4,096 tokens) needs 1,024 tokens on each of 4 ranks, but planner.max_tokens_per_rank is 1,023; "
        "raise it to 1,024, take 5 ranks, or set data.max_length"
    )


def test_check_cap_names_the_longest_by_the_name_it_was_given() -> None:
    check_cap(TREE, 10, [], [])
    check_cap(TREE, 10, [5, 6], [1, 40])
    with pytest.raises(InfeasibleError, match="sequence 6 "):
        check_cap(TREE, 10, [5, 6, 7], [1, 48, 41])
    with pytest.raises(InfeasibleError, match="on each of 1 rank, "):
        check_cap(GroupTree(()), 10, [5], [11])


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="the model needs "):
        run_ground(cost(1), RECOMPUTES, 100)
