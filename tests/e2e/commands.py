"""Runs ``nestsp`` as a person does: a process of its own, with the ranks that it starts itself or that torchrun starts.

Every process that is started here is ended here, by its pid: the command by its handle, its ranks as its descendants.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NESTSP = (sys.executable, "-m", "nestsp")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# Far more than any command here needs, also on a busy machine.
TIMEOUT_S = 480.0
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PYTEST_", "COLUMNS")


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        """What nestsp itself says on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("nestsp: ")]


def environment() -> dict[str, str]:
    """This process's environment without what a launcher or pytest set in it.

    A rank has one thread. By default the only rank of a host takes all cores, also where two "hosts" share them.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "xterm"}


def run(folder: Path, *arguments: str, program: Sequence[str] = NESTSP) -> Finished:
    """Run a command to its end."""
    with started(folder, *arguments, program=program) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    return Finished(process.returncode, out, err)


@contextmanager
def started(
    folder: Path, *arguments: str, program: Sequence[str] = NESTSP, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A command while it runs; whatever of it is left at the end is killed.

    What it prints must be read in time, or not be kept: a full pipe would stop it.
    """
    process = subprocess.Popen(
        [*program, *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: set[int] = set()
    try:
        yield process
    finally:
        if process.poll() is None:
            seen = descendants(process.pid)
            process.kill()
            for pid in seen:
                kill(pid)
        process.communicate()


def refusal(finished: Finished) -> str:
    """The one sentence of a command that was refused: exit code 2, and nothing else on stderr."""
    assert finished.code == 2, finished
    lines = finished.err.splitlines()
    assert len(lines) == 1, finished.err
    assert lines[0].startswith("nestsp: ")
    return lines[0].removeprefix("nestsp: ")


def parents() -> dict[int, int]:
    """Parent of every process on the machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent ...; the name may hold anything
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    return found


def descendants(pid: int) -> set[int]:
    """Children of a process, their children, and so on."""
    by_child = parents()
    found: set[int] = set()
    last = {pid}
    while last:
        last = {child for child, parent in by_child.items() if parent in last}
        found |= last
    return found


def command_line(pid: int) -> list[str]:
    """Words of a process's command line; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def rank_of(pid: int) -> int | None:
    """The rank that a process was started as, if it is one."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(value[5:]) for value in variables if value.startswith(b"RANK=")]
    return ranks[0] if ranks and "nestsp" in command_line(pid) else None


def ranks_of(launcher: int) -> dict[int, int]:
    """Pids of a launcher's ranks, by rank."""
    return {rank: pid for pid in descendants(launcher) if (rank := rank_of(pid)) is not None}


def planning_process(launcher: int) -> int:
    """The planning process of a launcher's rank 0."""
    [pid] = [pid for pid in descendants(launcher) if "nestsp.planners.worker" in command_line(pid)]
    return pid


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    """End a process that was started here, if it still runs."""
    if is_running(pid):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that will be."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s, but not: {what}"
        time.sleep(0.05)
