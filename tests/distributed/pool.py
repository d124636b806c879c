"""One pool of rank processes for all distributed tests of a session.

- Processes are forked from one server that has already imported PyTorch and Transformers, and stay
  for the next test: six ranks cost one import, not six.
- Every `RankPool.run` gets a gloo group of exactly its number of ranks, on loopback, and leaves it.
- A rank that raises, ends or hangs becomes an exception in the test: the first failure first, with
  the rank's traceback and output, or with the Python stacks of all ranks. What may be broken is
  killed by pid and started anew for the next test.
- In the ranks: one thread, float32, `torch.manual_seed(0)` before each run, warnings are errors.

Price, measured here (2 cores, idle; torch 2.13.0+cpu, transformers 5.24.0, Python 3.11): the first
run on 4 ranks 3.1 to 3.3 s, nearly all of it the one import; two more ranks 0.07 s; a run that does
nothing 12 / 23 / 46 / 70 ms on 1 / 2 / 4 / 6 ranks, nearly all of it gloo taking its group down
(10 ms a rank); four ranks anew after a failure 0.06 s. An exception on some ranks costs 1 s more, and
3 s more where a rank hears nothing of it.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # typed only there
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from typing_extensions import Self, TypeVarTuple, Unpack

__all__ = ["RankError", "RankFailure", "RankPool", "RankTimeout"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
# Read when the libraries load. Threads of a maths library would fight for the cores and do not
# survive a fork; nothing in a test may ask the network.
RANK_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# After the first exception: so long do the others have to fail by themselves (all ranks refuse the
# same plan) before the failed rank leaves the group, which breaks its neighbours' collectives. The
# end of a process has broken them already.
SETTLE_S = 1.0
# After that: so long may a rank be silent before it is killed.
GRACE_S = 3.0
# Leaving a healthy group waits for nothing but collectives that a test forgot to wait for.
LEAVE_S = 10.0
OUTPUT_TAIL_CHARS = 4000
ENDED = "ProcessEnded"  # stands for an exception's name

# Warnings that are no errors in a rank: (start of the message, category), each with its reason.
# None so far: FSDP2 with mixed precision, recomputation, clipping, saved state (DCP) and Qwen3-MoE
# run without a warning (torch 2.13, transformers 5.24).
KNOWN_NOISE: tuple[tuple[str, type[Warning]], ...] = ()


# --- What a test sees ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        type_name: the exception's class name; "ProcessEnded" where the process died.
        message: `str` of the exception, or "exit code 3", "ended by signal 9".
        traceback: as Python prints it; for a process that died by a fault, its last Python stacks.
    """

    type_name: str
    message: str
    traceback: str


class RankError(Exception):
    """At least one rank raised or ended; the message starts with the first that did.

    Attributes:
        rank: the rank that failed first.
        exceptions: every rank that failed, also those that failed because of the first.
    """

    def __init__(self, message: str, rank: int, exceptions: Mapping[int, RankFailure]) -> None:
        super().__init__(message)
        self.rank = rank
        self.exceptions = dict(exceptions)


class RankTimeout(Exception):
    """At least one rank did not end in time, and none failed.

    Attributes:
        stacks: Python stacks of all threads, of every rank.
    """

    def __init__(self, message: str, stacks: Mapping[int, str]) -> None:
        super().__init__(message)
        self.stacks = dict(stacks)


