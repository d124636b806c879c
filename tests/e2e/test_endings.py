"""However a job ends, it ends whole: the rank that failed first is heard, and no process is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nestsp.config import load_config
from nestsp.errors import ConfigError
from nestsp.train.run_folder import open_run_folder
from tests.e2e import failing_rank
from tests.e2e.commands import (
    NESTSP,
    TIMEOUT_S,
    TORCHRUN,
    Finished,
    descendants,
    is_running,
    planning_process,
    ranks_of,
    run,
    started,
    wait_until,
)
from tests.e2e.runs import losses, write_run

TWO_RANKS = ("--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100")
FOR_EVER = ("--set", "train.steps=100000", "--set", "train.checkpoint_every=null")


def end(folder: Path, what: str, which: signal.Signals, program: Sequence[str] = NESTSP) -> Finished:
    """Start a run that would take for ever, send a signal to one of its processes once it trains, and wait for its end.

    Args:
        what: ``launcher``, ``rank`` (the second one) or ``planning``.
        which: The signal.
        program: What is started.
    """
    with started(folder, "train", "tiny.yaml", *TWO_RANKS, *FOR_EVER, program=program) as process:
        metrics = folder / "runs" / "tiny-1" / "metrics.jsonl"
        wait_until(
            lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 2),
            "two steps",
        )
        assert process.poll() is None, process.communicate()
        family = descendants(process.pid)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1]
        pid = {"launcher": process.pid, "rank": ranks[1], "planning": planning_process(process.pid)}[what]
        os.kill(pid, which)
        process.wait(TIMEOUT_S)
        wait_until(lambda: not any(is_running(pid) for pid in family), "every process of the job has ended")
        out, err = process.communicate(timeout=TIMEOUT_S)
    return Finished(process.returncode, out, err)


def test_a_rank_that_is_killed_ends_the_job_and_is_the_only_one_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = end(tmp_path, "rank", signal.SIGKILL)
    assert result.code == 1
    assert result.err == "nestsp: rank 1 was ended by signal 9 (SIGKILL); all ranks were ended\n"


def test_a_rank_that_raises_ends_the_job_and_is_heard_first(tmp_path: Path) -> None:
    write_run(tmp_path)
    script = Path(failing_rank.__file__)
    result = run(
        tmp_path, "--standalone", "--nproc-per-node", "2", str(script), "train", "tiny.yaml",
        *TWO_RANKS, program=TORCHRUN,
    )  # fmt: skip
    assert result.code == 1
    said = [line for line in result.err.splitlines() if line.startswith("[rank ")]
    assert {line.split("]")[0] for line in said} == {f"[rank {failing_rank.FAILING}"}
    assert said[0] == f"[rank {failing_rank.FAILING}] Traceback (most recent call last):"
    assert said[-1] == f"[rank {failing_rank.FAILING}] RuntimeError: the second update of this rank fails"


def test_a_planning_process_that_is_killed_ends_the_job_with_a_word_about_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = end(tmp_path, "planning", signal.SIGKILL)
    assert result.code == 1
    lines = result.err.splitlines()
    assert "[rank 0] RuntimeError: the planning process ended with exit code -9" in lines
    assert lines[-1] == "nestsp: rank 0 ended with exit code 1; its error is above; all ranks were ended"
    assert all(line.startswith(("[rank 0] ", "nestsp: ")) for line in lines)


@pytest.mark.parametrize(
    "which",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],  # the same path; 8 s of two cores
)
def test_a_launcher_that_is_told_to_end_saves_its_last_step_and_ends_all_its_processes(
    tmp_path: Path, which: signal.Signals
) -> None:
    write_run(tmp_path)
    result = end(tmp_path, "launcher", which)
    assert result.code == 128 + which.value
    assert result.err == f"nestsp: ended by {which.name}\n"
    last = len(losses(tmp_path / "runs" / "tiny-1"))
    assert [path.name for path in (tmp_path / "runs" / "tiny-1" / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert "\nended       as a signal to all ranks asked; --resume auto goes on from here\n" in result.out


def test_a_torchrun_that_is_told_to_end_gives_its_ranks_time_to_save(tmp_path: Path) -> None:
    """It tells their planning process too."""
    write_run(tmp_path)
    program = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "nestsp")
    end(tmp_path, "launcher", signal.SIGTERM, program=program)
    last = len(losses(tmp_path / "runs" / "tiny-1"))
    assert [path.name for path in (tmp_path / "runs" / "tiny-1" / "checkpoints").iterdir()] == [f"step-{last:06d}"]


def test_a_signal_saves_and_goes_on_and_a_file_saves_and_ends(tmp_path: Path) -> None:
    write_run(tmp_path)
    run_folder = tmp_path / "runs" / "tiny-1"
    metrics = run_folder / "metrics.jsonl"

    def saved() -> list[Path]:
        return [path for path in (run_folder / "checkpoints").glob("step-*") if (path / "manifest.json").exists()]

    with started(tmp_path, "train", "tiny.yaml", *TWO_RANKS, *FOR_EVER) as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "two steps")
        os.kill(process.pid, signal.SIGUSR1)
        wait_until(lambda: len(saved()) == 1, "a checkpoint that the launcher was asked for")
        with pytest.raises(ConfigError, match="another job is training in it"):  # as a rank of a second job would find
            open_run_folder(load_config(run_folder / "config.yaml"), saved()[0], 2, "second", [])
        os.kill(ranks_of(process.pid)[1], signal.SIGUSR1)
        wait_until(lambda: len(saved()) == 2, "one that a rank was asked for")
        (run_folder / "stop").touch()
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert len(saved()) == 3
    assert max(saved()).name == f"step-{len(losses(run_folder)):06d}"
    assert "as the file runs/tiny-1/stop asked" in out
    assert not (run_folder / "stop").exists()
    assert out.count("is being saved, as SIGUSR1 asked") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert end(tmp_path, "launcher", signal.SIGKILL).code == -signal.SIGKILL
