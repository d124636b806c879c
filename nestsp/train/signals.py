"""Signals as requests: to save, to end. A rank finishes its step first, then all ranks do it together.

SIGINT and SIGTERM ask to save and end, SIGUSR1 to save and go on. A second SIGINT or SIGTERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Requests"]

_STOPS = (signal.SIGINT, signal.SIGTERM)


class Requests:
    """Takes the signals from `listen` on, while it is entered.

    The system writes a signal's number into a pipe the moment it comes, so the watchdog's thread learns of it even
    while the main thread waits in a collective, where no Python handler runs.

    Attributes:
        stop: The first signal that asked to end; None while none has.
        num_stops: Signals that asked to end.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.num_stops = 0
        self._save = False
        self._lock = threading.Lock()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Requests:
        return self

    def listen(self) -> None:
        """Take the signals from now on; before, they end the process."""
        if threading.current_thread() is threading.main_thread():  # the only one that may take signals
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._before = {which: signal.signal(which, _note) for which in (*_STOPS, signal.SIGUSR1)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for which, handler in self._before.items():
                signal.signal(which, handler)
        self.poll()
        os.close(self._read)
        os.close(self._write)
        if error is not None and self.stop is not None:
            signal.raise_signal(self.stop)  # the rank was told to end, and fails since others have: it need not say so

    def poll(self) -> None:
        """Take in what has come; from any thread."""
        with self._lock:
            try:
                came = os.read(self._read, 4096)
            except BlockingIOError:
                return
            for number in came:
                if number in _STOPS:
                    self.num_stops += 1
                    self.stop = self.stop or signal.Signals(number)
                elif number == signal.SIGUSR1:
                    self._save = True

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        self.poll()
        with self._lock:
            wanted, self._save = self._save, False
        return wanted


def _note(number: int, frame: FrameType | None) -> None:
    """Nothing: the pipe has it. Without a handler of Python's own there would be no write into it."""