class RankPool:
    """Processes that run one function on several ranks, again and again.

    Example:
        def add_up(rank: int, num_ranks: int, start: int) -> float:
            x = torch.tensor([start + rank])
            dist.all_reduce(x)
            return x.item()

        def test_sum(pool: RankPool) -> None:
            assert pool.run(add_up, 10, ranks=3) == [33, 33, 33]
    """

    def __init__(self, max_ranks: int = 6) -> None:
        self.max_ranks = max_ranks
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._num_runs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="nestsp-ranks-")
        self._context = multiprocessing.get_context("forkserver")
        self._store: TCPStore | None = None
        # Ranks are no daemons, because those may start no processes. So without this a pool that
        # nobody closed would keep the interpreter waiting for its ranks.
        atexit.register(self.close)

    def run(
        self,
        fn: Callable[[int, int, Unpack[Ts]], T],
        *args: Unpack[Ts],
        ranks: int = 4,
        timeout_s: float = 60.0,
    ) -> list[T]:
        """Calls `fn(rank, num_ranks, *args)` on every rank; returns the results in rank order.

        Args:
            fn: a function at the top level of a module that the ranks can import.
            args: the same for all ranks, picklable like the results. Tensors are copied.
            ranks: size of the gloo group, 1 to `max_ranks`.
            timeout_s: for the whole call, once the processes stand.

        Raises:
            RankError: a rank raised or its process ended.
            RankTimeout: a rank did not end in time.
        """
        __tracebackhide__ = True
        assert 1 <= ranks <= self.max_ranks, f"ranks is {ranks}, but this pool has 1 to {self.max_ranks}"
        name = getattr(fn, "__qualname__", repr(fn))
        assert "<" not in name, f"fn is {name}, but ranks import it by name; move it to the top level"
        call = pickle.dumps((fn, args))
        workers = self._first(ranks)
        output_starts = [worker.output.stat().st_size for worker in workers]
        self._num_runs += 1
        reports: dict[int, _Report] = {}
        try:
            for rank, worker in enumerate(workers):
                task = _Task(f"run-{self._num_runs}", rank, ranks, timeout_s, call)
                with contextlib.suppress(ConnectionError):  # it has ended; `_collect` will find it so
                    worker.conn.send_bytes(pickle.dumps(task))
            all_left = _collect(workers, reports, timeout_s)
        except _OutOfTime as late:
            stacks = _dump_stacks(dict(enumerate(workers)))
            tails = [_tail(w.output, start) for w, start in zip(workers, output_starts, strict=True)]
            self._discard(ranks)
            message = _describe_timeout(f"{name} on {ranks} ranks {late}", reports, stacks, tails)
            raise RankTimeout(message, stacks) from None
        except BaseException:  # Ctrl-C or pytest-timeout: the ranks are in an unknown state
            self._discard(ranks)
            raise
        stacks = _dump_stacks({rank: workers[rank] for rank in range(ranks) if rank not in reports})
        tails = [_tail(w.output, start) for w, start in zip(workers, output_starts, strict=True)]
        failures = {r: report for r, report in reports.items() if isinstance(report, _Failed)}
        if failures:
            same = len({report.failure.type_name for report in failures.values()}) == 1
            if not (all_left and same and len(failures) == ranks):
                self._discard(ranks)
            raise _rank_error(name, ranks, failures, stacks, tails)
        for rank, tail in enumerate(tails):
            if tail:  # pytest shows it if the test fails later
                print(f"[rank {rank}] {tail.rstrip()}")
        return [pickle.loads(report.value) for _, report in sorted(reports.items()) if isinstance(report, _Returned)]

    def close(self) -> None:
        """Ends and joins all processes."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.conn.close()  # an idle rank leaves at the end of its pipe
        for worker in self._workers:
            worker.process.join(5.0)
        self._discard(len(self._workers))
        self._store = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first(self, num_ranks: int) -> list["_Worker"]:
        """The first workers, alive; starts those that are missing."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._context.set_forkserver_preload(list(PRELOADED))
        if not all(worker.process.is_alive() for worker in self._workers[:num_ranks]):
            self._discard(num_ranks)
        with _environment(RANK_ENVIRONMENT):  # the server takes it over when the first rank starts
            while len(self._workers) < num_ranks:
                self._workers.append(self._start(self._store.port))
        return self._workers[:num_ranks]

    def _start(self, store_port: int) -> "_Worker":
        here, there = self._context.Pipe()
        path = Path(self._folder.name) / f"process-{self._num_started}"
        self._num_started += 1
        output, stacks = path.with_suffix(".output"), path.with_suffix(".stacks")
        output.touch()
        stacks.touch()
        process = self._context.Process(target=_rank_main, args=(there, store_port, output, stacks), name=path.name)
        process.start()
        there.close()  # else the end of the rank would not end the pipe
        return _Worker(process, here, output, stacks)

    def _discard(self, num_workers: int) -> None:
        """Kills and joins the first workers; only processes that this pool started."""
        gone, self._workers = self._workers[:num_workers], self._workers[num_workers:]
        for worker in gone:
            worker.process.kill()
            worker.conn.close()
        for worker in gone:
            worker.process.join()


# --- What travels -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    conn: "Connection[bytes, bytes]"
    output: Path
    stacks: Path


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    rank: int
    num_ranks: int
    timeout_s: float
    call: bytes


@dataclass(frozen=True, slots=True)
class _Returned:
    value: bytes


