"""Ranks meet those of their own attempt, whatever earlier ones have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from nestsp.errors import LaunchError
from nestsp.train.meeting import meet

NUM_RANKS = 3


def attempt(store: Store, late: int) -> list[int]:
    """What each rank is told when one comes after the others."""
    order = sorted(range(NUM_RANKS), key=lambda rank: rank == late)
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        futures = {rank: threads.submit(meet, store, rank, NUM_RANKS, 30.0) for rank in order[:-1]}
        with pytest.raises(TimeoutError):
            futures[order[0]].result(0.3)
        futures[late] = threads.submit(meet, store, late, NUM_RANKS, 30.0)
        return [futures[rank].result() for rank in range(NUM_RANKS)]


def test_every_attempt_has_its_own_number_whichever_rank_comes_last() -> None:
    store = HashStore()
    assert attempt(store, late=2) == [1, 1, 1]
    assert attempt(store, late=0) == [2, 2, 2]  # the others find the first attempt's leader there
    assert attempt(store, late=1) == [3, 3, 3]


def test_a_rank_alone_is_an_attempt() -> None:
    store = HashStore()
    assert [meet(store, 0, 1, 1.0), meet(store, 0, 1, 1.0)] == [1, 2]


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(rank: int, missing: int) -> None:
    with pytest.raises(
        LaunchError, match=rf"^rank {missing} has not joined the job in cluster.timeout_s = 0.2 seconds"
    ):
        meet(HashStore(), rank, 2, 0.2)
