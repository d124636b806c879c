"""Which kind each group gets, and that nothing is slower for it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import AttentionKind, Capabilities, Plan
from nestsp.planners import make_planner
from nestsp.planners.ground import cost_ground
from nestsp.planners.kinds import alone_s, choose_kinds, kinds_of, with_kinds
from nestsp.planners.task import PlanningTask
from nestsp.schedule import make_schedule
from nestsp.shape import ModelShape
from nestsp.simulate import plan_peak_bytes, simulate

SHAPE = dataclasses.replace(known_model("llama-3.2-1b"), num_layers=4)


def model(num_hosts: int, ranks_per_host: int, shape: ModelShape = SHAPE, **changes: float) -> CostModel:
    profile = dataclasses.replace(load_profile("h100"), **changes)  # type: ignore[arg-type]
    return make_cost_model(shape, Cluster(num_hosts, ranks_per_host), profile)


def on_all_ranks(cost: CostModel, length: int) -> Plan:
    tree = cost.tree
    return Plan.of_groups(tree, SequenceBatch.of_lengths([length]), [{tree.group(0, 0): [0]}], "test")


@pytest.mark.parametrize(("num_ranks", "rate"), [(8, 450e9), (8, 5e9), (6, 50e9), (2, 20e9), (3, 20e9)])
def test_a_groups_price_is_what_the_simulator_says_of_it_alone(num_ranks: int, rate: float) -> None:
    """For every kind, on fast and slow links. Packing costs nothing here, and there is little to gather."""
    shape = dataclasses.replace(SHAPE, hidden_size=8, intermediate_size=8, vocab_size=8)
    free = {"memory_bytes_per_s": 1e30, "launch_s": 0.0, "host_latency_s": 0.0, "peer_latency_s": 0.0}
    cost = model(1, num_ranks, shape, host_bytes_per_s=rate, **free)
    plan, times, prices = on_all_ranks(cost, 400_000), [], []
    for kind in kinds_of(num_ranks, shape.num_heads, "auto"):
        (placement,) = plan.microbatches[0].placements
        placed = dataclasses.replace(placement, ring_degree=kind.ring_degree, num_slices=kind.num_slices)
        microbatch = dataclasses.replace(plan.microbatches[0], placements=(placed,))
        timeline = simulate(make_schedule(dataclasses.replace(plan, microbatches=(microbatch,))), cost)
        times.append(timeline.makespan_s)
        prices.append(SHAPE.num_layers * alone_s(0, kind, [400_000], cost))
    for time_s, price in zip(times, prices, strict=True):
        assert time_s - times[0] == pytest.approx(price - prices[0], abs=1e-4 * times[0])  # gathers
    assert max(prices) > 1.001 * min(prices)


def test_D9_heads_that_do_not_divide_make_a_hybrid_or_a_ring_and_few_heads_too() -> None:
    """28 and 4 heads on 8 ranks: 4 heads of 28 are 1/7, not 1/8; 2 heads on 8 ranks leave six idle."""
    for heads, kv_heads in ((28, 4), (2, 1)):
        shape = dataclasses.replace(SHAPE, num_heads=heads, num_kv_heads=kv_heads)
        cost = model(1, 8, shape)
        (placement,) = with_kinds(on_all_ranks(cost, 500_000), cost, "auto").microbatches[0].placements
        assert placement.ring_degree > 1
        inner = 8 // placement.ring_degree
        assert heads % inner == 0


def test_ulysses_stays_where_its_heads_divide_and_links_cost_nothing() -> None:
    cost = model(1, 8, host_bytes_per_s=1e15, host_latency_s=0.0, peer_latency_s=0.0)
    assert with_kinds(on_all_ranks(cost, 500_000), cost, "auto") == on_all_ranks(cost, 500_000)


@pytest.mark.parametrize(("kind", "degrees"), [("ulysses", {1}), ("ring", {2, 4}), ("hybrid", {1, 2})])
def test_a_kind_that_is_set_is_taken_by_every_group_that_has_it(kind: AttentionKind, degrees: set[int]) -> None:
    cost = model(1, 4)
    tree = cost.tree
    groups = {tree.group(0, 0): [0], tree.group(1, 0): [1], tree.group(2, 3): [2]}
    plan = with_kinds(Plan.of_groups(tree, SequenceBatch.of_lengths([90, 40, 7]), [groups], "test"), cost, kind)
    plan.check()
    assert {p.ring_degree for _, p in plan.placements() if p.group.degree > 1} == degrees
    assert {p.ring_degree for _, p in plan.placements() if p.group.degree == 1} == {1}


def batch(seed: int) -> SequenceBatch:
    dice = random.Random(seed)
    return SequenceBatch.of_lengths([int(dice.lognormvariate(7, 1.5)) + 1 for _ in range(dice.randint(1, 60))])


@pytest.mark.parametrize("planner", ["batch-adaptive", "basp", "nsp"])
@pytest.mark.parametrize("rate", [450e9, 5e9])
def test_no_plan_is_slower_for_its_kinds_and_all_fit(planner: str, rate: float) -> None:
    cost = model(1, 6, host_bytes_per_s=rate)
    ground = cost_ground(cost)
    for seed in range(12):
        judged = make_planner(planner, ground).judge(batch(seed))
        chosen = choose_kinds(judged, ground, cost, "auto")
        assert chosen == choose_kinds(judged, ground, cost, "auto")
        assert chosen.makespan_s <= judged.makespan_s
        assert chosen.makespan_s == simulate(make_schedule(chosen.plan), cost).makespan_s
        chosen.plan.check()
        assert plan_peak_bytes(chosen.plan, cost).max() <= cost.memory_per_rank_bytes


def test_plans_of_awkward_heads_are_faster_for_their_kinds() -> None:
    """Six ranks: 32 heads do not divide."""
    cost = model(1, 6, host_bytes_per_s=50e9)
    ground = cost_ground(cost)
    whole = dataclasses.replace(ground, in_slices=lambda plan: plan, as_any_kind=lambda plan: plan)
    awkward = SequenceBatch.of_lengths([300_000, 9_000, 5_000, 700])
    chosen, plain = (make_planner("nsp", on).judge(awkward) for on in (ground, whole))
    assert {(p.ring_degree, p.num_slices) for _, p in plain.plan.placements()} == {(1, 1)}
    assert chosen.makespan_s < 0.97 * plain.makespan_s


def task(can: Capabilities, attention: AttentionKind) -> PlanningTask:
    tree = GroupTree((2, 2))
    return PlanningTask("nsp", None, None, SHAPE, Cluster(1, 4), tree, "h100", 72 * 2**30, can, attention=attention)


def test_a_run_without_rings_has_none_whatever_is_wanted() -> None:
    """Sliding windows; that a ring was asked for is refused before, see `nestsp.train.prepare`."""
    on_h100 = dataclasses.replace(task(Capabilities(rings=False), "auto"), profile="h100")
    plan = on_h100.solver()(batch(3)).plan
    assert {p.ring_degree for _, p in plan.placements()} == {1}


@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "auto"])
def test_a_run_gets_the_kind_it_wants(attention: AttentionKind) -> None:
    on_h100 = dataclasses.replace(task(Capabilities(), attention), profile="h100", memory_per_rank_bytes=72 * 2**30)
    planned = on_h100.solver()(SequenceBatch.of_lengths([200_000, 60_000, 900, 20]))
    rings = {(p.group.degree, p.ring_degree) for _, p in planned.plan.placements() if p.group.degree > 1}
    assert rings
    assert attention != "ulysses" or all(ring == 1 for _, ring in rings)
    assert attention != "ring" or all(ring == degree for degree, ring in rings)
    assert attention != "hybrid" or all(ring == (2 if degree == 4 else 1) for degree, ring in rings)
    on_h100.check(planned.plan, on_h100.cost())
    assert PlanningTask.from_json(on_h100.to_json()) == on_h100


def test_a_kind_that_is_set_and_does_not_fit_is_refused_by_name() -> None:
    cost = model(1, 4)
    ground = cost_ground(cost)
    judged = make_planner("nsp", ground).judge(SequenceBatch.of_lengths([50_000, 700]))
    full = dataclasses.replace(ground.evaluate(judged.plan), makespan_s=float("inf"))
    tight = dataclasses.replace(ground, place_gathers=lambda plan: (plan, full))
    with pytest.raises(InfeasibleError, match=r"planner\.attention is ring, but as such the batch's groups do not fit"):
        choose_kinds(judged, tight, cost, "ring")
