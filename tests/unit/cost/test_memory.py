from __future__ import annotations

import itertools

import numpy as np
import pytest

from nestsp.cluster import Cluster
from nestsp.cost.memory import MOMENTS, RankTokens, make_memory_cost
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model

PROFILE = load_profile("h100")
SHAPE = known_model("qwen3-30b-a3b")
TREE = Cluster(8, 8).default_tree()
MEMORY = make_memory_cost(SHAPE, TREE, PROFILE)


def held(stream: float, degree: int = 1, ring: int = 1, *, kept: bool = False) -> RankTokens:
    """The fullest member of one group."""
    operands, in_flight = (
        float(np.max(f(stream, degree, ring, kept=kept))) for f in (MEMORY.operand_bytes, MEMORY.in_flight_bytes)
    )
    return RankTokens(stream / degree, stream / degree * kept, operands, in_flight)


def peak(tokens: RankTokens, layers: int = 0) -> float:
    return float(MEMORY.peak_bytes(tokens, layers))


def test_every_moment_has_a_name() -> None:
    assert len(MEMORY.moments(held(1))) == len(MOMENTS)


def test_a_rank_has_one_communicator_for_each_level_of_several_ranks() -> None:
    """Case F8: 8 ranks have 7 groups, of which each rank is in 3; all subsets would be 2^8."""
    eight, two = (make_memory_cost(SHAPE, Cluster(1, n).default_tree(), PROFILE) for n in (8, 2))
    states = {n: 16 * SHAPE.num_parameters / n + PROFILE.margin_bytes for n in (8, 2)}
    assert eight.states - states[8] == pytest.approx(3 * PROFILE.communicator_bytes)
    assert two.states - states[2] == pytest.approx(1 * PROFILE.communicator_bytes)


def test_activations_fall_with_the_degree() -> None:
    """Case G33: 4 ranks hold a quarter of the tokens each, and the heads of all of them for a quarter."""
    alone = peak(held(40_000)) - MEMORY.fixed
    split = peak(held(40_000, 4)) - MEMORY.fixed
    assert 3 < alone / split < 4.1


def test_kept_outputs_add_up_over_all_groups_of_a_rank() -> None:
    one, other = held(8000, kept=True), held(32_000, 4, kept=True)
    both = RankTokens(*(getattr(one, name) + getattr(other, name) for name in RankTokens.__slots__))
    none = RankTokens(both.local, 0.0, both.operands, both.in_flight)
    more = MEMORY.held_bytes(both) - MEMORY.held_bytes(none)
    assert more == pytest.approx(SHAPE.num_layers * MEMORY.kept_output * 16_000)


def test_what_a_kept_output_costs_is_never_more_than_what_is_said_of_it() -> None:
    for degree, ring in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 1), (64, 1)):
        none, kept = (peak(held(8000 * degree, degree, ring, kept=kept)) for kept in (False, True))
        assert kept - none <= 8000 * MEMORY.kept_output_bytes * (1 + 1e-9)


def test_kept_layers_cost_memory_and_the_last_ones_are_freed_first() -> None:
    peaks = [peak(held(40_000), k) for k in range(SHAPE.num_layers + 1)]
    # The first kept layer is all but free: it is gone when the first one that recomputes has all of its own.
    assert abs(peaks[1] - peaks[0]) < 0.2 * (peaks[3] - peaks[2])
    assert peaks[1:] == sorted(peaks[1:])
    assert peaks[-1] - MEMORY.fixed > 10 * (peaks[0] - MEMORY.fixed)


@pytest.mark.parametrize("layers", [0, 1, 2, 47, 48])
def test_no_choice_needs_less_than_the_least_bytes_of_a_token(layers: int) -> None:
    for stream, degree, kept in itertools.product((64, 6400, 640_000), (1, 2, 4, 64), (False, True)):
        bytes_ = peak(held(stream, degree, kept=kept), layers) - MEMORY.fixed
        assert bytes_ >= stream / degree * MEMORY.least_bytes_per_token * (1 - 1e-12)
        assert bytes_ >= stream * MEMORY.least_stream_bytes(degree) * (1 - 1e-12)
        split = MEMORY.attention_bytes_per_token(split=degree > 1)
        assert bytes_ >= stream / degree * split * (1 - 1e-12)


def test_a_ring_has_its_sums_and_blocks_in_flight_and_no_operands_of_other_ranks_tokens() -> None:
    ring, ulysses = held(80_000, 8, 8), held(80_000, 8)
    width = SHAPE.query_width + 2 * SHAPE.kv_width
    assert ring.in_flight > 10_000 * 4 * width  # float32 sums of three gradients
    # Four key/value heads on eight ranks: Ulysses has each of them twice.
    assert float(ulysses.operands) - float(ring.operands) == pytest.approx(10_000 * 2 * 2 * SHAPE.kv_width)


def test_a_hybrid_lies_between_a_ring_and_ulysses() -> None:
    sizes = [float(held(80_000, 8, ring).in_flight) for ring in (1, 2, 4)]
    assert sizes[0] < sizes[1] <= sizes[2]


def test_mixtures_of_experts_copy_each_token_top_k_times() -> None:
    dense = make_memory_cost(known_model("qwen3-1.7b"), TREE, PROFILE)  # hidden 2,048 as well
    assert MEMORY.layer_local > dense.layer_local + 7 * 2 * 2 * 2048


def test_235b_without_offload_does_not_fit_64_devices_of_80_gb() -> None:
    memory = make_memory_cost(known_model("qwen3-235b-a22b"), TREE, load_profile("a100-80g"))
    assert memory.fixed > load_profile("a100-80g").memory_bytes


def test_wider_numbers_take_more_bytes_but_for_what_is_float32_in_any_case() -> None:
    four, eight = (make_memory_cost(SHAPE, TREE, PROFILE, element_bytes=n) for n in (4, 8))
    for name in ("layer_input", "gradients", "attention_gradients", "loss_hidden"):
        assert getattr(four, name) == 2 * getattr(MEMORY, name), name
        assert getattr(eight, name) == 4 * getattr(MEMORY, name), name
    for name in ("kept_output", "layer_local", "last_hidden", "gathered"):
        assert getattr(MEMORY, name) < getattr(four, name) < 2 * getattr(MEMORY, name), name
    assert four.states == MEMORY.states
    assert four.loss_slice == MEMORY.loss_slice  # three copies of the logits are float32 in any case
