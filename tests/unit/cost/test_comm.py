from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestsp.cluster import Cluster, share_sizes
from nestsp.cost.comm import (
    BACKWARD_IN_KEPT,
    FORWARD_IN,
    FORWARD_OUT,
    Payload,
    make_comm_cost,
    member_widths,
    ulysses_bytes,
)
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.shape import ModelShape, head_shares

PROFILE = load_profile("h100")
SHAPE = known_model("llama-3.1-8b")  # 32 query and 8 key/value heads of 128


def with_heads(num_heads: int, num_kv_heads: int) -> ModelShape:
    return dataclasses.replace(SHAPE, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("heads", [(32, 8), (6, 3), (5, 1), (40, 8), (28, 4), (9, 3)])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6, 7, 8, 64])
def test_widths_are_those_of_the_real_head_shares(heads: tuple[int, int], degree: int) -> None:
    shares = head_shares(*heads, degree)
    expected = [(2 * len(share.query) + 3 * len(share.kv)) * 128 for share in shares]
    assert member_widths(with_heads(*heads), Payload(2, 3), degree).tolist() == expected


def test_keys_and_values_are_sent_compact() -> None:
    """Case D15: expanded to 32 heads before the exchange, they would be four times as much."""
    sent = ulysses_bytes(SHAPE, Payload(0, 2), share_sizes(8000, 8))
    assert sent.sum() == 8000 * 2 * 8 * 128 * 2


def test_keys_and_values_are_replicated_only_beyond_their_heads() -> None:
    sent = ulysses_bytes(SHAPE, Payload(0, 2), share_sizes(64_000, 32))
    assert sent.sum() == 4 * 64_000 * 2 * 8 * 128 * 2  # 32 ranks, 8 heads: each is on four ranks


