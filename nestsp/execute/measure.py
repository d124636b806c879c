"""Times the turns of attention, as `nestsp.attention.streaming.Timer` asks for.

Price: two or three readings of a clock for each turn. On GPUs these are events on the stream of computation, read only
after the step, so nothing waits for them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from nestsp.report.measured import TimedTurn
from nestsp.schedule import Pass, Turn

__all__ = ["AttentionTimer", "MicrobatchTimer"]


class AttentionTimer:
    """Times all turns of one rank's run of a batch, on the device's own clock, from where its step begins."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._turns: list[tuple[int, int, Pass, Turn, Any, Any, Any]] = []
        self._zero = self.now()

    def begin(self) -> None:
        """A step begins: times count from here."""
        self._zero = self.now()

    def clear(self) -> None:
        """Forget all turns, also those of a run that failed."""
        self._turns = []

    def now(self) -> Any:
        """This instant: seconds, or an event on the GPU."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def of(self, microbatch: int) -> MicrobatchTimer:
        """The timer of one microbatch."""
        return MicrobatchTimer(self, microbatch)

    def add(self, microbatch: int, layer: int, which: Pass, turn: Turn, began: Any, arrived: Any, ended: Any) -> None:
        """A turn was taken; see `nestsp.attention.streaming.Timer`."""
        self._turns.append((microbatch, layer, which, turn, began, arrived, ended))

    def take(self) -> tuple[TimedTurn, ...]:
        """All turns of the last run; on GPUs, waits for the last of them."""
        turns, self._turns = self._turns, []
        if self._on_gpu and turns:
            turns[-1][-1].synchronize()
        return tuple(
            TimedTurn(microbatch, layer, which, turn.level, turn.number, *map(self._seconds, instants))
            for microbatch, layer, which, turn, *instants in turns
        )

    def _seconds(self, instant: Any) -> float:
        seconds: float = self._zero.elapsed_time(instant) / 1e3 if self._on_gpu else instant - self._zero
        return seconds


class MicrobatchTimer:
    """Adds the number of its microbatch to each turn."""

    def __init__(self, timer: AttentionTimer, microbatch: int) -> None:
        self._timer, self._microbatch = timer, microbatch
        self.now = timer.now

    def add(self, layer: int, which: Pass, turn: Turn, began: Any, arrived: Any, ended: Any) -> None:
        """See `nestsp.attention.streaming.Timer`."""
        self._timer.add(self._microbatch, layer, which, turn, began, arrived, ended)
