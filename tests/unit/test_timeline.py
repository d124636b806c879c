from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, Group
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import GatherTurns, Keep, Microbatch, Placement, Plan
from nestsp.schedule import Pass, make_schedule, num_exchanges
from nestsp.simulate import Timeline, place_gathers, simulate

SHAPE = dataclasses.replace(known_model("qwen3-30b-a3b"), num_layers=12, num_moe_layers=12)
PROFILE = load_profile("h100")
ROUNDING = 1e-9  # of clocks that are sums of some thousand float64 terms


def model(num_hosts: int = 2, ranks_per_host: int = 4, **changes: float) -> CostModel:
    profile = dataclasses.replace(PROFILE, **changes)  # type: ignore[arg-type]
    return make_cost_model(SHAPE, Cluster(num_hosts, ranks_per_host), profile)


ACROSS = GatherTurns(1, 1, 1)  # after the first exchanges of the groups that cross two hosts


def nested(
    cost: CostModel,
    *,
    ring: int = 1,
    slices: int = 1,
    keep: Keep = "none",
    kept_layers: int = 0,
    gathers: GatherTurns = ACROSS,
) -> Plan:
    """One long sequence on all ranks, two middle ones on one host each, short ones on six of eight ranks."""
    tree = cost.tree
    batch = SequenceBatch.of_lengths([60_000, 20_000, 9_000, 4_000, 3_000, 2_000, 2_000, 500, 1])
    groups = [tree.group(0, 0), tree.group(1, 0), tree.group(1, 4), *(tree.group(3, rank) for rank in range(6))]
    placements = tuple(
        Placement(
            group,
            (position,),
            ring if group.level == 0 else 1,
            keep if group.degree > 1 else "none",
            slices if group.level == 0 else 1,
        )
        for position, group in enumerate(groups)
    )
    plan = Plan(tree, batch, (Microbatch(placements, kept_layers),), tuple(range(tree.num_levels)), "test", gathers)
    plan.check()
    return plan


def timeline(plan: Plan, cost: CostModel, *, streaming: bool = True, record: bool = False) -> Timeline:
    return simulate(make_schedule(plan, streaming=streaming), cost, record=record)


VARIANTS = [
    pytest.param(1, "none", 0, id="ulysses"),
    pytest.param(1, "output", 0, id="kept-output"),
    pytest.param(1, "none", 5, id="kept-layers"),
    pytest.param(1, "none", 12, id="all-layers-kept"),
    pytest.param(8, "none", 0, id="ring"),
    pytest.param(2, "output", 3, id="hybrid"),
]


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize(("num_ranks", "ring"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (3, 3), (2, 2), (1, 1)])
def test_as_many_exchanges_are_priced_as_the_schedule_has(num_ranks: int, ring: int, keep: Keep) -> None:
    """The executor issues those of the schedule, which a distributed test counts."""
    cost = model(1, num_ranks)
    placement = Placement(cost.tree.group(0, 0), (0,), ring, keep)
    assert len(cost.comm.forward(0, ring)) == num_exchanges(placement, Pass.FORWARD)
    assert len(cost.comm.backward(0, ring, kept=keep == "output")) == num_exchanges(placement, Pass.BACKWARD)
    plan = Plan(
        cost.tree, SequenceBatch.of_lengths([600]), (Microbatch((placement,)),), tuple(range(cost.tree.num_levels)), ""
    )
    assert timeline(plan, cost).makespan_s > 0


