"""A process that plans: rank 0's, so that planning overlaps training without sharing its interpreter lock.

It reads JSON lines and writes JSON lines: first the planner's settings, then one batch a line, answered by one plan a
line, or by ``{"error": ..., "message": ...}``. It ends when its input does, so it never outlives the rank that started
it. It imports no torch and starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from nestsp import errors
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.config import PlannerConfig
from nestsp.planners import make_planner
from nestsp.shape import ModelShape

__all__ = ["PlanningProcess"]


class PlanningProcess:
    """Plans batches in a process of its own, in the order in which they are given."""

    def __init__(self, config: PlannerConfig, tree: GroupTree, shape: ModelShape, longest: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nestsp.planners.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(
            {
                "planner": config.model_dump(),
                "tree": tree.fanouts,
                "shape": dataclasses.asdict(shape),
                "longest": longest,
            }
        )

    def submit(self, batch: SequenceBatch) -> None:
        """Ask for a plan; returns at once."""
        self._write({"ids": batch.ids, "lengths": batch.lengths})

    def take(self) -> str:
        """Wait for the next plan, in the order of `submit`.

        Returns:
            Its JSON text.

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
    settings = json.loads(requests.readline())
    planner = make_planner(
        PlannerConfig(**settings["planner"]),
        GroupTree(tuple(settings["tree"])),
        ModelShape(**settings["shape"]),
        settings["longest"],
    )
    for line in requests:
        batch = json.loads(line)
        try:
            plan = planner.plan(SequenceBatch(tuple(batch["ids"]), tuple(batch["lengths"])))
        except errors.NestspError as error:
            answer(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            answer(json.dumps(plan.to_json()))


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; this process ends with its input
    _serve(sys.stdin, lambda text: print(text, flush=True))
