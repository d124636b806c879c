from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nestsp
from nestsp.config import load_config
from nestsp.data.samples import open_evaluation, open_samples
from nestsp.data.store import LabelledTokens

ROOT = Path(nestsp.__file__).parents[1]


def test_plan_one_batch_draws_a_plan_of_all_three_levels_without_torch() -> None:
    """What a newcomer runs first."""
    example = ROOT / "examples" / "plan_one_batch.py"
    script = f"import runpy, sys; runpy.run_path({str(example)!r}); assert 'torch' not in sys.modules"
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "ranks 0-3  1 sequence, 12,220 tokens: 12,220" in shown
    assert re.search("[├└]─ ranks (0-1|2-3)  [0-9]+ sequence", shown)
    assert "rank 3  " in shown
    assert "imbalance (slowest rank / mean - 1): " in shown
    assert float(shown.split()[-1].rstrip("%")) < 15


def test_the_chat_example_learns_what_the_assistant_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    data = load_config(Path("examples/chat/run.yaml"), [f"data.cache_dir={tmp_path}"]).data
    samples, held_out = open_samples(data), open_evaluation(data)
    assert held_out is not None
    learned = []
    for table in (samples, held_out):
        tokens = table.read(1, 0, int(table.lengths[1]))
        assert isinstance(tokens, LabelledTokens)
        learned.append(bytes(token for token, weight in zip(tokens.ids, tokens.weights, strict=True) if weight))
    assert learned == [b"Eight.<|end|>Six.<|end|>", b"Hallo.<|end|>"]
    assert len(samples.shares) == 2
