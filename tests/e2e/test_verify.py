"""``nestsp verify``: passes what is right, and fails what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import doubled_loss
from tests.e2e.commands import TORCHRUN, run
from tests.e2e.runs import write_run


def test_the_tiny_model_is_equal_on_four_ranks_and_all_levels(tmp_path: Path) -> None:
    write_run(tmp_path, "train.router_loss=counting_pass", "train.recompute=true")  # verified is the plain loss
    result = run(tmp_path, "verify", "tiny.yaml")
    assert result.code == 0, result.out
    assert result.err == ""
    assert "\x1b" not in result.out
    assert re.search(r"^equal: largest error \d\.\de-1\d, tolerance 1e-09$", result.out, re.M)
    for row in ("loss", "gradient norm", "gradients of "):
        assert re.search(rf"^{row}.* (0\.0e\+00|\d\.\de-1\d)$", result.out, re.M), f"a row of {row}"
    assert re.search(r"^experts: 0 of [\d,]+ choices \(tokens × layers\) differ$", result.out, re.M)
    for group in ("ranks 0-3", r"ranks (0-1|2-3)", r"rank \d"):
        assert re.search(rf"[ ─]{group}  \d+ sequences?, \d+ tokens: ", result.out), f"{group} has sequences"
    assert not (tmp_path / "runs").exists(), "a verification is no run"


def test_a_model_that_counts_targets_twice_fails_with_a_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    script = doubled_loss.__file__
    result = run(
        tmp_path, "--standalone", "--nproc-per-node", "2", script, "verify", "tiny.yaml",
        "--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100", "--max-tokens", "150",
        program=TORCHRUN,
    )  # fmt: skip
    assert result.code == 1
    assert re.search(r"^DIFFERENT: largest error 1\.0e\+00, tolerance 1e-09$", result.out, re.M)
    loss = re.search(r"^loss +([\d.]+) +([\d.]+) +1\.0e\+00$", result.out, re.M)
    assert loss is not None
    assert float(loss[1]) == pytest.approx(2 * float(loss[2]))
    assert not [line for line in result.err.splitlines() if line.startswith("[rank ")]


@pytest.mark.slow  # a start each; the paths are those of the first test, and tests/distributed has them in breadth
@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.ranks=1", "planner.max_tokens_per_rank=200"),
        ("cluster.ranks=3",),
        ("planner.name=static", "planner.degree=4"),
        ("planner.name=static", "planner.degree=1", "planner.max_tokens_per_rank=150"),
    ],
)
def test_other_ranks_and_planners_are_equal_too(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    write_run(tmp_path, *overrides)
    result = run(tmp_path, "verify", "tiny.yaml", "--max-tokens", "60")
    assert result.code == 0, result.out
    assert "\nequal: " in result.out
