"""Where the ranks of one attempt of a job find each other, and none of an attempt before.

torchrun's key-value store outlives the ranks: after a restart it still holds what the ranks before left in it, and gloo
would wait for ports that are gone. Ranks cannot name their attempt by themselves either: the number of restarts that
torchrun gives them is each host's own, and does not count the restarts that a joining host makes. So rank 0 takes a
number that no attempt had before, and answers every rank of its own attempt, which it knows by a word that it has just
made up. Price: a few messages to the store for each rank.
"""

from __future__ import annotations

import time
import uuid

from torch._C._distributed_c10d import Store

from nestsp.errors import LaunchError

__all__ = ["meet"]

_LEADER = "leader"
_ASK_EVERY_S = 0.05


def meet(store: Store, rank: int, num_ranks: int, timeout_s: float) -> int:
    """Wait until all ranks of this attempt are there; every rank calls it once.

    Returns:
        The attempt's number, the same on all ranks: 1 for the first one in this store, and higher for each later one.

    Raises:
        LaunchError: They were not there in time.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        number = store.add("attempts", 1)
        store.set(_LEADER, str(number))
        for other in range(1, num_ranks):
            _wait_for(store, _hello(number, other), f"rank {other}", deadline, timeout_s)
            store.set(_answer(number, other), store.get(_hello(number, other)).decode())
        return number
    word, greeted = uuid.uuid4().hex, 0
    while True:
        _wait_for(store, _LEADER, "rank 0", deadline, timeout_s)
        leader = int(store.get(_LEADER))
        if leader != greeted:  # perhaps one of an attempt before: it answers nobody any more
            store.set(_hello(leader, rank), word)
            greeted = leader
        elif store.check([_answer(leader, rank)]) and store.get(_answer(leader, rank)).decode() == word:
            return leader
        _pause("rank 0", deadline, timeout_s)


def _hello(number: int, rank: int) -> str:
    return f"{number}/hello/{rank}"


def _answer(number: int, rank: int) -> str:
    return f"{number}/answer/{rank}"


def _wait_for(store: Store, key: str, whom: str, deadline: float, timeout_s: float) -> None:
    while not store.check([key]):
        _pause(whom, deadline, timeout_s)


def _pause(whom: str, deadline: float, timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise LaunchError(
            f"{whom} has not joined the job in cluster.timeout_s = {timeout_s:g} seconds, but all ranks must; look for "
            "its error on its host, or raise cluster.timeout_s"
        )
    time.sleep(_ASK_EVERY_S)
