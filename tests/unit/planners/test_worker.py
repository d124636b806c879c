"""The planning process: plans and refusals come back in order, whatever a solver prints."""

from __future__ import annotations

import json

import pytest

from nestsp.batch import SequenceBatch
from nestsp.errors import InfeasibleError
from nestsp.planners import PLANNERS
from nestsp.planners.task import Planned
from nestsp.planners.worker import PlanningProcess
from tests.unit.planners.test_planners import TREE, task

BATCHES = [SequenceBatch((7, 3, 9), (900, 41, 200)), SequenceBatch((1,), (5,)), SequenceBatch((8, 2), (700, 700))]


@pytest.mark.parametrize("name", PLANNERS)
def test_another_process_makes_the_same_plans_in_order(name: str) -> None:
    of = task(TREE, 300, name, 4 if name == "static" else None)
    process = PlanningProcess(of)
    for batch in BATCHES:
        process.submit(batch)
    solve = of.solver()
    for batch in BATCHES:
        planned, ours = Planned.from_json(json.loads(process.take())), solve(batch)
        assert planned.plan == ours.plan
        assert (planned.makespan_s, planned.bound_s) == (ours.makespan_s, ours.bound_s)
    process.close()


def test_a_refusal_is_raised_here_and_the_process_goes_on() -> None:
    of = task(TREE, 300)
    process = PlanningProcess(of)
    process.submit(SequenceBatch((4,), (1201,)))
    process.submit(BATCHES[0])
    with pytest.raises(InfeasibleError, match=r"sequence 4 \(1,201 tokens\) needs 301 tokens on each of 4 ranks"):
        process.take()
    assert Planned.from_json(json.loads(process.take())).plan.batch == BATCHES[0]
    process.close()
