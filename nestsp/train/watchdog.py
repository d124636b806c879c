"""Notices that a step has stopped moving, says where every rank is, and ends the job.

Each rank has a thread that looks at its place (`nestsp.attention.place`) four times a second. When one has not moved
for ``stall_s``, it asks all ranks for theirs, through the launcher's key-value store: no collective, and no other rank
has to be awake. Ranks that give none are named too: their processes are stopped, or hang where Python cannot run. Then
every rank that is awake leaves; the launcher ends the others.

It also keeps a rank from waiting for ever after it was told to end: a step that has not ended a while after that never
will, since some other rank is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from nestsp.attention.place import Place
from nestsp.train.launch import EXIT_SAID
from nestsp.train.signals import Requests
from nestsp.train.world import World

__all__ = ["Watchdog"]

_LOOK_EVERY_S = 0.25
# Seconds in which every rank that is awake has answered.
_ANSWER_S = 3.0
# What a rank that was told to end has for the rest of its step: so much, and twice the longest step it has seen.
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
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._resting = False
        self._moved_at = time.monotonic()
        self._longest_step_s = 0.0
        self._told_at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
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
        if self._told_at is None or self._resting:
            self._told_at = now
        if requests.num_stops > 1 or now - self._told_at > _END_S + 2 * self._longest_step_s:
            os._exit(128 + requests.stop)

    def _is_stalled(self, now: float) -> bool:
        if self._stall_s is None:
            return False
        stood_s = now - self._moved_at
        if stood_s > self._stall_s:
            return True
        # A rank that moves is not asked: it will wait for the one that does not before long.
        waits = self._resting or stood_s > min(1.0, self._stall_s)
        return waits and self._world.store is not None and self._someone_asks(self._world.store)

    def _someone_asks(self, store: Store) -> bool:
        try:
            return bool(store.check(["stalled"]))
        except Exception:  # the store is gone, and the launcher with it; the collectives will say so
            return False

    def _tell_and_leave(self, now: float) -> None:
        stood_s = now - self._moved_at
        mine = f"{self._place}; {self._where()}; no move for {stood_s:.0f} s"
        store, rank = self._world.store, self._world.rank
        speaks, places = True, {rank: mine}
        if store is not None:
            try:
                store.set("stalled", "1")
                store.set(f"place-{rank}", mine)
                speaks = store.add("speaker", 1) == 1
                time.sleep(_ANSWER_S)
                if speaks:
                    for other in range(self._world.cluster.num_ranks):
                        if other != rank and store.check([f"place-{other}"]):
                            places[other] = store.get(f"place-{other}").decode()
            except Exception:
                speaks = True
        if speaks:
            print(self._report(places), file=sys.stderr, flush=True)
            time.sleep(1.0)
        else:
            time.sleep(_ANSWER_S)  # the launcher ends all once one has left
        os._exit(EXIT_SAID)

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
        entries = dict.fromkeys([*ours[-1:], *stack[-1:]])
        return "in " + " ← ".join(
            f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})" for entry in reversed(list(entries))
        )
