from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestsp.cost.compute import ComputeCost, StreamSize, make_compute_cost
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model

COST = make_compute_cost(known_model("qwen3-235b-a22b"), load_profile("h100"))  # 64 heads of 128
TOTALS = (1024, 2048, 4096, 8192, 16384, 32768)
# FlashAttention-3, bf16, causal, 64 query / 8 key-value heads of 128, H100; TFLOP/s.
FORWARD, FORWARD_PACKED = (283, 584, 662, 657, 672, 680), (60, 219, 357, 484, 544, 584)
BACKWARD, BACKWARD_PACKED = (208, 353, 462, 517, 562, 586), (53, 114, 206, 319, 375, 426)
# Sum of squares over sum of packs of Wikipedia lengths up to a quarter of the total.
PACKED_LENGTHS = (151, 278, 497, 819, 1466, 2285)
LARGEST_ERROR = 0.18  # of a point; the points themselves are not smooth: 4,096 beats 8,192
ROOT_MEAN_SQUARE = 0.10


def rate(direction: str, total: int, length: float) -> float:
    assert direction in ("forward", "backward")
    products = 1.0 if direction == "forward" else 2.5
    seconds = COST.attention_s(direction, 64, total, total * length, length)  # type: ignore[arg-type]
    return products * 2 * 128 * 64 * total * length / float(seconds) / 1e12


@pytest.mark.parametrize(
    ("direction", "single", "packed"),
    [("forward", FORWARD, FORWARD_PACKED), ("backward", BACKWARD, BACKWARD_PACKED)],
)
def test_the_h100_surface_fits_the_published_points(
    direction: str, single: tuple[int, ...], packed: tuple[int, ...]
) -> None:
    errors = [np.log(rate(direction, n, n) / published) for n, published in zip(TOTALS, single, strict=True)]
    errors += [
        np.log(rate(direction, n, length) / published)
        for n, length, published in zip(TOTALS, PACKED_LENGTHS, packed, strict=True)
    ]
    assert np.abs(errors).max() < LARGEST_ERROR
    assert np.sqrt(np.square(errors).mean()) < ROOT_MEAN_SQUARE


def test_splitting_heads_keeps_the_efficiency_and_splitting_tokens_does_not() -> None:
    whole = float(COST.attention_s("forward", 64, 8192, 8192**2, 8192))
    eighth = float(COST.attention_s("forward", 8, 8192, 8192**2, 8192))
    ring = float(COST.attention_s("forward", 64, 8192, 8192**2, 8192, ring_degree=8))
    launch_s = COST.profile.attention_forward_launch_s
    assert eighth - launch_s == pytest.approx((whole - launch_s) / 8)
    assert ring > 1.5 * eighth


def test_a_degree_that_does_not_divide_the_heads_costs_what_its_fullest_member_has() -> None:
    seconds = [float(COST.attention_s("forward", heads, 65536, 65536**2, 65536)) for heads in (21, 22)]
    even = float(COST.attention_s("forward", 64 / 3, 65536, 65536**2, 65536))
    assert seconds[0] < even < seconds[1]
    assert seconds[1] / even == pytest.approx(22 * 3 / 64, rel=1e-3)  # ceil(H/P)·P/H


def test_few_heads_of_a_short_sequence_do_not_fill_the_device() -> None:
    one, two = (float(COST.attention_s("forward", heads, 4096, 4096**2, 4096)) for heads in (1, 2))
    assert one == two
    # but many such sequences packed do
    packed = float(COST.attention_s("forward", 1, 64 * 4096, 64 * 4096**2, 4096))
    assert packed < 64 * one


def test_a_member_without_heads_and_a_group_without_tokens_take_no_time() -> None:
    assert COST.attention_s("backward", 0, 4096, 4096**2, 4096) == 0
    assert COST.attention_s("backward", 8, 0, 0, 0) == 0


def test_one_long_sequence_costs_more_than_eight_short_ones_of_as_many_tokens() -> None:
    """Case G18."""
    long, short = StreamSize.of([8192]), StreamSize.of([1024] * 8)
    assert long.tokens == short.tokens
    times = [float(COST.attention_s("forward", 64, size.tokens, size.squares, size.longest)) for size in (long, short)]
    half, launch_s = COST.profile.attention_forward_half_length, COST.profile.attention_forward_launch_s
    model = (8193 + half) / (1025 + half)
    assert (times[0] - launch_s) / (times[1] - launch_s) == pytest.approx(model)
    assert 5 < model < 8


def test_nothing_undercuts_the_best_point_of_the_surface() -> None:
    for lengths in ([1], [100, 30000], [512] * 40):
        size = StreamSize.of(lengths)
        for heads in (1, 7, 64):
            for direction in ("forward", "backward"):
                best = COST.best_attention_s(direction, heads, size.tokens, size.squares)
                real = COST.attention_s(direction, heads, size.tokens, size.squares, size.longest)
                assert best <= real


def windowed(window: int, layers: int) -> ComputeCost:
    shape = dataclasses.replace(known_model("llama-3.1-8b"), window=window, num_window_layers=layers)
    return make_compute_cost(shape, load_profile("h100"))


@pytest.mark.parametrize("length", [1, 5, 6, 7, 40])
@pytest.mark.parametrize("layers", [0, 8, 32])
def test_a_windows_pairs_are_those_that_its_queries_see(length: int, layers: int) -> None:
    seen = sum(min(query, 6) for query in range(1, length + 1))
    expected = (layers * seen + (32 - layers) * length * (length + 1) / 2) / 32
    assert (float(windowed(6, layers).squares(length)) + length) / 2 == pytest.approx(expected)


def test_attention_in_a_window_grows_with_the_length_and_not_with_its_square() -> None:
    cost = windowed(1024, 32)
    times = [float(cost.attention_s("forward", 32, n, cost.squares(n), n)) for n in (16_384, 32_768, 65_536)]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=1e-3)
    assert times[2] < float(windowed(0, 0).attention_s("forward", 32, 65_536, 65_536**2, 65_536)) / 20


def test_linear_time_follows_active_parameters() -> None:
    profile = load_profile("h100")
    dense = make_compute_cost(known_model("qwen3-8b"), profile)
    shape = known_model("qwen3-8b")
    flops = 2 * (shape.layer_parameters - 2 * shape.num_layers * (shape.hidden_size + shape.head_dim))
    assert dense.linear_s * shape.num_layers == pytest.approx(flops / profile.linear_flops_per_s)
    sparse = make_compute_cost(known_model("qwen3-30b-a3b"), profile)
    shape = known_model("qwen3-30b-a3b")
    all_experts = 2 * shape.num_layers * shape.num_experts * shape.expert_parameters / profile.expert_flops_per_s
    assert sparse.linear_s * shape.num_layers < all_experts / 8
