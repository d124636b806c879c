"""Tables of plans: what each planner's plan costs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nestsp.cost.bound import Bound
from nestsp.simulate import Timeline
from nestsp.units import format_bytes, format_seconds

__all__ = ["PlannerRow", "format_markdown", "format_table", "planner_table"]


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """One planner's plan of one batch.

    Attributes:
        planner: Its name.
        timeline: What its plan does; None if it has none.
        planning_s: Seconds that planning took.
        why_not: Why there is no plan.
    """

    planner: str
    timeline: Timeline | None
    planning_s: float
    why_not: str = ""

    def to_json(self, bound: Bound) -> dict[str, Any]:
        """All figures, SI units."""
        if self.timeline is None:
            return {"planner": self.planner, "infeasible": self.why_not}
        timeline, plan = self.timeline, self.timeline.schedule.plan
        return {
            "planner": self.planner,
            "makespan_s": timeline.makespan_s,
            "gap_to_bound": bound.gap(timeline.makespan_s),
            "over_ideal": timeline.makespan_s / bound.ideal_s,
            "num_microbatches": len(plan.microbatches),
            "exposed_communication": timeline.exposed,
            "imbalance": timeline.imbalance,
            "peak_bytes": float(timeline.peak_bytes.max()),
            "planning_s": self.planning_s,
            "sequences_by_degree": {str(d): n for d, n in plan.num_sequences_by_degree().items()},
            "kept_layers": [m.num_kept_layers for m in plan.microbatches],
            "plan": plan.to_json(),
        }


def planner_table(rows: Sequence[PlannerRow], bound: Bound) -> str:
    """The table that ``nestsp plan`` prints."""
    head = ["planner", "step", "to bound", "to ideal", "microbatches", "exposed", "imbalance", "peak", "planned in"]
    body = []
    for row in rows:
        if row.timeline is None:
            body.append([row.planner, "-", row.why_not])
            continue
        timeline = row.timeline
        body.append(
            [
                row.planner,
                format_seconds(timeline.makespan_s),
                f"+{bound.gap(timeline.makespan_s):.1%}",
                f"{timeline.makespan_s / bound.ideal_s:.2f} x",
                str(len(timeline.schedule.plan.microbatches)),
                f"{timeline.exposed:.1%}",
                f"{timeline.imbalance:.1%}",
                format_bytes(float(timeline.peak_bytes.max())),
                format_seconds(row.planning_s),
            ]
        )
    return format_table(head, body)


def format_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is left-aligned. A short row's last cell may be of any width.

    >>> print(format_table(["a", "b"], [["x", "10"], ["longer", "1"]]))
    a        b
    x       10
    longer   1
    """
    full = [row for row in body if len(row) == len(head)]
    widths = [max(len(row[i]) for row in [head, *full, *(r for r in body if i == 0)]) for i in range(len(head))]
    lines = []
    for row in [head, *body]:
        cells = [row[0].ljust(widths[0])]
        last = len(row) - 1
        for i in range(1, len(row)):
            cells.append(row[i] if i == last and len(row) < len(head) else row[i].rjust(widths[i]))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table; a short row's last cell stands in its column, the rest stays empty.

    >>> print(format_markdown(["a", "b", "c"], [["x", "10", "1"], ["y", "none"]]))
    | a | b | c |
    |---|---|---|
    | x | 10 | 1 |
    | y | none | |
    """
    rows = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in body)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = "|" + "---|" * len(head)
    return "\n".join(line.replace("|  |", "| |") for line in lines)
