"""What a save beside training costs it, against a training step.

    python -m benchmarks.saving

Trains a Qwen3 of 46 M parameters (model and AdamW's moments: 550 MB) on 2 ranks of this machine, with a checkpoint
after each third step. The delay of a save is what the loop waited for it, and what the steps beside it took more than
the median of those without one. Target: less than one step. The same with saves that training waits for is printed too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import where

EVERY, NUM_STEPS = 3, 13
SETTINGS = f"""
name: saving
model:
  config: {{model_type: qwen3, vocab_size: 256, hidden_size: 768, num_hidden_layers: 6, num_attention_heads: 12,
            num_key_value_heads: 4, head_dim: 64, intermediate_size: 2560, max_position_embeddings: 8192}}
data: {{source: stdlib, max_length: 2048, over_length: drop, tokens_per_step: 2048}}
cluster: {{ranks: 2, device: cpu}}
train: {{steps: {NUM_STEPS}, checkpoint_every: {EVERY}, keep_checkpoints: 1, export: false}}
"""


def measure(folder: Path, background: bool) -> tuple[list[float], list[float], float, int]:
    """Train once.

    Returns:
        Delays of the saves that steps followed, steps without a save beside them, seconds of the longest wait for one,
        and bytes of a checkpoint.
    """
    (folder / "saving.yaml").write_text(SETTINGS, encoding="utf-8")
    setting = f"train.save_in_background={str(background).lower()}"
    command = [sys.executable, "-m", "nestsp", "train", "saving.yaml", "--set", setting]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    beside = [step for step in steps if step["save_s"] > 0]
    # Batches differ in size: seconds are of a token of the median batch.
    tokens = median(step["num_tokens"] for step in steps)

    def seconds(step: dict[str, float]) -> float:
        return step["step_s"] / step["num_tokens"] * tokens

    quiet = [seconds(step) for step in steps if step["save_s"] == 0]
    delays = [step["save_s"] + seconds(step) - median(quiet) for step in beside]
    [checkpoint] = (run / "checkpoints").iterdir()
    return delays, quiet, max(step["save_s"] for step in beside), sum(p.stat().st_size for p in checkpoint.iterdir())


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        for background in (True, False):
            delays, quiet, wait_s, num_bytes = measure(Path(name), background)
            print(f"{'beside training' if background else 'training waits'}: {num_bytes / 1e6:,.0f} MB a checkpoint")
            print(f"  step without a save {median(quiet):.2f} s (median of {len(quiet)})")
            print(f"  delay by a save {', '.join(f'{delay:.2f}' for delay in delays)} s; waited at most {wait_s:.2f} s")
            print(f"  median delay over step {median(delays) / median(quiet):.2f} (target: below 1)")
    print(where())


if __name__ == "__main__":
    main()
