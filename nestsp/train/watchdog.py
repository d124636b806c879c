"""Notices that a step has stopped moving, says where every rank is, and ends the job.

Each rank has a thread that looks at its place (`nestsp.attention.place`) four times a second. When one has not moved
for ``stall_s``, it asks all ranks for theirs, through the launcher's key-value store: no collective, and no other rank
has to be awake. Ranks that give none are named too: their processes are stopped, or hang where Python cannot run. Then
every rank that is awake kills those of its own host that are not, and leaves. Left to the launcher they would hold up
the job's end, or its restart: torchrun waits 30 s for an answer to SIGTERM, which a stopped process cannot give.

It also keeps a rank from waiting for ever after it was told to end: one that does not move then waits for a rank that
is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch._C._distributed_c10d import Store

from nestsp.attention.place import Place
from nestsp.train.launch import EXIT_SAID
from nestsp.train.processes import Process, end_sibling, this_process
from nestsp.train.signals import Requests
from nestsp.train.world import World

__all__ = ["Watchdog"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.25
# Seconds in which every rank that is awake has answered.
_ANSWER_S = 3.0
# A healthy store answers in milliseconds; one whose host has vanished never does.
_STORE_S = 2.0
# A rank that was told to end and does not move for so long, and twice the longest step it has seen, never will.
_END_S = 5.0


class Watchdog:
    """Watches one rank while it is entered.

    Args:
        world: This rank. Without a store it can say no more than where it is itself.
        place: Written by the training loop and the executor.
        requests: The signals that this rank gets.
        stall_s: Seconds without a move that are a stall; None for any.
    """

    def __init__(self, world: World, place: Place, requests: Requests, stall_s: float | None) -> None:
        self._world, self._place, self._requests, self._stall_s = world, place, requests, stall_s
        self._store = world.store
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._resting = False
        self._moved_at = time.monotonic()
        self._longest_step_s = 0.0
        self._told_at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        process, store = this_process(), self._store
        if process is not None and store is not None:
            store.set(f"process-{self._world.rank}", process.to_text())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def step_took(self, seconds: float) -> None:
        """Learn how long a step lasts."""
        self._longest_step_s = max(self._longest_step_s, seconds)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """For work that has no places and its own time limits: saving, exporting."""
        self._resting = True
        try:
            yield
        finally:
            self._moved_at, self._resting = time.monotonic(), False

    def _watch(self) -> None:
        last: object = None
        while not self._ended.wait(_LOOK_EVERY_S):
            now, here = time.monotonic(), self._mark()
            if here != last or self._resting:
                last, self._moved_at = here, now
            self._requests.poll()
            self._leave_if_told(now)
            if self._is_stalled(now):
                self._tell_and_leave(now)

    def _mark(self) -> object:
        place = self._place
        return place.task, place.step, place.microbatch, place.layer, place.which, place.turn

    def _leave_if_told(self, now: float) -> None:
        requests = self._requests
        if requests.stop is None:
            return
        self._told_at = self._told_at or now
        stands_s = now - max(self._told_at, self._moved_at)
        if requests.num_stops > 1 or stands_s > _END_S + 2 * self._longest_step_s:
            os._exit(128 + requests.stop)

    def _is_stalled(self, now: float) -> bool:
        if self._stall_s is None:
            return False
        stood_s = now - self._moved_at
        if stood_s > self._stall_s:
            return True
        # A rank that moves is not asked: it will wait for the one that does not before long.
        waits = self._resting or stood_s > min(1.0, self._stall_s)
        return waits and self._store is not None and self._someone_asks(self._store)

    def _someone_asks(self, store: Store) -> bool:
        asked = _within(_STORE_S, lambda: bool(store.check(["stalled"])))
        if asked is None:  # the store is gone, or the host that has it: from now on this rank sees for itself
            self._store = None
        return bool(asked)

    def _tell_and_leave(self, now: float) -> None:
        mine = f"{self._place}; {self._where()}; no move for {now - self._moved_at:.0f} s"
        rank, num_ranks = self._world.rank, self._world.cluster.num_ranks
        speaks, places = True, {rank: mine}
        silent: list[Process] = []
        store = self._store
        if store is not None:

            def ask() -> bool:
                store.set("stalled", "1")
                store.set(f"place-{rank}", mine)
                return bool(store.add("speaker", 1) == 1)

            def collect() -> dict[int, str]:
                return {other: text for other in range(num_ranks) if (text := _look_up(store, f"place-{other}"))}

            def collect_silent() -> list[Process]:
                there = [_look_up(store, f"process-{other}") for other in self._neighbours() if other not in places]
                return [Process.from_text(text) for text in there if text]

            answer = _within(_STORE_S, ask)
            speaks = answer is not False
            if answer is not None:
                time.sleep(_ANSWER_S)
                found = _within(_STORE_S, collect)
                if found is not None:  # else the store, not a rank, is silent
                    places |= found
                    silent = _within(_STORE_S, collect_silent) or []
        if speaks:
            print(self._report(places), file=sys.stderr, flush=True)
            time.sleep(1.0)  # the launcher ends all ranks once one has left; those that answer shall not be cut short
        else:
            time.sleep(_STORE_S + 1.0)
        for process in silent:
            end_sibling(process)
        os._exit(EXIT_SAID)

    def _neighbours(self) -> range:
        """Ranks of this host."""
        number = self._world.cluster.ranks_per_host
        first = self._world.rank // number * number
        return range(first, first + number)

    def _report(self, places: dict[int, str]) -> str:
        lines = [
            f"nestsp: step {self._place.step} has stopped: a rank has not moved for train.stall_s = {self._stall_s:g} "
            "seconds; all ranks end"
        ]
        for rank in range(self._world.cluster.num_ranks):
            silent = "gives no answer: its process is stopped, or hangs where Python cannot run"
            lines.append(f"[rank {rank}] {places.get(rank, silent)}")
        return "\n".join(lines)

    def _where(self) -> str:
        """The line of code that the main thread is at, and the line of ours that led there."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "no code is running"
        stack = traceback.extract_stack(frame)
        ours = [entry for entry in stack if f"{os.sep}nestsp{os.sep}" in entry.filename]
        entries = [stack[-1], *(ours[-1:] if ours[-1:] != stack[-1:] else [])]
        return "in " + " ← ".join(
            f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})" for entry in entries
        )


def _look_up(store: Store, key: str) -> str | None:
    """What a key holds; None, and no waiting, where it holds nothing."""
    return store.get(key).decode() if store.check([key]) else None


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What a call gives, or None if it fails or takes longer: then it is left to itself."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
