"""``nestsp plan``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nestsp.cli.main import main
from nestsp.cli.options import PLANNER_NAMES
from nestsp.data.lengths import LENGTH_TABLES
from nestsp.plan import Plan
from nestsp.planners import PLANNERS

LENGTHS = [60_000, 9_000, 8_000, 3_000, *[1_000] * 40, 0]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS))
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["nestsp", *(str(argument) for argument in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def plan(monkeypatch: pytest.MonkeyPatch, source: object, *options: object) -> int:
    return command(monkeypatch, "plan", source, "--cluster", "2x4:h100", "--model", "qwen3-8b", *options)


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: object, options: Sequence[object]
) -> str:
    """The one line on standard error of a command that ends with 2."""
    assert plan(monkeypatch, source, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_names_of_the_option_are_those_of_the_planners() -> None:
    assert {"static", *PLANNER_NAMES} == set(PLANNERS)


def test_help_names_the_planning_commands_and_their_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    for name in ("plan", "simulate"):
        assert f"\n  {name} " in said
        assert command(monkeypatch, name, "--help") == 0
        assert "estimated" in capsys.readouterr().out
    assert command(monkeypatch, "plan", "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    for source in (".jsonl", ".npy", ".npz", ".csv", ".parquet", "folder of text", "stdlib", *LENGTH_TABLES):
        assert source in said


def test_all_planners_but_the_slow_one_are_in_the_table_and_the_best_plan_is_drawn(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths) == 0
    said = capsys.readouterr().out
    for name in PLANNER_NAMES:
        assert (f"\n{name} " in said) == (name != "flexsp")
    assert "warning: dropped 1 empty sequence" in said
    assert "estimated, nothing is run: no plan is faster than" in said
    assert re.search(r"\n  ranks 0-7: \d+ sequences?,? ", said)
    assert "3 communicators" in said


def test_json_holds_the_plan_and_figures_in_si_units(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths, "--json", "--planner", "nsp") == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["planners"]
    assert Plan.from_json(row["plan"]).batch.num_tokens == sum(LENGTHS)
    assert row["makespan_s"] >= data["bound"]["makespan_s"] > data["bound"]["ideal_s"] > 0
    assert row["gap_to_bound"] == pytest.approx(row["makespan_s"] / data["bound"]["makespan_s"] - 1)
    assert row["peak_bytes"] <= data["memory_per_rank_bytes"]
    assert data["num_empty_dropped"] == 1
    assert data["estimated"] is True


def test_a_trace_is_written(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths, "--planner", "nsp", "--trace", tmp_path / "trace.json") == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "the timeline of nsp is in" in capsys.readouterr().out


def test_a_limit_drops_and_counts_what_is_longer(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths, "--planner", "nsp", "--max-length", 8_500) == 0
    said = capsys.readouterr().out
    assert "warning: dropped 1 empty sequence\nwarning: dropped 2 sequences over 8,500 tokens\n" in said


@pytest.mark.parametrize(
    ("policy", "batch", "warning"),
    [
        ("truncate", "44 sequences, 68,000 tokens", "truncated 2 sequences over 8,500 tokens"),
        (
            "split",
            f"52 sequences, {sum(LENGTHS):,} tokens",
            "10 sequences of the batch are pieces of ones over 8,500 tokens",
        ),
    ],
)
def test_what_is_over_a_limit_is_cut_as_asked_and_counted(
    lengths: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    batch: str,
    warning: str,
) -> None:
    assert plan(monkeypatch, lengths, "--planner", "nsp", "--max-length", 8_500, "--over-length", policy) == 0
    said = capsys.readouterr().out
    assert f"\n{batch}, longest 8,500;" in said
    assert f"warning: {warning}\n" in said


def test_the_solver_writes_nothing_so_json_stays_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("8000\n3000\n1000\n1000\n")
    command = ("plan", "a.jsonl", "--cluster", "1x2:h100", "--model", "qwen3-0.6b", "--planner", "flexsp", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "nestsp", *command], cwd=tmp_path, capture_output=True, timeout=120, check=True
    )
    (row,) = json.loads(done.stdout)["planners"]
    assert row["planner"] == "flexsp"
    assert done.stderr == b""


@pytest.mark.parametrize("option", ["--memory", "--network"])
@pytest.mark.parametrize("value", [0, "nan"])
def test_what_help_says_of_a_least_value_is_what_holds(
    option: str, value: object, lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths, option, value) == 2
    assert f"Invalid value for '{option}': " in capsys.readouterr().err
    assert command(monkeypatch, "plan", "--help") == 0
    assert capsys.readouterr().out.count("x>=0.001") == 2


def test_a_batch_that_no_table_can_fill_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nestsp.data.lengths._MOST_SEQUENCES", 1 << 15)
    said = refusal(monkeypatch, capsys, "wikipedia", ["--max-tokens", 10**15])
    assert "1 times 1,000,000,000,000,000 tokens are asked for, but those are more than 32,768 sequences" in said


def test_a_full_batch_says_what_is_left_for_later(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, lengths, "--planner", "nsp", "--max-tokens", 70_000) == 0
    assert "the batch is full: 43 sequences of" in capsys.readouterr().out


def test_a_faster_network_makes_the_estimate_faster(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for gbit_per_s in (100, 10_000):
        assert plan(monkeypatch, lengths, "--planner", "nsp", "--json", "--network", gbit_per_s) == 0
        seconds.append(json.loads(capsys.readouterr().out)["planners"][0]["makespan_s"])
    assert seconds[0] > seconds[1]


def test_the_model_may_be_a_config_json(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = []
    for model in (tmp_path, "qwen3-0.6b"):
        assert plan(monkeypatch, lengths, "--planner", "nsp", "--json", "--model", model) == 0
        said.append(json.loads(capsys.readouterr().out)["bound"])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--cluster", "2x4"], "must name its hardware, such as 8x8:h100"),
        (["--cluster", "2by4:h100"], "must be hosts x ranks of each"),
        (["--cluster", "x:h100"], "must be hosts x ranks of each"),
        (["--cluster", "0x4:h100"], "the cluster is 0x4, but hosts and ranks of each must be at least 1"),
        (["--cluster", "999999999x9:h100"], "8,999,999,991 ranks, but at most 1,048,576 are planned for"),
        (["--cluster", "2x4:h10"], "did you mean 'h100'?"),
        (["--model", "qwen3-9b"], "did you mean 'qwen3-8b'?"),
        (["--planner", "nps"], "did you mean 'nsp'?"),
        (["--planner", "nsp,bsp"], "did you mean 'basp'?"),
        (["--planner", "all,"], "--planner is '', but the planners are all, batch-adaptive,"),
        (["--network", "inf"], "--network is inf, but it must be a number above 0"),
        (["--memory", "1"], "InfeasibleError: the model needs"),
        (["--memory", "27"], "InfeasibleError: sequence 0 (60,000 tokens) needs"),
        (["--max-length", "9000", "--over-length", "error"], "sequence 0 has 60,000 tokens, but the limit is 9,000"),
        (["--over-length", "trunc"], "did you mean 'truncate'?"),
        (["--max-length", "500"], "none of 45 sequences is left: 1 are empty and 44 are longer than 500 tokens"),
        (["--trace", "no/such/folder/trace.json"], "there is no folder"),
    ],
)
def test_a_bad_option_is_one_clear_sentence(
    lengths: Path,
    options: list[str],
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert rule in refusal(monkeypatch, capsys, lengths, options)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "has no lengths, but planning needs at least one"),
        ("0\n", "none of 1 sequence is left: 1 are empty; give another source"),
        ("5\n-5\n", "sequence 1 of"),
        ("2.5\n", "has length 2.5, but a length is a whole number"),
        ("10000000\n", "sequence 0 (10,000,000 tokens) needs"),
    ],
)
def test_bad_lengths_are_one_clear_sentence(
    text: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    assert rule in refusal(monkeypatch, capsys, path, [])


@pytest.mark.parametrize(
    ("text", "rule"),
    [("figures: [", "is not valid YAML"), ("format: 1\n", "has no figures"), ("\0", "is not valid YAML")],
)
def test_a_damaged_profile_is_one_clear_sentence(
    text: str,
    rule: str,
    lengths: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(text)
    assert rule in refusal(monkeypatch, capsys, lengths, ["--cluster", f"2x4:{profile}"])
