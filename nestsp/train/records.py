"""What rank 0 writes of every step: metrics and plans as JSON lines, and the figures to the trackers."""

from __future__ import annotations

from pathlib import Path

from nestsp.config import RunConfig
from nestsp.plan import Plan
from nestsp.train.metrics import JsonLines, StepMetrics
from nestsp.train.run_folder import METRICS, PLANS
from nestsp.train.trackers import open_trackers

__all__ = ["Records"]


class Records:
    """The records of one run."""

    def __init__(self, config: RunConfig, folder: Path, last_step: int) -> None:
        self._metrics = JsonLines.resume(folder / METRICS, last_step)
        self._plans = JsonLines.resume(folder / PLANS, last_step)
        self._trackers = open_trackers(config, folder, last_step)

    def write(self, metrics: StepMetrics, plan: Plan) -> None:
        """Add one step."""
        self._metrics.write(metrics)
        self._plans.write({"step": metrics.step, **plan.to_json()})
        for tracker in self._trackers:
            tracker.log(metrics.step, metrics.values())

    def close(self) -> None:
        """End all of them."""
        self._metrics.close()
        self._plans.close()
        for tracker in self._trackers:
            tracker.close()
