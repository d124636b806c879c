"""Long context for real: the benchmark at its full size, which measures memory and compares gradients itself.

Measured, reference included: 784 s of processor time, which two idle cores do in under 7 minutes.
"""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import TORCHRUN, environment

# The limit, reference included, is 20 minutes. What uses no more processor time keeps it on one idle core; and on a
# machine that does other things too it uses no more, and only takes longer.
MOST_CPU_S, HANGS_AFTER_S = 1200, 3600


@pytest.mark.slow
@pytest.mark.timeout(HANGS_AFTER_S + 60)
def test_131072_tokens_beside_500_short_sequences_run_exactly_and_within_the_memory_model() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "benchmarks.long_context"],
        cwd=Path(__file__).parents[2],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1] == "reached"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S
