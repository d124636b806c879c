from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, Group
from nestsp.cost.bound import check_fits, lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import AttentionKind, Keep, Microbatch, Placement, Plan
from nestsp.planners.kinds import with_kinds
from nestsp.schedule import make_schedule
from nestsp.simulate import plan_peak_bytes, simulate

LAYERS = 3
KINDS: tuple[AttentionKind, ...] = ("ulysses", "ring", "hybrid")
SHAPE = dataclasses.replace(known_model("llama-3.2-1b"), num_layers=LAYERS)


def model(
    num_hosts: int, ranks: int, *, memory_gib: float = 70.0, preset: str = "h100", bandwidth: float = 1.0
) -> CostModel:
    profile = load_profile(preset).scaled(bandwidth=bandwidth)
    profile = dataclasses.replace(profile, communicator_bytes=0.0, margin_bytes=0.0)
    return make_cost_model(SHAPE, Cluster(num_hosts, ranks), profile, memory_per_rank_bytes=memory_gib * 2**30)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to part items into microbatches that are not empty."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]


def every_plan(batch: SequenceBatch, cost: CostModel) -> Iterator[Plan]:
    """All placements, partings into microbatches, numbers of kept layers, and keeping no output or all."""
    tree = cost.tree
    groups = [group for level in range(tree.num_levels) for group in tree.groups(level)]
    for parts in partitions(range(batch.num_sequences)):
        for chosen in itertools.product(groups, repeat=batch.num_sequences):
            for kept_layers, keep in itertools.product(range(LAYERS + 1), ("none", "output")):
                microbatches = []
                for part in parts:
                    placed: dict[Group, list[int]] = {}
                    for position in part:
                        placed.setdefault(chosen[position], []).append(position)
                    kept: Keep = "output" if keep == "output" else "none"
                    placements = tuple(Placement(g, tuple(s), keep=kept) for g, s in sorted(placed.items()))
                    microbatches.append(Microbatch(placements, kept_layers))
                yield Plan(tree, batch, tuple(microbatches), tuple(range(tree.num_levels)), "every")


@pytest.mark.parametrize(
    ("cluster", "lengths", "memory_gib"),
    [
        pytest.param((1, 2), [30_000, 8_000, 500], 70.0, id="one-host"),
        pytest.param((2, 1), [30_000, 8_000, 500], 70.0, id="two-hosts"),
        pytest.param((1, 2), [60_000, 40_000], 20.0, id="little-memory"),
        pytest.param((2, 2), [50_000, 20_000], 70.0, id="three-levels"),
        pytest.param((1, 3), [64, 48], 70.0, id="three-ranks-little-work"),
        pytest.param((1, 1), [20_000, 9_000], 40.0, id="one-rank"),
    ],
)
def test_no_plan_is_below_the_bound(cluster: tuple[int, int], lengths: list[int], memory_gib: float) -> None:
    cost = model(*cluster, memory_gib=memory_gib)
    bound_s, best_s = lower_bound(SequenceBatch.of_lengths(lengths), cost).makespan_s, fastest_s(lengths, cost)
    assert bound_s <= best_s < float("inf")
    assert best_s < 2.5 * bound_s  # a bound that says something


def fastest_s(lengths: list[int], cost: CostModel) -> float:
    """The makespan of the fastest of all plans."""
    batch, best_s = SequenceBatch.of_lengths(lengths), float("inf")
    for placed in every_plan(batch, cost):
        for plan in (placed, *(with_kinds(placed, cost, kind) for kind in KINDS)):
            if plan_peak_bytes(plan, cost).max() <= cost.memory_per_rank_bytes:
                best_s = min(best_s, simulate(make_schedule(plan), cost).makespan_s)
    return best_s


def test_gathers_leave_the_links_of_a_group_so_much_time_for_a_sequence() -> None:
    # Without this term the bound is 4 % below the fastest plan.
    lengths, cost = [208_704, 62_422], model(4, 1, memory_gib=92.50259, bandwidth=0.0019057364617)
    best_s = fastest_s(lengths, cost)
    assert best_s / 1.0005 < lower_bound(SequenceBatch.of_lengths(lengths), cost).makespan_s <= best_s


def test_a_microbatch_leaves_its_sequences_what_is_not_spent_on_its_root() -> None:
    # Without this term the bound is 17 % below the fastest plan.
    lengths, cost = [58_359, 30_249], model(3, 1, memory_gib=64.73, bandwidth=0.007916)
    best_s = fastest_s(lengths, cost)
    assert best_s / 1.005 < lower_bound(SequenceBatch.of_lengths(lengths), cost).makespan_s <= best_s


def test_the_gathers_of_other_microbatches_leave_a_long_sequence_less_time() -> None:
    # Without this term the bound is 11 % below the fastest plan, which has two microbatches.
    lengths = [7_994, 36_040, 38_138]
    cost = model(1, 2, memory_gib=11.3667, preset="a100-80g", bandwidth=0.003342)
    bound, best_s = lower_bound(SequenceBatch.of_lengths(lengths), cost), fastest_s(lengths, cost)
    assert bound.num_microbatches == 2
    assert best_s / 1.07 < bound.makespan_s <= best_s


def test_the_ideal_has_no_communication_and_no_recomputation() -> None:
    cost = model(2, 4)
    batch = SequenceBatch.of_lengths([100_000, 30_000, 1_000])
    bound = lower_bound(batch, cost)
    assert 0 < bound.ideal_s < bound.makespan_s
    fast = cost.profile.scaled(bandwidth=1e9)
    free = make_cost_model(SHAPE, cost.cluster, dataclasses.replace(fast, host_latency_s=0.0, network_latency_s=0.0))
    # the longest sequence alone is less than the even share here, so communication was all of the gap but memory
    assert lower_bound(batch, free).ideal_s == pytest.approx(bound.ideal_s)
    assert lower_bound(batch, free).makespan_s < bound.makespan_s


def test_less_memory_never_lowers_the_bound() -> None:
    batch = SequenceBatch.of_lengths([60_000] * 8)
    bounds = [lower_bound(batch, model(1, 4, memory_gib=gib)).makespan_s for gib in (200, 70, 40, 25, 18)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    cost = make_cost_model(known_model("qwen3-235b-a22b"), Cluster(8, 8), load_profile("a100-80g"))
    with pytest.raises(InfeasibleError, match=r"the model needs \d+\.\d GiB on each of 64 ranks"):
        check_fits([0], [100], cost)


def test_a_sequence_that_does_not_fit_is_named_with_numbers() -> None:
    cost = model(1, 2, memory_gib=18.0)
    with pytest.raises(InfeasibleError, match=r"sequence 17 \(9,000,000 tokens\) needs .* GiB on each of 2 ranks"):
        check_fits([3, 17], [100, 9_000_000], cost)


def test_an_empty_batch_costs_its_gathers_alone() -> None:
    bound = lower_bound(SequenceBatch((), ()), model(2, 2))
    assert 0 < bound.makespan_s < 0.2


def test_a_model_whose_update_does_not_fit_is_refused_whatever_its_tokens() -> None:
    cost = make_cost_model(known_model("mixtral-8x7b"), Cluster(1, 7), load_profile("h100"))
    memory = cost.memory
    assert memory.fixed < memory.states + memory.update  # Adam's temporaries are more than two gathered layers here
    tight = dataclasses.replace(cost, memory_per_rank_bytes=memory.states + 0.9 * memory.update)
    with pytest.raises(InfeasibleError, match="while the optimizer updates it"):
        check_fits([0], [1], tight)
