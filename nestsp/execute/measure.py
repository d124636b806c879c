"""Seconds that a rank spends in attention, exchanges included. Costs two clock readings a node and pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["AttentionTimer"]


class AttentionTimer:
    """Sums the time between entering and leaving attention, on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Measure what runs inside."""
        if self._on_gpu:
            before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before.record()
            yield
            after.record()
            self._events.append((before, after))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take_s(self) -> float:
        """Seconds since the last call; on GPUs, all work must have ended."""
        seconds: float = self._seconds + sum(before.elapsed_time(after) for before, after in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds
