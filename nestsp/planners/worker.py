"""A process that plans: rank 0's, so that planning overlaps training without sharing its interpreter lock.

It reads JSON lines and writes JSON lines: first the planning task, then one batch a line, answered by one plan a line,
or by ``{"error": ..., "message": ...}``. It ends when its input does, so it never outlives the rank that started it. It
imports no torch and starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from nestsp import errors
from nestsp.batch import SequenceBatch
from nestsp.planners.task import PlanningTask

__all__ = ["PlanningProcess"]


class PlanningProcess:
    """Plans batches in a process of its own, in the order in which they are given."""

    def __init__(self, task: PlanningTask) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nestsp.planners.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(task.to_json())

    def submit(self, batch: SequenceBatch) -> None:
        """Ask for a plan; returns at once."""
        self._write({"ids": batch.ids, "lengths": batch.lengths})

    def take(self) -> str:
        """Wait for the next plan, in the order of `submit`.

        Returns:
            The JSON text of a `nestsp.planners.task.Planned`.

        Raises:
            NestspError: What the planner raised.
            RuntimeError: The process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the planning process ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _write(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the planning process ended with exit code {self._process.wait()}") from None


def _serve(requests: IO[str], answer: Callable[[str], None]) -> None:
    solve = PlanningTask.from_json(json.loads(requests.readline())).solver()
    for line in requests:
        batch = json.loads(line)
        try:
            planned = solve(SequenceBatch(tuple(batch["ids"]), tuple(batch["lengths"])))
        except errors.NestspError as error:
            answer(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            answer(json.dumps(planned.to_json()))


if __name__ == "__main__":
    import signal

    for which in (signal.SIGINT, signal.SIGTERM):  # for the ranks, which may still want plans; it ends with its input
        signal.signal(which, signal.SIG_IGN)
    # HiGHS prints its name when it is first used; only answers may reach the rank that reads them.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(BrokenPipeError):  # its rank has ended meanwhile
        _serve(sys.stdin, lambda text: print(text, file=answers, flush=True))
    os._exit(0)  # closing the pipe would say so once more
