from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.data.lengths import draw_batch, read_lengths
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import GatherTurns, Plan
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, StaticDegree, static_degrees
from nestsp.planners.ground import cost_ground, gather_choices
from nestsp.planners.recompute import spend_memory
from nestsp.planners.search import NestedGroups
from nestsp.schedule import make_schedule
from nestsp.simulate import plan_peak_bytes, simulate

SHAPE = dataclasses.replace(known_model("llama-3.2-1b"), num_layers=4)
CLUSTERS = {"8": Cluster(1, 8), "2x4": Cluster(2, 4), "3x2": Cluster(3, 2), "7": Cluster(1, 7), "1": Cluster(1, 1)}
# A failing example is small as it is, and making it smaller would take minutes.
NO_SHRINKING = (Phase.explicit, Phase.generate)
PLANNERS = (BatchAdaptive, BaspGroups, DisjointGroups, NestedGroups)


def model(name: str, memory_gib: float = 30.0) -> CostModel:
    profile = dataclasses.replace(load_profile("h100"), communicator_bytes=0.0, margin_bytes=0.0)
    return make_cost_model(SHAPE, CLUSTERS[name], profile, memory_per_rank_bytes=memory_gib * 2**30)


LENGTHS = st.lists(st.one_of(st.integers(1, 64), st.integers(1, 4000), st.integers(1, 60_000)), min_size=1, max_size=24)


