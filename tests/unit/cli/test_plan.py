from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestsp.cli.plan import COSTED_PLANNERS, plan_lengths
from nestsp.errors import ConfigError, InfeasibleError, NestspError
from nestsp.plan import Plan

LENGTHS = [60_000, 9_000, 8_000, 3_000, *[1_000] * 40, 0]


def run(tmp_path: Path, **changes: Any) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS))
    arguments: dict[str, Any] = {
        "cluster": "2x4:h100",
        "model": "qwen3-8b",
        "planner": "all",
        "max_tokens": None,
        "max_length": None,
        "seed": 0,
        "memory_gib": None,
        "as_json": False,
        "trace": None,
    }
    plan_lengths(str(path), **{**arguments, **changes})


def test_the_table_has_every_planner_and_the_tree_of_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    said = capsys.readouterr().out
    for name in COSTED_PLANNERS:
        assert (name in said) == (name != "flexsp")
    assert "dropped: 1 empty sequence" in said
    assert "ranks 0-7" in said
    assert "no plan is faster than" in said


def test_json_holds_the_plan_and_figures_in_si_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, as_json=True, planner="nsp")
    data = json.loads(capsys.readouterr().out)
    (row,) = data["planners"]
    plan = Plan.from_json(row["plan"])
    assert plan.batch.num_tokens == sum(LENGTHS)
    assert row["makespan_s"] >= data["bound"]["makespan_s"] > data["bound"]["ideal_s"] > 0
    assert row["gap_to_bound"] == pytest.approx(row["makespan_s"] / data["bound"]["makespan_s"] - 1)


def test_a_trace_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, planner="nsp", trace=tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "trace of nsp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "error", "rule"),
    [
        ({"cluster": "2x4"}, ConfigError, "must name its hardware"),
        ({"cluster": "2by4:h100"}, ConfigError, "hosts x ranks"),
        ({"cluster": "0x4:h100"}, ConfigError, "at least 1"),
        ({"cluster": "2x4:h10"}, ConfigError, "did you mean 'h100'"),
        ({"model": "qwen3-9b"}, ConfigError, "did you mean 'qwen3-8b'"),
        ({"planner": "nps"}, ConfigError, "did you mean 'nsp'"),
        ({"memory_gib": 1.0}, InfeasibleError, "the model needs"),
        ({"cluster": "1x2:h100", "model": "qwen3-0.6b", "memory_gib": 13.0}, InfeasibleError, "sequence 0"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    tmp_path: Path, changes: dict[str, Any], error: type[NestspError], rule: str
) -> None:
    with pytest.raises(error, match=rule):
        run(tmp_path, **changes)
