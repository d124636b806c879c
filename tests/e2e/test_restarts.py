"""A rank that dies costs the steps since the last checkpoint and nothing else; one that hangs is named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e import troubled_rank
from tests.e2e.commands import NESTSP, TORCHRUN, Finished, is_running, ranks_of, run, started, wait_until
from tests.e2e.runs import contents, losses, read_lines, write_run

SETTINGS = (
    "--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100", "--set", "train.steps=8",
    "--set", "train.checkpoint_every=2", "--set", "train.keep_checkpoints=2",  # at step 5 that of step 2 is whole
)  # fmt: skip


def train(folder: Path, trouble: str, *more: str, restarts: int = 1) -> Finished:
    write_run(folder)
    return run(
        folder, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts),
        troubled_rank.__file__, trouble, "train", "tiny.yaml", *SETTINGS, *more, program=TORCHRUN,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(folder, "none")
    assert result.code == 0, result.err
    return folder / "runs" / "tiny-1"


@pytest.mark.parametrize(
    "trouble",
    [
        "die:1:5",
        "die-saving:0:8",  # in its second save; each has four files of rank 0
        pytest.param("die:0:8", marks=pytest.mark.slow),  # the last update; 20 s of two cores each
        pytest.param("die-saving:1:3", marks=pytest.mark.slow),  # in its second save
    ],
)
def test_a_rank_that_is_killed_at_a_step_or_in_a_save_leaves_the_run_as_if_it_had_not(
    undisturbed: Path, tmp_path: Path, trouble: str
) -> None:
    """G3, G8: torchrun restarts the ranks, which go on from the last whole checkpoint, without being told."""
    result = train(tmp_path, trouble)
    assert result.code == 0, result.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-1"]
    ours = tmp_path / "runs" / "tiny-1"
    assert losses(ours) == losses(undisturbed)
    assert read_lines(ours / "plans.jsonl") == read_lines(undisturbed / "plans.jsonl")
    assert contents(ours / "hf") == contents(undisturbed / "hf")
    assert sorted(path.name for path in (ours / "checkpoints").iterdir()) == ["step-000006", "step-000008"]


def test_a_rank_killed_before_the_first_checkpoint_begins_the_run_again(undisturbed: Path, tmp_path: Path) -> None:
    result = train(tmp_path, "die:1:2", "--set", "train.export=false")
    assert result.code == 0, result.err
    assert losses(tmp_path / "runs" / "tiny-2") == losses(undisturbed)


def test_a_rank_that_never_comes_back_is_named_with_its_line_of_code_and_the_job_ends(tmp_path: Path) -> None:
    """F14."""
    result = train(tmp_path, "sleep:1:2", "--set", "train.stall_s=3", restarts=0)
    assert result.code == 1
    [first] = [line for line in result.err.splitlines() if line.startswith("nestsp: ")]
    assert first == ("nestsp: step 2 has stopped: a rank has not moved for train.stall_s = 3 seconds; all ranks end")
    places = {line[6]: line for line in result.err.splitlines() if re.match(r"\[rank \d\] updates", line)}
    assert sorted(places) == ["0", "1"]
    assert "in sleep_for_ever (troubled_rank.py:" in places["1"]
    assert "in update (" in places["0"] or "← update (" in places["0"]


@pytest.mark.parametrize(
    "program",
    [NESTSP, (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "nestsp")],
    ids=["nestsp", "torchrun"],
)
def test_a_rank_that_is_stopped_is_named_and_ended_without_the_launchers_patience(
    tmp_path: Path, program: Sequence[str]
) -> None:
    """F14: SIGSTOP, as a debugger or a scheduler does it."""
    write_run(tmp_path)
    with started(
        tmp_path, "train", "tiny.yaml", *SETTINGS, "--set", "train.steps=100000", "--set", "train.stall_s=3",
        program=program,
    ) as process:  # fmt: skip
        metrics = tmp_path / "runs" / "tiny-1" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "two steps")
        stopped = ranks_of(process.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        begun = time.monotonic()
        _, err = process.communicate(timeout=120)
        took_s = time.monotonic() - begun
    assert process.returncode == 1
    lines = [line for line in err.splitlines() if line.startswith(("nestsp: ", "[rank "))]
    assert lines[0].startswith("nestsp: step ")
    assert lines[0].endswith(" has stopped: a rank has not moved for train.stall_s = 3 seconds; all ranks end")
    assert lines[1].startswith("[rank 0] ")
    assert re.search(r"no move for \d+ s$", lines[1])
    assert lines[2] == "[rank 1] gives no answer: its process is stopped, or hangs where Python cannot run"
    assert len(lines) == 3
    assert not is_running(stopped)
    # About 8 s on a quiet machine. torchrun alone would let the stopped rank be for 30 s after the verdict.
    assert took_s < 30


@pytest.mark.slow  # the kill and the restart are tested each by itself; 20 s of two cores
def test_a_rank_that_is_stopped_costs_the_steps_since_the_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    """F14: the job restarts as after a death."""
    result = train(tmp_path, "stop:1:5", "--set", "train.stall_s=3")
    assert result.code == 0, result.err
    assert losses(tmp_path / "runs" / "tiny-1") == losses(undisturbed)
