"""Long context for real: the benchmark at its full size, which measures memory and compares gradients itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import TORCHRUN, environment

MOST_S = 1200  # the limit, reference included, on an idle machine of two cores


@pytest.mark.slow
@pytest.mark.timeout(MOST_S + 60)
def test_131072_tokens_beside_500_short_sequences_run_exactly_and_within_the_memory_model() -> None:
    found = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "benchmarks.long_context"],
        cwd=Path(__file__).parents[2],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1] == "reached"
