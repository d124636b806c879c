"""``nestsp simulate``: cells, intervals, what they depend on, and what is refused."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_plan import command

SMALL = ("--batches", 3, "--max-tokens", 40_000, "--max-length", 30_000)
ROUNDING = 1e-9


def simulate(monkeypatch: pytest.MonkeyPatch, source: object, *options: object) -> int:
    cluster, model = ("--cluster", "1x4:h100"), ("--model", "qwen3-0.6b")
    return command(monkeypatch, "simulate", source, *cluster, *model, *SMALL, *options)


def cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: object, *options: object
) -> dict[str, Any]:
    assert simulate(monkeypatch, source, "--json", *options) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_every_ratio_is_that_of_the_times_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = cells(monkeypatch, capsys, "github")["cells"]
    assert cell["estimated"] is True
    static, planners = cell["static"], cell["planners"]
    best = static[str(cell["best_static_degree"])]["makespan_s"]
    assert sum(best) == min(sum(row["makespan_s"]) for row in static.values() if "makespan_s" in row)
    for row in planners.values():
        for over, other in (
            ("over_best_static", best),
            ("over_batch_adaptive", planners["batch-adaptive"]["makespan_s"]),
        ):
            ratio = row[over]
            low, high = ratio["interval_95"]
            assert ratio["value"] == pytest.approx(sum(other) / sum(row["makespan_s"]), rel=ROUNDING)
            assert low - ROUNDING <= ratio["value"] <= high + ROUNDING
    assert all(
        row["over_batch_adaptive"]["value"] <= planners["nsp"]["over_batch_adaptive"]["value"] + ROUNDING
        for row in planners.values()
    )
    assert all(s >= batch["bound_s"] for s, batch in zip(planners["nsp"]["makespan_s"], cell["batches"], strict=True))


def test_the_best_degree_of_each_batch_is_what_batch_adaptive_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (planned,) = cells(monkeypatch, capsys, "arxiv")["cells"]
    (derived,) = cells(monkeypatch, capsys, "arxiv", "--planner", "nsp")["cells"]
    ratios = [cell["planners"]["nsp"]["over_batch_adaptive"]["value"] for cell in (planned, derived)]
    assert ratios[0] == pytest.approx(ratios[1], rel=ROUNDING)


def test_the_same_command_gives_the_same_times_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    for _ in range(2):
        (cell,) = cells(monkeypatch, capsys, "arxiv", "--planner", "nsp")["cells"]
        times.append((cell["planners"]["nsp"]["makespan_s"], cell["best_static_degree"]))
    assert times[0] == times[1]


def test_several_sources_models_and_clusters_make_a_cell_each_and_one_that_fits_nowhere_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--cluster", "2x2:h100", "--model", "qwen3-32b", "--planner", "nsp")
    assert simulate(monkeypatch, "github", *options) == 0
    said = capsys.readouterr().out
    for cluster in ("1x4:h100", "2x2:h100"):
        assert f"\ngithub, qwen3-0.6b, {cluster}\n" in said
        assert f"\ngithub, qwen3-32b, {cluster}: nothing fits: the model needs" in said
    data = cells(monkeypatch, capsys, "github", *options)
    assert ["infeasible" in cell for cell in data["cells"]] == [False, True, False, True]


def test_sensitivity_changes_the_profile_and_also_times_the_plans_that_were_made_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = cells(monkeypatch, capsys, "github", "--sensitivity", "--planner", "batch-adaptive,nsp")
    total = {each["change"]: sum(each["changed"]["planners"]["nsp"]["makespan_s"]) for each in data["sensitivity"]}
    given = sum(data["cells"][0]["planners"]["nsp"]["makespan_s"])
    assert total["computation -20 %"] > given > total["computation +20 %"]
    assert total["bandwidth -20 %"] >= given >= total["bandwidth +20 %"]
    for each in data["sensitivity"]:
        assert each["held_over_anew"]["nsp"]["value"] == pytest.approx(1.0, abs=0.05)


def test_scaling_keeps_the_tokens_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = cells(monkeypatch, capsys, "github", "--scale", "1,3", "--planner", "nsp")
    assert [cell["num_ranks"] for cell in data["scaling"]] == [4, 12]
    assert data["scaling"][0]["batches"] == data["cells"][0]["batches"]
    tokens = [sum(batch["num_tokens"] for batch in cell["batches"]) / cell["num_ranks"] for cell in data["scaling"]]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.2)


def test_markdown_has_a_table_for_each_cell_and_says_that_figures_are_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(monkeypatch, "github", "--markdown", "--planner", "nsp") == 0
    said = capsys.readouterr().out
    assert said.startswith("# Planners compared (estimated)\n")
    assert "\n## github, qwen3-0.6b, 1x4:h100\n\n| planner | mean step |" in said
    assert "| nsp |" in said


def test_nothing_but_lines_is_written_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(monkeypatch, "github", "--planner", "nsp") == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out
    assert said.err == ""


def test_a_terminal_sees_a_progress_bar_that_is_gone_at_the_end() -> None:
    ours, theirs = pty.openpty()
    options = [*("--cluster", "1x4:h100", "--model", "qwen3-0.6b"), *map(str, SMALL)]
    started = subprocess.Popen(
        [sys.executable, "-m", "nestsp", "simulate", "github", "--planner", "nsp", *options],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    said = b""
    try:
        while block := os.read(ours, 1 << 16):
            said += block
    except OSError:  # the other end is closed, and all is read
        pass
    os.close(ours)
    assert started.wait(timeout=60) == 0
    assert b"planning" in said
    assert b"/12" in said  # three batches for each of nsp and three degrees
    assert said.index(b"\x1b[2K") < said.index(b"best static:")
    assert b"\x1b" not in said[said.index(b"best static:") :]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_chart_is_drawn(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart{suffix}"
    assert simulate(monkeypatch, "github", "--chart", path, "--scale", "1,2", "--model", "qwen3-32b") == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == ".png" else b"</svg>" in content
    assert f"the chart is in {path}" in capsys.readouterr().out


def test_a_chart_without_matplotlib_says_what_to_install_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate(monkeypatch, "github", "--chart", tmp_path / "a.png") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "need matplotlib, which is not installed; pip install 'nestsp[charts]'" in said.err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--json", "--markdown"], "both given, but one thing is printed"),
        (["--scale", "1,two"], "--scale is '1,two', but it must be numbers of hosts"),
        (["--scale", "0"], "must be numbers of hosts"),
        (["--scale", "8,999999999"], "3,999,999,996 ranks, but at most 1,048,576 are planned for"),
        (["--chart", "a.gif"], "a chart is one of .png, .svg, .pdf"),
        (["--chart", "no/such/a.png"], "there is no folder"),
        (["--planner", "nps"], "did you mean 'nsp'?"),
        (["--memory", "1"], "InfeasibleError: the model needs"),
    ],
)
def test_a_bad_option_is_one_clear_sentence(
    options: list[str], rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(monkeypatch, "github", *options) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert rule in line
    assert said.out == "" or "InfeasibleError" in rule
