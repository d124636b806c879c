"""The edge where processes begin and end: starting ranks by torchrun's own launcher, and leaving in order.

Exit codes: 0 done; 2 something a user can mend, said in one sentence; 1 anything else, with its traceback. A rank that
has said itself why the job ends with 1 leaves with 3, and the launcher turns that into 1 without a word. A launcher
that was told to end by a signal leaves with 128 plus its number, and its ranks with 0 if they have saved and ended.

Signals to the launcher go on to its ranks (`nestsp.train.signals`), which end together after their step. A second one
ends them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nestsp.errors import NestspError

__all__ = ["EXIT_FAILED", "EXIT_REFUSED", "EXIT_SAID", "launch_ranks", "run_rank"]

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_SAID = 3

# Where this host's ranks leave their process ids for the launcher's signal handler.
_PIDS = "NESTSP_PIDS"

# A rank that dies makes its neighbours' collectives fail within milliseconds. They wait this long before they say so:
# by then the launcher has ended them, and the rank that died first is the one that is heard.
_NEIGHBOUR_PATIENCE_S = 3.0
# A rank that leaves the word to another one stays so long. Did it leave first, the launcher might end the speaker
# before it has spoken. Before the ranks have met, one may be far behind the others: it is still importing.
_SILENCE_S = {"met": 3.0, "not met": 30.0}
_NEIGHBOUR_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "remote process exited",
)


def launch_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Start ranks on this host, wait for them, and say which one failed first.

    Args:
        arguments: Command line of each rank, after ``python -m nestsp``.
        num_ranks: Ranks to start.

    Returns:
        The exit code for this process.
    """
    # torchrun would print a page for each failure; the ranks say themselves what is wrong.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    with tempfile.TemporaryDirectory(prefix="nestsp-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            run_id=str(uuid.uuid4()),
            monitor_interval=0.1,
            shutdown_timeout=5,
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are the forwarder's
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        os.environ[_PIDS] = folder
        forwarder = _Forwarder(Path(folder), num_ranks)
        for which in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(which, forwarder)
        try:
            elastic_launch(config, sys.executable)("-m", "nestsp", *arguments)
        except ChildFailedError as error:
            failures = list(error.failures.values())
            if forwarder.told is None or not all(_was_ended(failure, forwarder.told) for failure in failures):
                return _report(failures)
        except SignalException as error:
            forwarder.told = error.sigval
    if forwarder.told is not None:
        print(f"nestsp: ended by {forwarder.told.name}", file=sys.stderr)
        return 128 + forwarder.told
    return 0


class _Forwarder:
    """The launcher's signal handler: its ranks get what it gets."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self.told: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        pids = [int(path.suffix[1:]) for path in self._folder.glob("rank.*")]
        ready = len(pids) == self._num_ranks
        if which != signal.SIGUSR1:
            if self.told is not None or not ready:
                raise SignalException(f"ended by {which.name}", which)  # the agent ends its ranks
            self.told = which
        for pid in pids if ready else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)


def _was_ended(failure: ProcessFailure, told: signal.Signals) -> bool:
    return failure.exitcode in (-told, 128 + told, -signal.SIGTERM)


def run_rank(main: Callable[[], int]) -> NoReturn:
    """Run one rank from beginning to end, and leave the process with the exit code that it returns.

    The process leaves by ``os._exit`` once everything is flushed: a process that used FSDP2 on gloo sometimes aborts in
    the interpreter's own exit, after all its output (7 of 36 runs; 0 of 12 with this; `docs/log.md`). Errors are said
    before, so none is hidden.
    """
    rank = int(os.environ.get("RANK", "0"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_launcher()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save; by default it would end the rank
    if _PIDS in os.environ:
        Path(os.environ[_PIDS], f"rank.{os.getpid()}").touch()
    code = 0
    try:
        code = main()
    except NestspError as error:
        code = EXIT_REFUSED
        # What all ranks know alike is said once: by rank 0, or before they have met, by the first rank of each host.
        speaks = rank == 0 if error.raised_on_all_ranks else dist.is_initialized() or os.environ["LOCAL_RANK"] == "0"
        if speaks:
            print(f"nestsp: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            time.sleep(_SILENCE_S["met" if dist.is_initialized() else "not met"])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = EXIT_FAILED
        if any(word in str(error) for word in _NEIGHBOUR_WORDS):
            time.sleep(_NEIGHBOUR_PATIENCE_S)
        lines = "".join(traceback.format_exception(error)).splitlines()
        print("\n".join(f"[rank {rank}] {line}" for line in lines), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, EXIT_SAID) and dist.is_initialized():
        # After a failure the groups may hang; the launcher ends the others.
        dist.destroy_process_group()
    os._exit(code)


def _end_with_launcher() -> None:
    """Let the system end this rank when its launcher is killed outright: else it would train on, alone and unseen."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def _report(failures: list[ProcessFailure]) -> int:
    if any(failure.exitcode == EXIT_REFUSED for failure in failures):
        return EXIT_REFUSED
    if any(failure.exitcode == EXIT_SAID for failure in failures):
        return EXIT_FAILED
    # A signal comes before an exception: a rank that was killed could not speak, and made the others fail.
    killed = [f for f in failures if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    first = min(killed or failures, key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        what = f"was ended by signal {-first.exitcode} ({first.signal_name()})"
    else:
        what = f"ended with exit code {first.exitcode}; its error is above"
    print(f"nestsp: rank {first.local_rank} {what}; all ranks were ended", file=sys.stderr)
    return EXIT_FAILED
