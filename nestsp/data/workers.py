"""Processes that make documents of chunks, so that reading, templates and tokenizers use all cores.

Each worker gets one chunk at a time and the answers are put back in order, so a store does not depend on how many there
are. Workers are interpreters of their own: they share no lock with training and start without its modules. They end
when the connection does, so none outlives the process that started it, however that ends.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from nestsp.data.forms import Encoded, Encoder
from nestsp.data.rows import Chunk
from nestsp.errors import DataError

__all__ = ["encode_chunks"]

# Chunks that may be done or at work beyond the one that is written next, for each worker: what a slow one holds up.
_CHUNKS_AHEAD = 4


def encode_chunks(
    encoder: Encoder, chunks: Iterator[Chunk], num_workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Encode chunks, each by one of some processes; in this one if there is but one worker or one chunk.

    Yields:
        Every chunk and its documents, in order.

    Raises:
        DataError: Of the first chunk that has one.
    """
    first = list(itertools.islice(chunks, 2))
    if num_workers == 1 or len(first) < 2:
        for chunk in itertools.chain(first, chunks):
            yield chunk, encoder.encode(chunk)
        return
    workers: list[_Worker] = []
    try:
        yield from _in_order(encoder, itertools.chain(first, chunks), num_workers, workers)
    finally:
        for worker in workers:
            worker.end()


def _in_order(
    encoder: Encoder, chunks: Iterator[Chunk], num_workers: int, workers: list[_Worker]
) -> Iterator[tuple[Chunk, Encoded]]:
    idle: list[_Worker] = []
    at_work: dict[Connection, tuple[_Worker, int, Chunk]] = {}
    done: dict[int, tuple[Chunk, Encoded | DataError]] = {}
    num_begun = num_yielded = 0
    more = True
    while True:
        while more and num_begun - num_yielded < num_workers * _CHUNKS_AHEAD and len(at_work) < num_workers:
            chunk = next(chunks, None)
            if chunk is None:
                more = False
                break
            if not idle:
                workers.append(_Worker(encoder))
                idle.append(workers[-1])
            worker = idle.pop()
            worker.give(chunk)
            at_work[worker.connection] = (worker, num_begun, chunk)
            num_begun += 1
        if num_yielded in done:
            chunk, result = done.pop(num_yielded)
            if isinstance(result, DataError):
                raise result
            num_yielded += 1
            yield chunk, result
            continue
        if not at_work:
            return
        for connection in wait(list(at_work)):
            assert isinstance(connection, Connection)
            worker, number, chunk = at_work.pop(connection)
            done[number] = (chunk, worker.receive())
            idle.append(worker)


class _Worker:
    """One process, and the connection to it."""

    def __init__(self, encoder: Encoder) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nestsp.data.workers", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self.connection = Connection(ours.detach())
        self.give(encoder)

    def give(self, message: Encoder | Chunk) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self) -> Encoded | DataError:
        try:
            kind, result = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if kind == "bug":
            raise RuntimeError(f"a process that tokenises failed:\n{result}")
        assert isinstance(result, Encoded | DataError)
        return result

    def _ended(self) -> DataError:
        return DataError(
            f"a process that tokenises ended with exit code {self._process.wait()}, but it must live until all is "
            "done; if the system ended it for want of memory, set data.workers lower"
        )

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()  # it may be in the middle of a chunk that nobody wants any more
        self._process.wait()


def _serve(connection: Any) -> NoReturn:
    """Answer chunks until the connection ends."""
    encoder = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            sys.exit()
        if encoder is None:
            encoder = message
            continue
        answer: tuple[str, object]
        try:
            answer = "result", encoder.encode(message)
        except DataError as error:
            answer = "result", error
        except Exception:
            answer = "bug", traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this process alone: one thread each, as there are processes
    _serve(Connection(int(sys.argv[1])))