def test_bytes_follow_unequal_parts_of_tokens_and_heads() -> None:
    sent = ulysses_bytes(with_heads(6, 3), FORWARD_IN, share_sizes(7, 4))
    assert sent.shape == (4, 4)
    assert (sent[:, 0] / sent[0, 0]).tolist() == [1, 2, 2, 2]  # tokens 1 2 2 2
    assert (sent[0] / 128 / 2).tolist() == [1 + 2, 2 + 4, 1 + 2, 2 + 2]  # q heads 1 2 1 2, kv heads 1 2 1 1


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("payload", [FORWARD_IN, FORWARD_OUT, BACKWARD_IN_KEPT])
def test_an_exchange_takes_as_long_as_its_busiest_member(hosts: int, payload: Payload) -> None:
    cluster = Cluster(hosts, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    tokens, degree = 64 * cluster.num_ranks, cluster.num_ranks
    sent = ulysses_bytes(SHAPE, payload, share_sizes(tokens, degree)).astype(float)
    np.fill_diagonal(sent, 0.0)
    host = np.arange(degree) // 8
    same = host[:, None] == host[None, :]
    inside, across = np.where(same, sent, 0.0), np.where(same, 0.0, sent)
    slowest = max(inside.sum(0).max(), inside.sum(1).max()) / PROFILE.host_bytes_per_s
    if hosts > 1:
        rate = PROFILE.network_bytes_per_s / 8 * PROFILE.exchange_efficiency(hosts)
        slowest = max(slowest, max(across.sum(0).max(), across.sum(1).max()) / rate)
    time = comm.levels[0][payload]
    assert time.network == (hosts > 1)
    assert time.seconds(tokens) - time.latency_s == pytest.approx(slowest)


def test_a_group_inside_a_host_never_uses_the_network() -> None:
    cluster = Cluster(6, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    degrees = {comm.tree.degree(level): comm.levels[level][FORWARD_IN].network for level in range(comm.tree.num_levels)}
    assert degrees == {48: True, 16: True, 8: False, 4: False, 2: False, 1: False}


def test_a_group_that_crosses_hosts_costs_more_for_each_token_of_a_rank() -> None:
    cluster = Cluster(8, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    per_rank = [comm.levels[level][FORWARD_IN].seconds(4096 * comm.tree.degree(level)) for level in range(6)]
    assert per_rank == sorted(per_rank, reverse=True)
    assert per_rank[0] > 10 * per_rank[3]


def test_gathers_use_the_smaller_of_a_ranks_links_and_its_hosts_cards_together() -> None:
    one, eight = (
        make_comm_cost(SHAPE, Cluster(hosts, 8), Cluster(hosts, 8).default_tree(), PROFILE) for hosts in (1, 8)
    )
    assert one.ring_bytes_per_s == PROFILE.host_bytes_per_s
    assert eight.ring_bytes_per_s == min(PROFILE.host_bytes_per_s, 0.9 * PROFILE.network_bytes_per_s)
    assert eight.gather_s(1e9) - eight.ring_latency_s == pytest.approx(1e9 * 63 / 64 / eight.ring_bytes_per_s)
    single = make_comm_cost(SHAPE, Cluster(1, 1), Cluster(1, 1).default_tree(), PROFILE)
    assert single.gather_s(1e9) == 0


def test_a_ring_sends_keys_and_values_once_for_each_other_member() -> None:
    cluster = Cluster(1, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    ring = comm.forward(0, 8)
    assert len(ring) == 7
    sent = sum(time.seconds(8192) - time.latency_s for time in ring) * PROFILE.host_bytes_per_s
    assert sent == pytest.approx(7 * 1024 * 2 * SHAPE.kv_width * 2)


def test_backward_a_rings_gradients_follow_their_keys_one_step_behind_and_go_home() -> None:
    """Keys and values in bf16 for each other member, their gradients in float32 likewise, one step later."""
    cluster = Cluster(1, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    keys = 1024 * 2 * SHAPE.kv_width * 2
    sent = [(t.seconds(8192) - t.latency_s) * PROFILE.host_bytes_per_s for t in comm.backward(0, 8)]
    assert sent == pytest.approx([keys] * 2 + [3 * keys] * 5 + [2 * keys] * 2)
    assert sum(sent) == pytest.approx(7 * 3 * keys)
    two = comm.backward(2, 2)  # nobody is between
    assert [(t.seconds(2048) - t.latency_s) * PROFILE.host_bytes_per_s for t in two] == pytest.approx([keys, 2 * keys])


@pytest.mark.parametrize("num_slices", [2, 3, 4])
@pytest.mark.parametrize("kept", [False, True])
def test_slices_carry_the_bytes_of_one_piece(num_slices: int, kept: bool) -> None:
    """Keys and values come with the first, their gradients go with the last; each slice goes home two later."""
    cluster = Cluster(1, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    for whole, sliced in (
        (comm.forward(0), comm.forward(0, 1, num_slices)),
        (comm.backward(0, kept=kept), comm.backward(0, 1, num_slices, kept=kept)),
    ):
        assert len(sliced) == num_slices + 2
        assert sum(t.s_per_token for t in sliced) == pytest.approx(sum(t.s_per_token for t in whole))
        assert {t.latency_s for t in sliced} == {whole[0].latency_s}
    first, second, *_, last = (t.s_per_token for t in comm.forward(0, 1, num_slices))
    one = comm.forward(0)[1].s_per_token / num_slices  # queries, or output, of a slice
    assert second == pytest.approx(one)
    assert last == pytest.approx(one)
    assert first > one


def test_a_float32_run_sends_twice_the_bytes_of_a_bf16_run_but_equal_gradients() -> None:
    cluster = Cluster(2, 2)
    bf16, wide = (
        make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE, element_bytes=size) for size in (2, 4)
    )
    for level in (0, 1):
        for payload, time in bf16.levels[level].items():
            assert wide.levels[level][payload].s_per_token == pytest.approx(2 * time.s_per_token)
    ring = ([time.s_per_token for time in comm.backward(0, 4)] for comm in (bf16, wide))
    keys, doubled = next(ring), next(ring)
    assert doubled[0] == pytest.approx(2 * keys[0])  # keys and values
    assert doubled[-1] == pytest.approx(keys[-1])  # their gradients, float32 in both
    narrow, doubled_bytes = (ulysses_bytes(SHAPE, FORWARD_IN, (24, 25), element_bytes=size) for size in (2, 4))
    assert (2 * narrow == doubled_bytes).all()


def test_a_hybrid_exchanges_heads_inside_and_passes_fewer_keys_round() -> None:
    cluster = Cluster(1, 8)
    comm = make_comm_cost(SHAPE, cluster, cluster.default_tree(), PROFILE)
    inside, *steps, out = comm.forward(0, 2)
    assert len(steps) == 1
    assert inside.s_per_token * 2 == pytest.approx(
        make_comm_cost(SHAPE, Cluster(1, 4), Cluster(1, 4).default_tree(), PROFILE).levels[0][FORWARD_IN].s_per_token
    )
    assert steps[0].s_per_token == pytest.approx(2 * 2 * 128 * 2 / 2 / PROFILE.host_bytes_per_s)  # 2 of 8 heads, half
    assert out.s_per_token < inside.s_per_token
