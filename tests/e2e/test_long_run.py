"""Two thousand steps take no more memory than two hundred."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.commands import ranks_of, started
from tests.e2e.runs import write_run

STEPS, EARLY = 2000, 200
# What allocators and caches still settle after the first two hundred steps.
GROWTH = 1.02


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no resident memory")


def wait_for_steps(metrics: Path, process: subprocess.Popen[str], num_steps: int) -> None:
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_steps:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


@pytest.mark.slow  # minutes
@pytest.mark.timeout(3600)
def test_memory_after_two_thousand_steps_is_that_after_two_hundred(tmp_path: Path) -> None:
    """Saves in the background, evictions of old ones and records included."""
    write_run(tmp_path)
    with started(
        tmp_path, "train", "tiny.yaml", "--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100",
        "--set", f"train.steps={STEPS + 1000}", "--set", "train.checkpoint_every=50",
        "--set", "train.keep_checkpoints=2", stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        metrics = tmp_path / "runs" / "tiny-1" / "metrics.jsonl"
        wait_for_steps(metrics, process, EARLY)
        ranks = ranks_of(process.pid)
        early = {rank: resident_bytes(pid) for rank, pid in ranks.items()}
        wait_for_steps(metrics, process, STEPS)
        growth = {rank: resident_bytes(pid) / early[rank] for rank, pid in ranks.items()}
    assert sorted(growth) == [0, 1]
    assert max(growth.values()) <= GROWTH, growth
