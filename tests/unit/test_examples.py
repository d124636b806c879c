from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nestsp

ROOT = Path(nestsp.__file__).parents[1]


def test_plan_one_batch_draws_a_plan_of_all_three_levels_without_torch() -> None:
    """What a newcomer runs first."""
    example = ROOT / "examples" / "plan_one_batch.py"
    script = f"import runpy, sys; runpy.run_path({str(example)!r}); assert 'torch' not in sys.modules"
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "ranks 0-3  1 sequence, 12,220 tokens: 12,220" in shown
    assert "├─ ranks 0-1  1 sequence, " in shown or "└─ ranks 2-3  1 sequence, " in shown
    assert "rank 3  " in shown
    assert "imbalance (slowest rank / mean - 1): " in shown
    assert float(shown.split()[-1].rstrip("%")) < 15
