"""Writes the turns of the traced steps, a file for each rank; `nestsp.cli.trace` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestsp.errors import ConfigError
from nestsp.planners.task import PlanningTask
from nestsp.report.measured import TimedTurn
from nestsp.train.metrics import JsonLines

__all__ = ["TraceFiles"]


@dataclass(frozen=True, slots=True, eq=False)
class TraceFiles:
    """What one rank writes of the run's traced steps.

    Attributes:
        steps: The traced steps.
        lines: This rank's file; None if no step is traced.
    """

    steps: range
    lines: JsonLines | None

    @classmethod
    def open(
        cls, run: Path, steps: tuple[int, int] | None, task: PlanningTask, rank: int, last_step: int
    ) -> TraceFiles:
        """Open this rank's file.

        Args:
            run: The run's folder.
            steps: First and last step to trace, or None.
            task: What plans are made for, so that they can be estimated later.
            rank: This rank.
            last_step: The run goes on after it; what an earlier start wrote of later ones is dropped.

        Raises:
            ConfigError: The folder cannot be written.
        """
        if steps is None:
            return cls(range(0), None)
        folder = run / "trace"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                (folder / "task.json").write_text(json.dumps(task.to_json()) + "\n", encoding="utf-8")
            lines = JsonLines.resume(folder / f"rank-{rank:05d}.jsonl", last_step)
        except OSError as error:
            raise ConfigError(
                f"train.trace_steps is {list(steps)}, but {folder} cannot be written: {error.strerror}; make room, or "
                "leave it out"
            ) from None
        return cls(range(steps[0], steps[1] + 1), lines)

    def write(self, step: int, turns: Sequence[TimedTurn]) -> None:
        """Write a step's turns, if it is one to trace."""
        if self.lines is not None and step in self.steps:
            for turn in turns:
                self.lines.write({"step": step, **turn.to_json()})