@pytest.mark.parametrize(("ring", "keep", "kept_layers"), VARIANTS)
@pytest.mark.parametrize("streaming", [True, False])
def test_passing_over_layers_gives_what_walking_each_gives(
    ring: int, keep: Keep, kept_layers: int, streaming: bool
) -> None:
    cost = model()
    plan = nested(cost, ring=ring, keep=keep, kept_layers=kept_layers)
    short = timeline(plan, cost, streaming=streaming)
    full = timeline(plan, cost, streaming=streaming, record=True)
    assert short.makespan_s == pytest.approx(full.makespan_s, rel=ROUNDING)
    np.testing.assert_allclose(short.exchanging_s, full.exchanging_s, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(short.computing_s, full.computing_s, rtol=ROUNDING)


@pytest.mark.parametrize(("ring", "keep", "kept_layers"), VARIANTS)
def test_every_second_of_a_rank_is_computing_exchanging_or_waiting(ring: int, keep: Keep, kept_layers: int) -> None:
    cost = model()
    result = timeline(nested(cost, ring=ring, keep=keep, kept_layers=kept_layers), cost, record=True)
    total = result.computing_s + result.exchanging_s + result.waiting_s
    np.testing.assert_allclose(total, result.makespan_s, rtol=ROUNDING)
    assert (result.waiting_s >= 0).all()
    recorded = np.zeros(8)
    for event in result.events:
        if event.track == "computation":
            np.add.at(recorded, event.ranks, event.ends_s - event.starts_s)
    np.testing.assert_allclose(recorded, result.computing_s, rtol=ROUNDING)


@pytest.mark.parametrize(("ring", "keep", "kept_layers"), VARIANTS)
def test_no_stream_of_a_rank_does_two_things_at_once(ring: int, keep: Keep, kept_layers: int) -> None:
    cost = model()
    result = timeline(nested(cost, ring=ring, keep=keep, kept_layers=kept_layers), cost, record=True)
    for rank, track in itertools.product(range(8), ("computation", "host links", "network")):
        spans = sorted(
            (float(start), float(end))
            for event in result.events
            if event.track == track
            for start, end in zip(event.starts_s[event.ranks == rank], event.ends_s[event.ranks == rank], strict=True)
        )
        assert all(first[1] <= second[0] + 1e-12 for first, second in itertools.pairwise(spans))


def test_streaming_hides_exchanges_behind_other_groups_attention() -> None:
    cost = model(network_bytes_per_s=20e9)
    plan = nested(cost)
    streamed, in_turn = timeline(plan, cost), timeline(plan, cost, streaming=False)
    assert streamed.makespan_s < in_turn.makespan_s
    np.testing.assert_allclose(streamed.computing_s, in_turn.computing_s)


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("num_slices", [2, 4])
def test_slices_of_heads_hide_a_groups_exchanges_behind_its_own_attention(num_slices: int, keep: Keep) -> None:
    """One long sequence on all ranks, and nothing beside it."""
    cost = model(1, 8)
    batch = SequenceBatch.of_lengths([400_000])
    order = tuple(range(cost.tree.num_levels))
    one, some = (
        timeline(
            Plan(cost.tree, batch, (Microbatch((Placement(cost.tree.group(0, 0), (0,), 1, keep, n),)),), order, ""),
            cost,
        )
        for n in (1, num_slices)
    )
    assert some.exchanging_s.mean() < 0.9 * one.exchanging_s.mean()  # gathers and reductions are in both
    assert some.makespan_s < one.makespan_s
    assert (some.peak_bytes == one.peak_bytes).all()


@pytest.mark.parametrize(("ring", "num_slices"), [(8, 1), (2, 1), (1, 4)])
def test_without_streaming_a_groups_own_attention_hides_nothing_either(ring: int, num_slices: int) -> None:
    """One long sequence on all ranks: there is nothing else that could hide its exchanges."""
    cost = model(1, 8)
    order = tuple(range(cost.tree.num_levels))
    placement = Placement(cost.tree.group(0, 0), (0,), ring, "none", num_slices)
    plan = Plan(cost.tree, SequenceBatch.of_lengths([400_000]), (Microbatch((placement,)),), order, "")
    streamed, in_turn = timeline(plan, cost), timeline(plan, cost, streaming=False)
    assert in_turn.exchanging_s.mean() > 1.05 * streamed.exchanging_s.mean()  # a hybrid hides one pass of several
    assert in_turn.makespan_s > streamed.makespan_s
    np.testing.assert_allclose(streamed.computing_s, in_turn.computing_s)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("keep", ["none", "output"])
def test_sliced_groups_are_walked_like_all_others(streaming: bool, keep: Keep) -> None:
    cost = model()
    plan = nested(cost, slices=4, keep=keep, kept_layers=2)
    plan.check()
    short = timeline(plan, cost, streaming=streaming)
    full = timeline(plan, cost, streaming=streaming, record=True)
    assert short.makespan_s == pytest.approx(full.makespan_s, rel=ROUNDING)
    total = full.computing_s + full.exchanging_s + full.waiting_s
    np.testing.assert_allclose(total, full.makespan_s, rtol=ROUNDING)
    placement = plan.microbatches[0].placements[0]
    for which in (Pass.FORWARD, Pass.BACKWARD):
        assert num_exchanges(placement, which) == 6
        kept = keep == "output"
        priced = cost.comm.backward(0, 1, 4, kept=kept) if which is Pass.BACKWARD else cost.comm.forward(0, 1, 4)
        assert len(priced) == 6


def test_one_rank_only_computes() -> None:
    cost = make_cost_model(known_model("qwen3-0.6b"), Cluster(1, 1), PROFILE)
    batch = SequenceBatch.of_lengths([4096, 100])
    plan = Plan.of_groups(cost.tree, batch, [{cost.tree.group(0, 0): [0, 1]}], "test")
    result = timeline(plan, cost)
    assert result.exposed == 0
    assert result.waiting_s.max() <= ROUNDING * result.makespan_s
    layers, compute = cost.shape.num_layers, cost.compute
    size = (4196, 4096**2 + 100**2, 4096)
    forward = float(compute.attention_s("forward", 16, *size))
    backward = float(compute.attention_s("backward", 16, *size))
    linear = 4196 * (4 * layers * compute.linear_s + cost.head_s)
    assert result.makespan_s == pytest.approx(linear + layers * (2 * forward + backward) + cost.update_s)


def test_kept_layers_are_not_computed_again() -> None:
    cost = model()
    none, some, every = (timeline(nested(cost, kept_layers=k), cost).computing_s.sum() for k in (0, 4, 12))
    assert none - some == pytest.approx((none - every) / 3)
    assert none > 1.2 * every


def test_a_kept_output_saves_its_exchanges_and_kernels_in_the_recompute() -> None:
    cost = model()
    without, kept = (timeline(nested(cost, keep=keep), cost) for keep in ("none", "output"))
    assert kept.makespan_s < without.makespan_s
    assert kept.computing_s.sum() < without.computing_s.sum()
    assert kept.peak_bytes.max() > without.peak_bytes.max()


def test_waiting_for_a_late_peer_is_no_exposed_communication() -> None:
    """Two ranks, no parameters to gather: the one without work of its own waits for the other to join the exchange."""
    fast = {"host_bytes_per_s": 1e15, "host_latency_s": 0.0, "peer_latency_s": 0.0, "launch_s": 0.0}
    cost = make_cost_model(
        known_model("qwen3-0.6b"),
        Cluster(1, 2),
        dataclasses.replace(PROFILE, **fast),  # type: ignore[arg-type]
    )
    tree = cost.tree
    batch = SequenceBatch.of_lengths([64, 30_000])
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): [0], tree.group(1, 0): [1]}], "test")
    result = timeline(plan, cost)
    assert result.exchanging_s.max() < 0.01 * result.makespan_s
    assert result.waiting_s[1] > 0.5 * result.makespan_s
    assert result.waiting_s[0] < 0.01 * result.makespan_s


