"""Ranks as threads: what one sends, the other gets, in order; and one that fails ends all."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch

from nestsp.cluster import GroupTree
from nestsp.comm.exchange import start_exchange, start_pass
from nestsp.comm.groups import Link
from nestsp.comm.threads import run_as_threads


def test_an_exchange_brings_each_member_what_was_meant_for_it() -> None:
    """Unequal and empty parts, two exchanges under way at once, on two levels."""

    def work(rank: int, links: Mapping[int, Link]) -> list[list[float]]:
        found = []
        for link, place, offset in ((links[0], rank, 0.0), (links[1], rank % 2, 0.5)):
            members = range(link.degree)
            first = rank - place
            sizes = [place + other for other in members]
            sent = torch.cat([torch.full((to + place,), 10.0 * rank + (first + to) + offset) for to in members])
            shapes = [(size,) for size in sizes]
            found.append([start_exchange(link, sent, sizes, sizes, shapes) for _ in range(2)])
        return [[tensor.sum().item() for tensor in exchange.finish()] for pair in found for exchange in pair]

    for rank, sums in enumerate(run_as_threads(GroupTree((2, 2)), work)):
        whole = [(rank + source) * (10.0 * source + rank) for source in range(4)]
        first, place = rank - rank % 2, rank % 2
        pair = [(place + source) * (10.0 * (first + source) + rank + 0.5) for source in range(2)]
        assert sums == [whole, whole, pair, pair]


def test_passes_go_round() -> None:
    def work(rank: int, links: Mapping[int, Link]) -> list[float]:
        mine, seen = torch.full((2,), float(rank), dtype=torch.float64), []
        for _ in range(2):
            passing = start_pass(links[0], (rank + 1) % 3, (mine,), (rank - 1) % 3, [(2,)])
            (mine,) = passing.finish()
            seen.append(mine[0].item())
        return seen

    assert run_as_threads(GroupTree((3,)), work) == [[2.0, 1.0], [0.0, 2.0], [1.0, 0.0]]


@pytest.mark.timeout(30)
def test_a_rank_that_fails_ends_those_that_wait_for_it() -> None:
    """And is the one whose error is told."""

    def work(rank: int, links: Mapping[int, Link]) -> None:
        if rank == 1:
            time.sleep(0.2)  # the others wait by then
            raise ValueError("the second rank")
        start_exchange(links[0], torch.zeros(3), (1, 1, 1), (1, 1, 1), [(3,)]).finish()

    with pytest.raises(ValueError, match="the second rank"):
        run_as_threads(GroupTree((3,)), work)
