"""Ranks as threads of one process: groups whose messages lie in memory. For the probe, which runs before any rank does.

A group answers the one collective that attention uses, all-to-all, in the order of issue, as a process group does. A
rank that fails closes all mailboxes, so that no other waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Lock
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from nestsp.cluster import GroupTree
from nestsp.comm.groups import Link

__all__ = ["run_as_threads"]

Result = TypeVar("Result")


class _Closed(Exception):
    """Another rank failed."""


class _Mail:
    """What ranks have sent one another and not yet taken."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._queues: defaultdict[tuple[int, int, int], Queue[Tensor | None]] = defaultdict(Queue)
        self._closed = False

    def queue(self, level: int, source: int, target: int) -> Queue[Tensor | None]:
        """Of one group's messages from one rank to another; ``None`` says that no more will come."""
        with self._lock:
            queue = self._queues[level, source, target]
            if self._closed:
                queue.put(None)
            return queue

    def close(self) -> None:
        """Wake everyone who waits or will wait."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.put(None)


class _ThreadGroup:
    """One group as one of its ranks has it; stands where a process group would."""

    def __init__(self, mail: _Mail, level: int, ranks: Sequence[int], rank: int) -> None:
        self._mail, self._level, self._ranks, self._rank = mail, level, ranks, rank

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], options: Any
    ) -> _Work:
        for target, part in zip(self._ranks, sent.split(list(in_sizes)), strict=True):
            self._mail.queue(self._level, self._rank, target).put(part)  # nobody writes to a sender's buffer again
        arriving = [self._mail.queue(self._level, source, self._rank) for source in self._ranks]
        return _Work(arriving, received.split(list(out_sizes)))


class _Work:
    """An exchange on its way."""

    def __init__(self, arriving: Sequence[Queue[Tensor | None]], places: Sequence[Tensor]) -> None:
        self._arriving, self._places = arriving, places

    def wait(self) -> None:
        """Take what came, in the order of issue."""
        for queue, place in zip(self._arriving, self._places, strict=True):
            part = queue.get()
            if part is None:
                raise _Closed
            place.copy_(part)


def run_as_threads(tree: GroupTree, work: Callable[[int, Mapping[int, Link]], Result]) -> list[Result]:
    """Run a function on all ranks of a tree, each in a thread of its own.

    Args:
        tree: The ranks and their groups.
        work: Called with a rank and its links, by level.

    Returns:
        What each rank returned.

    Raises:
        Exception: What the first rank that failed raised.
    """
    mail = _Mail()

    def run(rank: int) -> Result:
        links = {}
        for level in range(tree.num_levels):
            group = tree.group(level, rank)
            if group.degree > 1:
                thread_group = _ThreadGroup(mail, level, group.ranks, rank)
                links[level] = Link(cast(dist.ProcessGroup, thread_group), group.degree, None)
        try:
            return work(rank, links)
        except BaseException:
            mail.close()
            raise

    with ThreadPoolExecutor(tree.num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(tree.num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, _Closed):
            raise error
    assert not errors
    return [future.result() for future in futures]
