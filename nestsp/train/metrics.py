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

from nestsp.units import format_seconds

__all__ = ["JsonLines", "SpeedMeter", "StepMetrics"]

_STEPS_MEASURED = 2


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step.

    Attributes:
        step: Counted from 1.
        epoch: Counted from 0.
        loss: Mean over all targets of the batch; None for a step without a target.
        lr: Learning rate.
        router_loss: Auxiliary loss of the routers, before its coefficient; None if there is none.
        grad_norm: Norm of the gradient of that mean, before clipping; None for a step without a target.
        num_sequences: Sequences of the batch.
        num_tokens: Their tokens, filler not counted.
        num_targets: Their targets.
        tokens_per_s: ``num_tokens`` / ``step_s``.
        tokens_per_s_per_rank: That over the number of ranks.
        flops_per_s_per_rank: What the model needs for this batch, forward and backward, recomputation not counted, by
            each sequence's own length; over ``step_s`` and the number of ranks.
        mfu: That over what the maker of the device states for bfloat16; None where the cost profile has no such figure,
            or the run computes in something else.
        step_s: Measured, waiting for the plan not counted.
        estimated_s: The plan's makespan by the cost profile, at this machine's speed against the profile as the first
            two steps showed it; None until these are there.
        makespan_s: The plan's makespan by the cost profile as it is.
        gap_to_bound: How far that is above what no plan of this batch undercuts, as a fraction of it.
        planning_s: Seconds that planning took, ahead of the step and beside it.
        attention_s: Measured, mean over ranks, waiting for exchanges included.
        exposed: Measured, mean over ranks: part of the step that attention waited for exchanges, late peers included.
        wait_s: Seconds that this rank waited for its plan.
        save_s: Seconds that this rank waited for checkpoints since the step before.
        load_s: Seconds that the slowest rank read its tokens; part of ``step_s``.
        peak_memory_bytes: The most that any rank has held so far: of a GPU what tensors took, of a CPU all.
        peak_memory_rank: That rank.
        fragmented_bytes: The most that any rank's allocator has taken of a GPU beyond that rank's peak; 0 on CPUs.
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
    tokens_per_s_per_rank: float
    flops_per_s_per_rank: float
    mfu: float | None
    step_s: float
    estimated_s: float | None
    makespan_s: float
    gap_to_bound: float
    planning_s: float
    attention_s: float
    exposed: float
    wait_s: float
    save_s: float
    load_s: float
    peak_memory_bytes: int
    peak_memory_rank: int
    fragmented_bytes: int
    imbalance: float
    num_microbatches: int
    num_sequences_by_degree: Mapping[int, int]
    router_loss: float | None = None

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
        mfu = "" if self.mfu is None else f"MFU {self.mfu:.1%}  "
        rate = f"{self.tokens_per_s:,.0f}" if self.tokens_per_s >= 10 else f"{self.tokens_per_s:.2g}"
        return (
            f"step {self.step:>{width}}/{num_steps}  {learnt}  {rate} tokens/s  {mfu}"
            f"{format_seconds(self.step_s)}{estimated}  imbalance {self.imbalance:.1%}  "
            f"exposed {self.exposed:.1%}  microbatches {self.num_microbatches}  sequences by degree {degrees}"
        )

    def values(self) -> dict[str, float]:
        """Every figure that the step has, by name, for trackers."""
        fields = dataclasses.asdict(self)
        degrees = fields.pop("num_sequences_by_degree")
        figures = {name: value for name, value in fields.items() if value is not None and name != "step"}
        return figures | {f"num_sequences_by_degree/{degree}": count for degree, count in degrees.items()}


class SpeedMeter:
    """Learns how many times longer than by the cost profile a step lasts here, from the first two steps it sees.

    The lower of the two counts, for the first one warms up. One factor cannot tell a slow kernel from a slow link:
    where a profile is of other hardware, estimates of unlike plans are off in unlike ways.
    """

    def __init__(self) -> None:
        self._left = _STEPS_MEASURED
        self._factor = math.inf

    def add(self, makespan_s: float, step_s: float) -> None:
        """Take in a step: what the profile said, and what it took."""
        if self._left:
            self._left -= 1
            self._factor = min(self._factor, step_s / makespan_s)

    def estimate_s(self, makespan_s: float) -> float | None:
        """Seconds of a step that takes so long by the profile; None until two steps were seen."""
        return None if self._left else self._factor * makespan_s


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
