"""Ranks as processes of this host: how one is known again, and how one that can no longer leave by itself is ended.

A process id alone is not enough, for the system gives it to others once its process has ended. With the moment at which
the process began it names one process, and a rank of this job has the same parent as this one: the launcher.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "end_sibling", "this_process"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this host, for as long as it is up.

    Attributes:
        pid: Its id.
        parent: Its parent's.
        began: Clock ticks from the host's start to its own.
    """

    pid: int
    parent: int
    began: int

    def to_text(self) -> str:
        return f"{self.pid} {self.parent} {self.began}"

    @staticmethod
    def from_text(text: str) -> Process:
        """Read what `to_text` wrote."""
        pid, parent, began = map(int, text.split())
        return Process(pid, parent, began)


def this_process() -> Process | None:
    """The process that asks; None on a system that does not tell (only Linux does)."""
    return _read(os.getpid())


def end_sibling(process: Process) -> bool:
    """Kill a process that has this one's parent, also one that is stopped; whether there was one.

    Another process that has its id by now is left alone.
    """
    if process.parent != os.getppid() or process.pid == os.getpid() or _read(process.pid) != process:
        return False
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process.pid, signal.SIGKILL)
    return True


def _read(pid: int) -> Process | None:
    try:
        # pid (name) state parent ...; the name may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[19]))
