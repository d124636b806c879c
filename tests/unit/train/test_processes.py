"""A process is ended if it is the one that was meant, and no other."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestsp.train import processes
from nestsp.train.processes import Process, end_sibling, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process began")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    """A stopped child of this process, as its sibling would see it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as popen:
        popen.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(popen.pid, os.WUNTRACED)[1])
        there = processes._read(popen.pid)
        assert there is not None
        monkeypatch.setattr(os, "getppid", lambda: there.parent)
        yield popen, there
        popen.kill()


def test_a_process_knows_its_parent_and_survives_being_written_down() -> None:
    here = this_process()
    assert here is not None
    assert (here.pid, here.parent) == (os.getpid(), os.getppid())
    assert Process.from_text(here.to_text()) == here


def test_a_stopped_sibling_is_ended(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    popen, there = child
    assert end_sibling(there)
    assert popen.wait(10) == -signal.SIGKILL
    assert not end_sibling(there)


@pytest.mark.parametrize("field", ["began", "parent"])
def test_a_process_that_only_has_its_id_is_left_alone(
    child: tuple[subprocess.Popen[bytes], Process], field: str
) -> None:
    popen, there = child
    other = dataclasses.replace(there, **{field: getattr(there, field) + 1})
    assert not end_sibling(other)
    assert Path(f"/proc/{popen.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_process_never_ends_itself() -> None:
    here = this_process()
    assert here is not None
    assert not end_sibling(here)