@given(LENGTHS, st.sampled_from(sorted(CLUSTERS)), st.sampled_from([16.0, 20.0, 60.0]))
@settings(max_examples=30, phases=NO_SHRINKING, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_fits_is_above_the_bound_and_nsp_is_never_slower(
    lengths: list[int], cluster: str, memory_gib: float
) -> None:
    cost = model(cluster, memory_gib)
    ground = cost_ground(cost)
    batch = SequenceBatch.of_lengths(lengths)
    try:
        bound = lower_bound(batch, cost)
        judged = {planner.__name__: planner(ground).judge(batch) for planner in PLANNERS}
    except InfeasibleError:
        return
    for name, one in judged.items():
        one.plan.check()
        assert plan_peak_bytes(one.plan, cost).max() <= cost.memory_per_rank_bytes, name
        assert one.makespan_s == simulate(make_schedule(one.plan), cost).makespan_s
        assert one.makespan_s >= bound.makespan_s * (1 - 1e-9)
    assert judged["NestedGroups"].makespan_s == min(one.makespan_s for one in judged.values())


@given(LENGTHS)
@settings(max_examples=10, phases=NO_SHRINKING, deadline=None)
def test_more_bandwidth_is_never_slower_for_a_fixed_schedule(lengths: list[int]) -> None:
    cost = model("2x4", 60.0)
    batch = SequenceBatch.of_lengths(lengths)
    plan = NestedGroups(cost_ground(cost)).plan(batch)
    times = []
    for bandwidth in (0.25, 1.0, 4.0):
        profile = cost.profile.scaled(bandwidth=bandwidth)
        changed = make_cost_model(SHAPE, cost.cluster, profile, memory_per_rank_bytes=cost.memory_per_rank_bytes)
        times.append(simulate(make_schedule(plan), changed).makespan_s)
    assert times[0] >= times[1] >= times[2]


def test_the_same_input_gives_the_same_plan() -> None:
    lengths = np.random.default_rng(1).integers(1, 20_000, 100).tolist()
    digests = {NestedGroups(cost_ground(model("2x4"))).plan(SequenceBatch.of_lengths(lengths)).digest for _ in range(2)}
    assert len(digests) == 1


def test_nesting_wins_where_one_sequence_is_long_and_the_rest_are_short() -> None:
    cost = make_cost_model(known_model("llama-3.1-8b"), Cluster(2, 8), load_profile("h100"))
    ground = cost_ground(cost)
    batch = SequenceBatch.of_lengths([120_000, *[2_000] * 150])
    static, nested = BatchAdaptive(ground).judge(batch), NestedGroups(ground).judge(batch)
    assert nested.makespan_s < 0.95 * static.makespan_s
    assert len(nested.plan.num_sequences_by_degree()) > 1


def test_static_uses_its_degree_and_names_what_does_not_fit() -> None:
    ground = cost_ground(model("8", 16.0))
    plan = StaticDegree(ground, 4).plan(SequenceBatch.of_lengths([900, 800, 700]))
    assert set(plan.num_sequences_by_degree()) == {4}
    with pytest.raises(InfeasibleError, match=r"sequence 5 \(300,000 tokens\) does not fit on 1 ranks"):
        StaticDegree(ground, 1).plan(SequenceBatch((4, 5), (10, 300_000)))


def test_disjoint_plans_have_no_rank_in_two_groups() -> None:
    ground = cost_ground(model("2x4", 60.0))
    lengths = np.random.default_rng(2).integers(1, 30_000, 40).tolist()
    plan = DisjointGroups(ground).plan(SequenceBatch.of_lengths(lengths))
    for microbatch in plan.microbatches:
        assert all(len(microbatch.on_rank(rank)) <= 1 for rank in range(8))


def test_basp_runs_as_many_groups_as_there_are_sequences() -> None:
    ground = cost_ground(model("8", 60.0))
    for count, degree in ((1, 8), (2, 4), (4, 2), (8, 1)):
        plan = BaspGroups(ground).plan(SequenceBatch.of_lengths([8_000] * count))
        if len(plan.microbatches) == 1:
            assert plan.num_sequences_by_degree() == {degree: count}


@pytest.mark.parametrize("memory_gib", [20.0, 40.0, 200.0])
def test_memory_is_spent_and_never_overspent(memory_gib: float) -> None:
    cost = model("8", memory_gib)
    batch = SequenceBatch.of_lengths([40_000, 9_000, 3_000, 500])
    plan = NestedGroups(cost_ground(cost)).plan(batch)
    again = spend_memory(plan, cost)
    assert plan_peak_bytes(again, cost).max() <= cost.memory_per_rank_bytes
    if memory_gib == 200.0:
        assert all(m.num_kept_layers == SHAPE.num_layers for m in plan.microbatches)
        assert {placement.keep for _, placement in plan.placements()} == {"none"}  # nothing is recomputed


def test_a_kept_output_would_cost_time_where_every_layer_is_kept() -> None:
    cost = model("8", 200.0)
    ground = cost_ground(cost)
    plan = NestedGroups(ground).plan(SequenceBatch.of_lengths([40_000, 9_000, 3_000, 500]))
    kept = tuple(
        dataclasses.replace(m, placements=tuple(dataclasses.replace(p, keep="output") for p in m.placements))
        for m in plan.microbatches
    )
    assert any(p.group.degree > 1 for _, p in plan.placements())
    assert ground.evaluate(plan).makespan_s < ground.evaluate(dataclasses.replace(plan, microbatches=kept)).makespan_s


def test_degrees_of_a_tree_fall() -> None:
    assert static_degrees(Cluster(3, 2).default_tree()) == (6, 2, 1)


def test_gathers_have_a_choice_where_exchanges_take_their_links() -> None:
    cost = make_cost_model(SHAPE, Cluster(4, 2), load_profile("h100"))
    batch = SequenceBatch.of_lengths([9_000, 4_000])
    tree = cost.tree
    inside, across = (
        Plan.of_groups(tree, batch, [{tree.group(level, 0): [0, 1]}], "test") for level in (tree.num_levels - 2, 1)
    )
    assert gather_choices(inside, cost) == (GatherTurns(),)
    choices = gather_choices(across, cost)
    assert choices[0] == GatherTurns()
    assert len(set(choices)) == len(choices) > 3
    for choice in choices:
        plan = dataclasses.replace(across, gathers=choice)
        plan.check()
        assert choice == GatherTurns() or choice.num_levels == 2  # four hosts: the root and pairs of hosts
        assert np.isfinite(simulate(make_schedule(plan), cost).makespan_s)


def test_a_batch_whose_rings_would_wait_behind_gathers_is_near_its_bound() -> None:
    """24 % if gathers follow the first exchanges: the short messages of a ring wait for the slowest of all ranks."""
    cost = make_cost_model(known_model("qwen3-30b-a3b"), Cluster(8, 8), load_profile("h800"))
    samples = read_lengths("wikipedia", num_samples=100_000, seed=2)
    batch = draw_batch(samples, max_tokens=2_000_000, max_length=384_000).batch
    judged = NestedGroups(cost_ground(cost)).judge(batch)
    assert judged.plan.gathers.forward > 1
    assert judged.makespan_s < 1.09 * lower_bound(batch, cost).makespan_s


def test_a_sequence_that_needs_more_ranks_than_there_are_heads_gets_them() -> None:
    cost = make_cost_model(known_model("llama-3.2-1b"), Cluster(8, 8), load_profile("h100"))
    batch = SequenceBatch.of_lengths([400_000] + [2_000] * 200)
    judged, ulysses = (NestedGroups(cost_ground(cost, rings=rings)).judge(batch) for rings in (True, False))
    assert judged.plan.num_sequences_by_degree()[64] == 1
    assert cost.shape.num_heads < 64
    assert judged.makespan_s < 1.1 * lower_bound(batch, cost).makespan_s < 0.6 * ulysses.makespan_s


def test_a_search_that_weighs_room_against_time_finds_faster_plans() -> None:
    cost = make_cost_model(known_model("llama-3.1-8b"), Cluster(1, 8), load_profile("h100"))
    ground = cost_ground(cost)
    batch = draw_batch(read_lengths("arxiv", num_samples=5_000, seed=0), max_tokens=200_000, max_length=131_072).batch
    judged, plain = (NestedGroups(g).judge(batch) for g in (ground, dataclasses.replace(ground, more_guesses=())))
    assert judged.makespan_s < 0.98 * plain.makespan_s
    tokens = [max(plan.rank_tokens(0)) for plan in (judged.plan, plain.plan)]
    assert tokens[0] < tokens[1]
