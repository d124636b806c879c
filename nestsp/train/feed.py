"""Brings every rank the same plan of the next batch, planned ahead by rank 0.

Every rank takes the same batches from the stream, which is a function of the seed and the position alone. Rank 0's
planning process works a few batches ahead; rank 0 broadcasts each plan as text; every rank checks it against its own
batch and compares digests, before it acts.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass

from nestsp.batch import SequenceBatch
from nestsp.cost.model import CostModel
from nestsp.data.stream import DataState
from nestsp.errors import NestspError, PlanError
from nestsp.execute.executor import Executor
from nestsp.planners.task import Planned, PlanningTask
from nestsp.planners.worker import PlanningProcess
from nestsp.train.agreement import everywhere
from nestsp.train.prepare import Prepared
from nestsp.train.world import World

__all__ = ["PlanFeed", "PlannedBatch"]

_AHEAD = 3


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One step's plan.

    Attributes:
        planned: The plan.
        after: Where the data stand after it.
        wait_s: Seconds that this rank waited until it had it; checking it with the others, who may be late for reasons
            of their own, comes after.
    """

    planned: Planned
    after: DataState
    wait_s: float


class PlanFeed:
    """Plans of a run, one a step, from a position in the data on."""

    def __init__(
        self,
        prepared: Prepared,
        task: PlanningTask,
        world: World,
        executor: Executor,
        start: DataState,
        num_steps: int,
    ) -> None:
        self._prepared, self._task, self._world, self._executor = prepared, task, world, executor
        self._cost: CostModel = task.cost()
        self._state = start
        self._left = num_steps
        self._ahead: deque[tuple[SequenceBatch, DataState]] = deque()
        self._process: PlanningProcess | None = None
        if world.is_first:
            self._process = PlanningProcess(task)

    def take(self) -> PlannedBatch:
        """The next step's plan, checked and equal on all ranks; every rank must call it.

        Raises:
            NestspError: The batch cannot be planned, or a plan is not what it must be; on every rank.
        """
        while self._left and len(self._ahead) < _AHEAD:
            batch, after = self._prepared.stream.take(self._state)
            self._ahead.append((batch, after))
            self._state = after
            self._left -= 1
            if self._process is not None:
                self._process.submit(batch)
        batch, after = self._ahead.popleft()
        begun = time.perf_counter()
        answer: str | NestspError | None = self._answer() if self._world.is_first else None
        text = self._world.share(answer)
        wait_s = time.perf_counter() - begun
        assert isinstance(text, (str, NestspError))
        found: list[Planned] = []
        digests = self._world.agree(lambda: self._check(text, batch, found))
        if len(set(digests)) != 1:
            raise everywhere(
                PlanError("the ranks hold different plans of one batch, but must hold the same; report this as a bug")
            )
        return PlannedBatch(found[0], after, wait_s)

    def close(self) -> None:
        """End the planning process."""
        if self._process is not None:
            self._process.close()

    def _answer(self) -> str | NestspError:
        assert self._process is not None
        try:
            return self._process.take()
        except NestspError as error:
            return error

    def _check(self, text: str | NestspError, batch: SequenceBatch, found: list[Planned]) -> str:
        """Leave what this rank knows of its plan in ``found``; return its digest."""
        if isinstance(text, NestspError):
            raise text
        planned = Planned.from_json(json.loads(text))
        plan = planned.plan
        if plan.batch != batch or plan.tree != self._prepared.tree:
            raise PlanError(
                "a plan is of another batch or tree than this rank's, but must be of its own; report this as a bug"
            )
        self._task.check(plan, self._cost)
        self._executor.check(plan)
        found.append(planned)
        return plan.digest
