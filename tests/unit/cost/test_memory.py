from __future__ import annotations

import pytest

from nestsp.cluster import Cluster
from nestsp.cost.memory import MOMENTS, RankTokens, make_memory_cost
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model

PROFILE = load_profile("h100")
SHAPE = known_model("qwen3-30b-a3b")
TREE = Cluster(8, 8).default_tree()
MEMORY = make_memory_cost(SHAPE, TREE, PROFILE)


def peak(local: float, exchanged: float = 0, kept: float = 0, layers: int = 0) -> float:
    return float(MEMORY.peak_bytes(RankTokens(local, exchanged, kept), layers))


def test_every_moment_has_a_name() -> None:
    assert len(MEMORY.moments(RankTokens(1, 0, 0))) == len(MOMENTS)


def test_a_rank_has_one_communicator_for_each_level_of_several_ranks() -> None:
    """Case F8: 8 ranks have 7 groups, of which each rank is in 3; all subsets would be 2^8."""
    eight, two = (make_memory_cost(SHAPE, Cluster(1, n).default_tree(), PROFILE) for n in (8, 2))
    states = {n: 16 * SHAPE.num_parameters / n + PROFILE.margin_bytes for n in (8, 2)}
    assert eight.states - states[8] == pytest.approx(3 * PROFILE.communicator_bytes)
    assert two.states - states[2] == pytest.approx(1 * PROFILE.communicator_bytes)


def test_activations_fall_with_the_degree() -> None:
    """Case G33: 4 ranks hold a quarter of the tokens each, and the heads of all of them for a quarter."""
    alone = peak(40_000) - MEMORY.fixed
    split = peak(10_000, 10_000) - MEMORY.fixed
    assert 3 < alone / split < 4.1


def test_kept_bytes_add_up_over_all_groups_of_a_rank() -> None:
    one = peak(8000, kept=8000) - peak(8000)
    assert one == pytest.approx(SHAPE.num_layers * MEMORY.kept_output * 8000)
    assert peak(8000, kept=4000) - peak(8000) == pytest.approx(one / 2)


def test_kept_layers_cost_memory_and_the_last_ones_are_freed_first() -> None:
    peaks = [peak(40_000, layers=k) for k in range(SHAPE.num_layers + 1)]
    # The first kept layer is all but free: it is gone when the first one that recomputes has all of its own.
    assert peaks[1] - peaks[0] < 0.2 * (peaks[2] - peaks[1])
    assert peaks == sorted(peaks)
    assert peaks[-1] - MEMORY.fixed > 10 * (peaks[0] - MEMORY.fixed)


@pytest.mark.parametrize("layers", [0, 1, 2, 47, 48])
def test_no_choice_needs_less_than_the_least_bytes_of_a_token(layers: int) -> None:
    for tokens in (1, 1000, 100_000):
        assert peak(tokens, layers=layers) - MEMORY.fixed >= tokens * MEMORY.least_bytes_per_token * (1 - 1e-12)


def test_mixtures_of_experts_copy_each_token_top_k_times() -> None:
    dense = make_memory_cost(known_model("qwen3-1.7b"), TREE, PROFILE)  # hidden 2,048 as well
    assert MEMORY.layer_local > dense.layer_local + 7 * 2 * 2 * 2048


def test_235b_without_offload_does_not_fit_64_devices_of_80_gb() -> None:
    memory = make_memory_cost(known_model("qwen3-235b-a22b"), TREE, load_profile("a100-80g"))
    assert memory.fixed > load_profile("a100-80g").memory_bytes


def test_wider_numbers_take_more_bytes_but_for_what_is_float32_in_any_case() -> None:
    four, eight = (make_memory_cost(SHAPE, TREE, PROFILE, element_bytes=n) for n in (4, 8))
    for name in ("layer_input", "gradients", "exchange_buffers", "loss_hidden"):
        assert getattr(four, name) == 2 * getattr(MEMORY, name), name
        assert getattr(eight, name) == 4 * getattr(MEMORY, name), name
    for name in ("kept_output", "layer_local", "layer_exchanged", "loss_slice", "gathered"):
        assert getattr(MEMORY, name) < getattr(four, name) < 2 * getattr(MEMORY, name), name
    assert four.states == MEMORY.states
