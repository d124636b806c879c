"""Comparisons of planners, on timelines that are made up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import Bound
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import Plan
from nestsp.report.comparison import ADAPTIVE, BEST_STATIC, Cell, ratio_of_totals
from nestsp.report.simulation import Simulation
from nestsp.report.tables import PlannerRow
from nestsp.schedule import make_schedule
from nestsp.simulate import Timeline

COST = make_cost_model(known_model("qwen3-0.6b"), Cluster(1, 2), load_profile("h100"))
BATCH = SequenceBatch.of_lengths([5])
PLAN = Plan.of_groups(COST.tree, BATCH, [{COST.tree.group(0, 0): [0]}], "test")


def rows(times: Sequence[float | None]) -> tuple[PlannerRow, ...]:
    one, each = np.ones(2), np.ones((1, 2))
    return tuple(
        PlannerRow("x", None, 0.1, "sequence 7 does not fit")
        if seconds is None
        else PlannerRow("x", Timeline(make_schedule(PLAN), seconds, (seconds,), one, one, one, each, each, one), 0.1)
        for seconds in times
    )


def cell(static: dict[int, list[float | None]], planned: dict[str, list[float | None]]) -> Cell:
    num_batches = len(next(iter(planned.values())))
    return Cell(
        "a, b, c",
        COST,
        (BATCH,) * num_batches,
        (Bound(0.5, 0.4, 1),) * num_batches,
        {degree: rows(times) for degree, times in static.items()},
        {name: rows(times) for name, times in planned.items()},
    )


def test_best_static_is_the_fastest_degree_over_all_batches_among_those_that_fit_each() -> None:
    made = cell({4: [3.0, 3.0], 2: [1.0, 4.0], 1: [1.0, None]}, {"nsp": [1.0, 3.0]})
    assert made.best_static_degree == 2
    ratio = made.speedup("nsp", BEST_STATIC)
    assert ratio is not None
    assert ratio.value == 5 / 4


def test_where_no_degree_fits_each_batch_there_is_no_ratio_and_the_table_says_so() -> None:
    made = cell({2: [1.0, None], 1: [None, 1.0]}, {"batch-adaptive": [2.0, 2.0], "nsp": [1.0, 1.0]})
    assert made.best_static_degree is None
    assert made.speedup("nsp", BEST_STATIC) is None
    over_adaptive = made.speedup("nsp", "batch-adaptive")
    assert over_adaptive is not None
    assert over_adaptive.value == 2.0
    said = Simulation((), (made,)).to_text()
    assert "no degree fits each batch" in said
    assert "there is no best static, and no ratio over it" in said
    assert made.to_json()["planners"]["nsp"]["over_best_static"] is None


def test_a_planner_without_a_plan_of_some_batch_has_no_ratio_and_the_table_says_why() -> None:
    made = cell({1: [1.0, 1.0]}, {"basp": [1.0, None], "nsp": [1.0, 1.0]})
    assert made.speedup("basp", BEST_STATIC) is None
    assert "no plan of 1 of 2 batches: sequence 7 does not fit" in Simulation((), (made,)).to_text()


def test_an_interval_covers_the_ratio_and_widens_with_the_spread_of_the_batches() -> None:
    alike = ratio_of_totals([2.0] * 20, [1.0] * 20)
    spread = ratio_of_totals([1.0, 3.0] * 10, [1.0] * 20)
    assert alike.low == alike.value == alike.high == spread.value == 2.0
    assert spread.low < 1.8 < 2.2 < spread.high


def test_the_interval_holds_the_true_ratio_about_nineteen_times_of_twenty() -> None:
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        ratio = ratio_of_totals(random.normal(1.3, 0.2, 40).tolist(), random.normal(1.0, 0.1, 40).tolist())
        inside += ratio.low <= 1.3 <= ratio.high
    assert 88 <= inside <= 99


def test_one_batch_has_no_interval() -> None:
    ratio = ratio_of_totals([2.0], [1.0])
    assert str(ratio) == "2.00 x"
    assert ratio.to_json() == {"value": 2.0, "interval_95": None}


@pytest.mark.parametrize("planner", ["nsp", BEST_STATIC])
def test_gaps_are_over_the_bound(planner: str) -> None:
    assert cell({1: [1.0, 0.75]}, {"nsp": [1.0, 0.75]}).gaps(planner) == [1.0, 0.5]


def test_batch_adaptive_need_not_be_planned_to_be_compared_with() -> None:
    made = cell({2: [1.0, 5.0], 1: [None, 2.0]}, {"nsp": [1.0, 1.0]})
    ratio = made.speedup("nsp", ADAPTIVE)
    assert ratio is not None
    assert ratio.value == 1.5
    assert cell({2: [None, 5.0]}, {"nsp": [1.0, 1.0]}).speedup("nsp", ADAPTIVE) is None
