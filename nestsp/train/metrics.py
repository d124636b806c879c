"""What each step tells: a record of plain numbers, one JSON line in the run's folder, one line on the screen."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestsp.cost.work import Rates, Work
from nestsp.units import format_seconds

__all__ = ["JsonLines", "RateMeter", "StepMetrics"]

_STEPS_MEASURED = 2


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step.

    Attributes:
        step: Counted from 1.
        epoch: Counted from 0.
        loss: Mean over all targets of the batch; None for a step without a target.
        lr: Learning rate.
        grad_norm: Norm of the gradient of that mean, before clipping; None for a step without a target.
        num_sequences: Sequences of the batch.
        num_tokens: Their tokens, filler not counted.
        num_targets: Their targets.
        tokens_per_s: ``num_tokens`` / ``step_s``.
        step_s: Measured.
        estimated_s: From the plan's work at the rates of the first two steps; None until these are there.
        attention_s: Measured, mean over ranks, waiting for exchanges included.
        wait_s: Seconds that this rank waited for its plan.
        imbalance: Slowest rank over mean, minus 1, by the plan's FLOPs.
        num_microbatches: Of the plan.
        num_sequences_by_degree: How many sequences are split over how many ranks.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float
    grad_norm: float | None
    num_sequences: int
    num_tokens: int
    num_targets: int
    tokens_per_s: float
    step_s: float
    estimated_s: float | None
    attention_s: float
    wait_s: float
    imbalance: float
    num_microbatches: int
    num_sequences_by_degree: Mapping[int, int]

    def line(self, num_steps: int) -> str:
        """One line for people."""
        width = len(str(num_steps))
        degrees = " ".join(f"{degree}:{count}" for degree, count in self.num_sequences_by_degree.items())
        estimated = "" if self.estimated_s is None else f" (estimated {format_seconds(self.estimated_s)})"
        learnt = (
            "no target, nothing changed"
            if self.loss is None or self.grad_norm is None
            else f"loss {self.loss:.4f}  lr {self.lr:.2e}  grad norm {self.grad_norm:.3f}"
        )
        return (
            f"step {self.step:>{width}}/{num_steps}  {learnt}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(self.step_s)}{estimated}  imbalance {self.imbalance:.1%}  "
            f"microbatches {self.num_microbatches}  sequences by degree {degrees}"
        )


class RateMeter:
    """Learns seconds per FLOP from the first two steps it sees: the lower of the two, for the first one warms up."""

    def __init__(self) -> None:
        self._left = _STEPS_MEASURED
        self._linear = self._attention = math.inf

    def add(self, work: Work, step_s: float, attention_s: float) -> None:
        """Take in a step: the work of its slowest ranks, its time, and the part of it spent in attention."""
        if self._left:
            self._left -= 1
            if work.linear and work.attention:
                self._linear = min(self._linear, (step_s - attention_s) / work.linear)
                self._attention = min(self._attention, attention_s / work.attention)

    @property
    def rates(self) -> Rates | None:
        """Seconds per FLOP, once two steps were seen."""
        return None if self._left or math.isinf(self._linear) else Rates(self._linear, self._attention)


class JsonLines:
    """A file of JSON objects, one a line, readable while the run goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def resume(cls, path: Path, last_step: int) -> JsonLines:
        """Open a file of an earlier run and drop its lines of later steps, which are run again."""
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= last_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        return cls(path)

    def write(self, record: Any) -> None:
        """Append one object; a dataclass or a mapping."""
        data = (
            dataclasses.asdict(record) if dataclasses.is_dataclass(record) and not isinstance(record, type) else record
        )
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: str) -> float:
    """The step of a line; one that was cut short by a crash belongs to no step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