@dataclass(frozen=True, slots=True)
class _Failed:
    failure: RankFailure
    order: tuple[bool, float]  # (only because of a neighbour, time.monotonic() of the machine)


_Report = _Returned | _Failed


# --- The test's side ----------------------------------------------------------------------------


class _OutOfTime(Exception):
    pass


def _collect(workers: list[_Worker], reports: dict[int, _Report], timeout_s: float) -> bool:
    """Waits for the report of every rank and lets the ranks leave the group; fills `reports`.

    A rank that has reported stays in the group until it is told to leave, so no rank's end disturbs
    a neighbour that is still busy. After a failure, ranks that stay silent are given up.

    Returns:
        Whether every process left its group in good order and can be used again.

    Raises:
        _OutOfTime: no rank failed, but not all are done.
    """
    deadline = time.monotonic() + timeout_s
    leaving = False
    while len(reports) < len(workers):
        pending = {rank: worker for rank, worker in enumerate(workers) if rank not in reports}
        if not _wait_any(pending.values(), deadline):
            if not _any_failed(reports):
                raise _OutOfTime(f"ran longer than {timeout_s:g} s")
            if leaving:
                return False
            leaving = True
            _tell_to_leave(workers[rank] for rank in reports)
            deadline = time.monotonic() + GRACE_S
            continue
        new = {rank: report for rank, worker in pending.items() if (report := _take_report(worker))}
        if leaving:
            _tell_to_leave(workers[rank] for rank in new)
            deadline = time.monotonic() + GRACE_S
        elif any(_has_ended(report) for report in new.values()):
            deadline = time.monotonic()
        elif _any_failed(new) and not _any_failed(reports):
            deadline = min(deadline, time.monotonic() + SETTLE_S)
        reports.update(new)
    if leaving:
        return False
    _tell_to_leave(workers)
    deadline = time.monotonic() + LEAVE_S
    for rank, worker in enumerate(workers):
        if not worker.conn.poll(max(0.0, deadline - time.monotonic())):
            if _any_failed(reports):
                return False
            raise _OutOfTime(f"returned, but rank {rank} is in its group {LEAVE_S:g} s later; wait for all work")
        try:
            worker.conn.recv_bytes()
        except (EOFError, ConnectionError):
            reports[rank] = _ended(worker)
    return all(worker.process.is_alive() for worker in workers)


def _any_failed(reports: Mapping[int, _Report]) -> bool:
    return any(isinstance(report, _Failed) for report in reports.values())


def _has_ended(report: _Report) -> bool:
    return isinstance(report, _Failed) and report.failure.type_name == ENDED


def _wait_any(workers: Iterable[_Worker], deadline: float) -> bool:
    """Until one has something to say or ended; False at the deadline."""
    waitables = [w.conn for w in workers]
    return bool(wait(waitables, max(0.0, deadline - time.monotonic())))


def _take_report(worker: _Worker) -> _Report | None:
    if not worker.conn.poll():
        return None
    try:
        report: _Report = pickle.loads(worker.conn.recv_bytes())
    except (EOFError, ConnectionError):  # the pipe ends with the process
        return _ended(worker)
    return report


def _tell_to_leave(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(ConnectionError):  # it ended meanwhile
            worker.conn.send_bytes(b"leave")


def _ended(worker: _Worker) -> _Failed:
    at_s = time.monotonic()
    worker.process.join(5.0)
    code = worker.process.exitcode
    if code is None:
        how = "closed its pipe, but lives"
    elif code < 0:
        how = f"ended by signal {-code}"
    else:
        how = f"exit code {code}"
    return _Failed(RankFailure(ENDED, how, worker.stacks.read_text()), (False, at_s))


def _dump_stacks(workers: Mapping[int, _Worker]) -> dict[int, str]:
    """Python stacks of all threads of each rank's process."""
    starts = _stack_sizes(workers)
    for worker in workers.values():
        if worker.process.is_alive():
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGUSR1)
    # A dump takes milliseconds, even where the main thread waits in a collective; a stopped process
    # writes none. It is complete when the file no longer grows.
    deadline = time.monotonic() + 2.0
    sizes = starts
    while workers and time.monotonic() < deadline:
        time.sleep(0.1)
        before, sizes = sizes, _stack_sizes(workers)
        if sizes == before and all(sizes[rank] > starts[rank] for rank in workers):
            break
    return {
        rank: _read(worker.stacks, starts[rank]) or "(no stack: the process is stopped or gone)\n"
        for rank, worker in workers.items()
    }