def test_gathers_take_their_turn_on_the_network_and_bound_a_step_that_has_little_to_compute() -> None:
    cost = model()
    batch = SequenceBatch.of_lengths([8])
    plan = Plan.of_groups(cost.tree, batch, [{cost.tree.group(3, 0): [0]}], "test")
    result = timeline(plan, cost)
    layers = cost.shape.num_layers
    wire = layers * (2 * cost.layer_gather_s + cost.layer_reduce_s) + cost.root_gather_s + cost.root_reduce_s
    assert wire <= result.makespan_s < 1.15 * wire
    assert result.exposed > 0.9


def test_a_microbatch_more_costs_its_gathers() -> None:
    cost = model()
    plan = nested(cost)
    microbatch = plan.microbatches[0]
    split = dataclasses.replace(
        plan,
        microbatches=(Microbatch(microbatch.placements[:1]), Microbatch(microbatch.placements[1:])),
    )
    split.check()
    one, two = timeline(plan, cost), timeline(split, cost)
    assert len(two.microbatch_s) == 2
    assert sum(two.microbatch_s) < two.makespan_s
    assert two.makespan_s > one.makespan_s
    assert two.peak_bytes.max() < one.peak_bytes.max()


def test_a_small_group_that_is_done_early_does_not_hold_up_its_parents_order() -> None:
    """A child group is done long before its parent's exchange: the walk ends, with each wait paired."""
    cost = model(network_bytes_per_s=1e9)
    tree = cost.tree
    batch = SequenceBatch.of_lengths([100_000, 2, 2, 2])
    groups: dict[Group, list[int]] = {
        tree.group(0, 0): [0],
        tree.group(1, 0): [1],
        tree.group(2, 0): [2],
        tree.group(3, 7): [3],
    }
    for order in itertools.permutations(range(tree.num_levels)):
        plan = dataclasses.replace(Plan.of_groups(tree, batch, [groups], "test"), level_order=order)
        plan.check()
        result = timeline(plan, cost)
        assert np.isfinite(result.makespan_s)


def first_start_s(result: Timeline, layer: int, name: str, track: str) -> float:
    found = [e.starts_s.min() for e in result.events if (e.layer, e.name, e.track) == (layer, name, track)]
    assert found
    return float(min(found))


@pytest.mark.parametrize("ring", [1, 8])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_the_gather_stands_in_the_links_queue_where_the_plan_says(before: int, ring: int) -> None:
    cost = model()
    result = timeline(nested(cost, ring=ring, gathers=GatherTurns(before, before, 1)), cost, record=True)
    for which, gather in ((Pass.FORWARD, "gather the next layer"), (Pass.BACKWARD, "gather the next layer, backward")):
        at_s = first_start_s(result, 3, gather, "network")
        for number in range(2 if ring == 1 else 7):
            exchange_s = first_start_s(result, 3, f"degree 8, {which.value} {number}", "network")
            assert (exchange_s < at_s) == (number < before)


