"""Planners side by side on many batches: who is how much faster, and how sure that is.

All figures are estimated by the simulator. A speed-up is a ratio of total times over all batches; its 95 % interval is
a bootstrap over batches, which says how far it depends on which batches came, not how far the estimate is right. *Best
static* is the one degree that is best in hindsight over all batches and fits each; where none does there is no ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestsp.batch import SequenceBatch
from nestsp.cost.bound import Bound, lower_bound
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.planners import Planner, make_planner
from nestsp.planners.baselines import static_degrees
from nestsp.planners.ground import cost_ground
from nestsp.report.tables import PlannerRow
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate

__all__ = [
    "ADAPTIVE",
    "BEST_STATIC",
    "Cell",
    "Ratio",
    "compare",
    "plan_batch",
    "ratio_of_totals",
]

BEST_STATIC = "best static"
ADAPTIVE = "batch-adaptive"
_NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two totals over the same batches.

    Attributes:
        value: The ratio.
        low: Lower end of its 95 % interval.
        high: Upper end.
        num_batches: Batches; of one there is no interval.
    """

    value: float
    low: float
    high: float
    num_batches: int

    def __str__(self) -> str:
        if self.num_batches == 1:
            return f"{self.value:.2f} x"
        return f"{self.value:.2f} x ({self.low:.2f}-{self.high:.2f})"

    def to_json(self) -> dict[str, Any]:
        """The value and its interval, which is null for one batch."""
        interval = None if self.num_batches == 1 else [self.low, self.high]
        return {"value": self.value, "interval_95": interval}


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Sum over sum of paired figures, with a bootstrap interval over the pairs.

    >>> ratio_of_totals([2.0, 4.0], [1.0, 2.0])
    Ratio(value=2.0, low=2.0, high=2.0, num_batches=2)
    """
    top, bottom = np.array(numerators), np.array(denominators)
    drawn = np.random.default_rng(0).integers(0, len(top), (_NUM_RESAMPLES, len(top)))
    low, high = np.quantile(top[drawn].sum(axis=1) / bottom[drawn].sum(axis=1), [0.025, 0.975])
    return Ratio(float(top.sum() / bottom.sum()), float(low), float(high), len(top))


@dataclass(frozen=True, slots=True)
class Cell:
    """All planners on the batches of one source, model and cluster.

    Attributes:
        name: What it is of.
        cost: The cost model.
        batches: The batches.
        bounds: Of each batch.
        static: For each degree, largest first, its plan of each batch, or why it has none.
        planned: For each planner, its plan of each batch, or why it has none.
        why_not: Why no planner can plan it, else empty.
    """

    name: str
    cost: CostModel
    batches: tuple[SequenceBatch, ...]
    bounds: tuple[Bound, ...] = ()
    static: Mapping[int, tuple[PlannerRow, ...]] = field(default_factory=dict)
    planned: Mapping[str, tuple[PlannerRow, ...]] = field(default_factory=dict)
    why_not: str = ""

    @property
    def best_static_degree(self) -> int | None:
        """The degree that is best in hindsight among those that fit each batch; None if none does."""
        totals = {degree: sum(times) for degree in self.static if (times := _times(self.static[degree])) is not None}
        return min(totals, key=lambda degree: (totals[degree], degree)) if totals else None

    def rows(self, planner: str) -> tuple[PlannerRow, ...] | None:
        """What a planner of `planned`, or `BEST_STATIC`, made of each batch; None if there is no best static degree."""
        if planner != BEST_STATIC:
            return self.planned[planner]
        degree = self.best_static_degree
        return None if degree is None else self.static[degree]

    def times_s(self, planner: str) -> list[float] | None:
        """Makespans of all batches; None if the planner has no plan of one."""
        if planner == ADAPTIVE and planner not in self.planned:
            return self._least_static_s()
        rows = self.rows(planner)
        return None if rows is None else _times(rows)

    def speedup(self, planner: str, over: str) -> Ratio | None:
        """How much faster one planner's plans are than another's; None where either has no plan of a batch."""
        mine, theirs = self.times_s(planner), self.times_s(over)
        return None if mine is None or theirs is None else ratio_of_totals(theirs, mine)

    def _least_static_s(self) -> list[float] | None:
        """What batch-adaptive does: the best degree of each batch."""
        times = []
        for number in range(len(self.batches)):
            timelines = [rows[number].timeline for rows in self.static.values()]
            fitting = [timeline.makespan_s for timeline in timelines if timeline is not None]
            if not fitting:
                return None
            times.append(min(fitting))
        return times

    def gaps(self, planner: str) -> list[float] | None:
        """How far each batch is above the bound, as a fraction of it."""
        times = self.times_s(planner)
        return None if times is None else [bound.gap(s) for bound, s in zip(self.bounds, times, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """All figures, SI units."""
        about = {
            "cell": self.name,
            "estimated": True,
            "num_ranks": self.cost.tree.num_ranks,
            "tree": list(self.cost.tree.fanouts),
            "profile": self.cost.profile.name,
            "network_bytes_per_s": self.cost.profile.network_bytes_per_s,
            "memory_per_rank_bytes": self.cost.memory_per_rank_bytes,
        }
        if self.why_not:
            return {**about, "infeasible": self.why_not}
        planners = [BEST_STATIC, *self.planned]
        return {
            **about,
            "batches": [
                {
                    "num_sequences": batch.num_sequences,
                    "num_tokens": batch.num_tokens,
                    "longest": max(batch.lengths),
                    "bound_s": bound.makespan_s,
                    "ideal_s": bound.ideal_s,
                }
                for batch, bound in zip(self.batches, self.bounds, strict=True)
            ],
            "best_static_degree": self.best_static_degree,
            "static": {str(degree): _row_json(rows) for degree, rows in self.static.items()},
            "planners": {
                planner: {
                    **_row_json(self.rows(planner) or ()),
                    "over_best_static": _ratio_json(self.speedup(planner, BEST_STATIC)),
                    "over_batch_adaptive": _ratio_json(self.speedup(planner, ADAPTIVE)),
                }
                for planner in planners
            },
        }


def plan_batch(name: str, planner: Planner, batch: SequenceBatch, cost: CostModel) -> PlannerRow:
    """Plan one batch and walk the plan; or say why there is none."""
    began = time.perf_counter()
    try:
        judged = planner.judge(batch)
    except InfeasibleError as error:
        return PlannerRow(name, None, time.perf_counter() - began, str(error))
    planning_s = time.perf_counter() - began
    return PlannerRow(name, simulate(make_schedule(judged.plan), cost), planning_s)


def compare(
    name: str,
    cost: CostModel,
    batches: Sequence[SequenceBatch],
    planners: Sequence[str],
    *,
    degrees: Sequence[int] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Cell:
    """Plan all batches with all planners and all static degrees.

    Args:
        name: Of the cell.
        cost: The cost model.
        batches: The batches.
        planners: Names in `PLANNERS`, but for ``static``.
        degrees: Which static degrees to try; None for all.
        tick: Called after each plan.
    """
    given = tuple(batches)
    try:
        ground = cost_ground(cost)
        bounds = tuple(lower_bound(batch, cost) for batch in given)
    except InfeasibleError as error:
        return Cell(name, cost, given, why_not=str(error))

    def plan_all(label: str, planner: Planner) -> tuple[PlannerRow, ...]:
        rows = []
        for batch in given:
            rows.append(plan_batch(label, planner, batch, cost))
            tick()
        return tuple(rows)

    tried = static_degrees(cost.tree) if degrees is None else degrees
    static = {degree: plan_all(f"static {degree}", make_planner("static", ground, degree)) for degree in tried}
    planned = {planner: plan_all(planner, make_planner(planner, ground)) for planner in planners}
    return Cell(name, cost, given, bounds, static, planned)


def _times(rows: Sequence[PlannerRow]) -> list[float] | None:
    times = [row.timeline.makespan_s for row in rows if row.timeline is not None]
    return times if len(times) == len(rows) else None


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else ratio.to_json()


def _row_json(rows: Sequence[PlannerRow]) -> dict[str, Any]:
    reasons = [row.why_not for row in rows if row.timeline is None]
    if reasons or not rows:
        return {"infeasible": reasons[0] if reasons else "no degree fits each batch"}
    timelines = [row.timeline for row in rows if row.timeline is not None]
    return {
        "makespan_s": [timeline.makespan_s for timeline in timelines],
        "num_microbatches": [len(timeline.schedule.plan.microbatches) for timeline in timelines],
        "exposed_communication": [timeline.exposed for timeline in timelines],
        "imbalance": [timeline.imbalance for timeline in timelines],
        "peak_bytes": [float(timeline.peak_bytes.max()) for timeline in timelines],
        "planning_s": [row.planning_s for row in rows],
    }
