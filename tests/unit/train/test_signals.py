"""Signals become requests, also while the main thread cannot run Python, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nestsp.train.signals import Requests


def test_each_signal_is_its_request() -> None:
    with Requests() as requests:
        requests.listen()
        requests.poll()
        assert (requests.stop, requests.take_save()) == (None, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take_save()
        assert not requests.take_save()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        requests.poll()
        assert (requests.stop, requests.num_stops) == (signal.SIGTERM, 2)


def test_the_handlers_of_before_come_back() -> None:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(which) for which in watched]
    with Requests() as requests:
        assert [signal.getsignal(which) for which in watched] == before  # they would end the process
        requests.listen()
        assert [signal.getsignal(which) for which in watched] != before
    assert [signal.getsignal(which) for which in watched] == before


def test_a_rank_that_fails_after_it_was_told_to_end_ends_by_that_signal_without_a_word() -> None:
    """Another rank died; the launcher tells this one to end, and its collective fails."""
    code = (
        "import os, signal\n"
        "from nestsp.train.signals import Requests\n"
        "with Requests() as requests:\n"
        "    requests.listen()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise RuntimeError('Connection closed by peer')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, "")


def test_an_error_without_a_signal_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="ours"), Requests():
        raise ValueError("ours")
