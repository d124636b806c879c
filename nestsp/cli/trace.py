"""``nestsp trace``: one step of a run, measured and estimated side by side. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nestsp.errors import ConfigError
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.report.measured import TimedTurn, attention_s, waited_s
from nestsp.report.trace import write_trace
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate
from nestsp.units import format_seconds, plural

__all__ = ["trace_run"]


def trace_run(run: Path, *, step: int | None, out: Path | None) -> None:
    """Merge the turns that all ranks measured in one step with the simulated timeline of its plan.

    Args:
        run: The run's folder.
        step: The step; None for the first one that was traced.
        out: The file to write; None for one beside what the ranks wrote.

    Raises:
        ConfigError: The run has no traced step, or not this one.
    """
    folder = run / "trace"
    try:
        task = PlanningTask.from_json(json.loads((folder / "task.json").read_text(encoding="utf-8")))
        lines = [list(_lines(folder / f"rank-{rank:05d}.jsonl")) for rank in range(task.tree.num_ranks)]
        plans = {line["step"]: line for line in _lines(run / "plans.jsonl")}
    except OSError as error:
        raise ConfigError(
            f"{run} has no traced step: {error.filename} is missing; train with train.trace_steps set, such as [3, 5]"
        ) from None
    steps = sorted({line["step"] for line in lines[0]} & plans.keys())
    if not steps or step not in (None, *steps):
        there = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--step is {step}, but the traced steps of {run} are: {there}; take one of them")
    chosen = steps[0] if step is None else step
    measured = {
        rank: [TimedTurn.from_json(line) for line in of_rank if line["step"] == chosen]
        for rank, of_rank in enumerate(lines)
    }
    plan = Plan.from_json(plans[chosen])
    timeline = simulate(make_schedule(plan, streaming=task.streaming), task.cost(), record=True)
    path = out or folder / f"step-{chosen:06d}.json"
    try:
        write_trace(timeline, path, measured)
    except OSError as error:
        raise ConfigError(
            f"the trace goes to {path}, but that cannot be written: {error.strerror}; set --out"
        ) from None
    in_attention, waiting = (
        sum(map(seconds, measured.values())) / len(measured) for seconds in (attention_s, waited_s)
    )
    print(
        f"step {chosen} on {plural(len(measured), 'rank')}: {format_seconds(in_attention)} in attention, "
        f"{format_seconds(waiting)} of them waiting for exchanges (means over ranks)"
    )
    print(f"{path} (ui.perfetto.dev shows it; measured and estimated, rank by rank)")


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut short by a crash
            return