def _stack_sizes(workers: Mapping[int, _Worker]) -> dict[int, int]:
    return {rank: worker.stacks.stat().st_size for rank, worker in workers.items()}


def _read(path: Path, start: int) -> str:
    return path.read_bytes()[start:].decode(errors="replace")


def _tail(path: Path, start: int) -> str:
    text = _read(path, start)
    return text if len(text) <= OUTPUT_TAIL_CHARS else "[...]" + text[-OUTPUT_TAIL_CHARS:]


def _rank_error(
    name: str,
    num_ranks: int,
    failed: Mapping[int, _Failed],
    stacks: Mapping[int, str],
    tails: list[str],
) -> RankError:
    in_order = sorted(failed, key=lambda rank: failed[rank].order)
    failures = {rank: failed[rank].failure for rank in sorted(failed)}
    first = in_order[0]
    lines = [f"{_one_line(first, failures[first])} ({name} on {num_ranks} ranks)", ""]
    if failures[first].traceback:
        lines += [failures[first].traceback.rstrip(), ""]
    if tails[first]:
        lines += [f"output of rank {first}:", tails[first].rstrip(), ""]
    lines += [f"then {_one_line(rank, failures[rank])}" for rank in in_order[1:]]
    returned = [rank for rank in range(num_ranks) if rank not in failed and rank not in stacks]
    lines += [f"rank {rank} had returned" for rank in returned]
    for rank, stack in stacks.items():
        lines += [f"rank {rank} was still busy and was killed:", stack.rstrip()]
    return RankError("\n".join(lines), first, failures)


def _one_line(rank: int, failure: RankFailure) -> str:
    if failure.type_name == ENDED:
        return f"rank {rank} {failure.message}"
    return f"rank {rank} raised {failure.type_name}: {failure.message}"


def _describe_timeout(what: str, reports: Mapping[int, _Report], stacks: Mapping[int, str], tails: list[str]) -> str:
    lines = [what, ""]
    for rank, stack in stacks.items():
        lines += [
            f"rank {rank}, {'has returned' if rank in reports else 'still busy'}:",
            stack.rstrip(),
        ]
        if tails[rank]:
            lines += [f"output of rank {rank}:", tails[rank].rstrip()]
        lines.append("")
    return "\n".join(lines)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


# --- The rank's side ----------------------------------------------------------------------------


def _rank_main(conn: "Connection[bytes, bytes]", store_port: int, output: Path, stacks: Path) -> None:
    """Life of a rank process: task, report, leave the group; until the pipe ends."""
    # A process that used FSDP2 on gloo sometimes aborts in the interpreter's exit, after all its
    # work (torch 2.13), so a rank never gets there.
    code = 1
    try:
        _prepare_process(output)
        with stacks.open("ab") as stack_file:
            faulthandler.enable(stack_file)
            faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
            _serve(conn, TCPStore("127.0.0.1", store_port, is_master=False))
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare_process(output: Path) -> None:
    if sys.platform == "linux":  # a hung rank must not outlive a killed pytest; 1 is PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    gc.freeze()  # what is imported stays, so the collection after each run has little to look at


def _serve(conn: "Connection[bytes, bytes]", store: Store) -> None:
    while True:
        try:
            task: _Task = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        conn.send_bytes(pickle.dumps(_attempt(task, store)))
        conn.recv_bytes()  # all ranks are done, or one failed and its neighbours must notice
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it holds meshes of groups that are no more, and gives them to equal ones
        gc.collect()  # models and groups die here, not in the middle of the next run
        conn.send_bytes(b"left")


def _attempt(task: _Task, store: Store) -> _Report:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message, category in KNOWN_NOISE:
                warnings.filterwarnings("ignore", re.escape(message), category)
            fn, args = pickle.loads(task.call)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(task.name, store),
                rank=task.rank,
                world_size=task.num_ranks,
                # The pool's own limit comes first, and it shows stacks.
                timeout=timedelta(seconds=task.timeout_s + 60.0),
            )
            return _Returned(pickle.dumps(fn(task.rank, task.num_ranks, *args)))
    except BaseException as error:
        at_s = time.monotonic()
        failure = RankFailure(type(error).__qualname__, str(error), traceback.format_exc())
        return _Failed(failure, (_is_neighbours_fault(error), at_s))


def _is_neighbours_fault(error: BaseException) -> bool:
    """Whether gloo says that another rank is gone; then that rank's own error comes first."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