def test_a_gather_waits_for_no_exchange_inside_a_host() -> None:
    """Two of four hosts share a long sequence. The other two have work of their own, and issue the gather at once."""
    cost = model(4, 2)
    tree = cost.tree
    batch = SequenceBatch.of_lengths([60_000, 50_000])
    plan = Plan.of_groups(tree, batch, [{tree.group(1, 0): [0], tree.group(2, 4): [1]}], "test")
    results = []
    for num_levels in (2, tree.num_levels):
        gathered = dataclasses.replace(plan, gathers=GatherTurns(1, 1, num_levels))
        results.append(timeline(gathered, cost, record=True))
    across, all_of_them = (first_start_s(result, 3, "gather the next layer", "network") for result in results)
    events = {(e.name, e.track): e for e in results[0].events if e.layer == 3}
    begins, exchange = events["projections", "computation"], events["degree 4, forward 0", "network"]
    assert across == max(begins.starts_s.max(), exchange.ends_s.max())
    assert all_of_them > across


def test_a_gather_that_no_exchange_meets_starts_where_its_layer_begins() -> None:
    cost = model()
    tree = cost.tree
    batch = SequenceBatch.of_lengths([20_000, 20_000])
    plan = Plan.of_groups(tree, batch, [{tree.group(1, 0): [0], tree.group(1, 4): [1]}], "test")
    inside = timeline(plan, cost, record=True)
    gathers = {event.layer: event for event in inside.events if event.name == "gather the next layer"}
    begins = {event.layer: event for event in inside.events if event.name == "projections"}
    assert gathers[3].starts_s.min() == pytest.approx(begins[3].starts_s.max(), rel=ROUNDING)


@pytest.mark.parametrize(("ring", "keep", "kept_layers"), VARIANTS)
def test_own_layers_leave_out_head_and_waiting(ring: int, keep: Keep, kept_layers: int) -> None:
    cost = model()
    plan = nested(cost, ring=ring, keep=keep, kept_layers=kept_layers)
    short, full = timeline(plan, cost), timeline(plan, cost, record=True)
    np.testing.assert_allclose(short.layers_s, full.layers_s, rtol=1e-6)
    np.testing.assert_allclose(short.unhidden_s, full.unhidden_s, rtol=1e-6, atol=1e-12)
    head_s = cost.head_s * np.array(plan.rank_tokens(0))
    computing_s = short.computing_s - head_s - cost.update_s
    np.testing.assert_allclose(short.layers_s[0], computing_s, rtol=ROUNDING)
    assert (short.unhidden_s[0] <= short.exchanging_s + ROUNDING).all()


CHOICES = [GatherTurns(forward, backward, 1) for forward in range(4) for backward in range(4)]


@pytest.mark.parametrize(("ring", "keep", "kept_layers"), VARIANTS)
def test_choices_side_by_side_are_each_what_they_are_alone(ring: int, keep: Keep, kept_layers: int) -> None:
    cost = model(network_bytes_per_s=2e10)
    plan = nested(cost, ring=ring, keep=keep, kept_layers=kept_layers)
    alone = [timeline(dataclasses.replace(plan, gathers=choice), cost) for choice in CHOICES]
    assert len({each.makespan_s for each in alone}) > 1
    best = place_gathers(make_schedule(plan), cost, CHOICES)
    assert best.makespan_s == pytest.approx(min(each.makespan_s for each in alone), rel=ROUNDING)
    for choice, one in zip(CHOICES, alone, strict=True):
        # The last of several equal choices is not taken.
        found = place_gathers(make_schedule(plan), cost, [choice, choice])
        assert found.schedule.plan.gathers == choice
        assert found.makespan_s == pytest.approx(one.makespan_s, rel=ROUNDING)
        np.testing.assert_allclose(found.unhidden_s, one.unhidden_s, rtol=1e-6, atol=1e-12)
    chosen = alone[CHOICES.index(best.schedule.plan.gathers)]
    np.testing.assert_allclose(best.unhidden_s, chosen.unhidden_s, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(best.exchanging_s, chosen.exchanging_s, rtol=1e-6, atol=1e-12)
    assert best.microbatch_s == pytest.approx(chosen.microbatch_s, rel=ROUNDING)


def test_a_timeline_is_rough_only_if_layers_still_changed_where_the_walk_was_cut() -> None:
    cost = model()
    plan = nested(cost)
    exact = timeline(plan, cost)
    rough, enough = (
        place_gathers(make_schedule(plan), cost, [plan.gathers], most_layers=most_layers) for most_layers in (1, 2)
    )
    assert rough.is_rough
    assert rough.makespan_s > 1.1 * exact.makespan_s
    assert not enough.is_rough
    assert enough.makespan_s == exact.makespan_s
