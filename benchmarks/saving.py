"""What a save beside training costs it, against a training step.

    python -m benchmarks.saving [--pairs 8] [--waiting-pairs 3]

Trains a Qwen3 of 46 M parameters (model and AdamW's moments: 550 MB) on 2 ranks of this machine. All steps are alike:
one sequence of 1,024 tokens. A checkpoint is due every sixth step, so three steps with a save begun before them and
three without one take turns all through the run, and each pair of threes gives the delay of one save: all seconds of
the first three, waiting for the save among them, less those of the second three. What makes the machine slower or
faster meanwhile meets both. Target: the median delay is less than one step. The same with saves that training waits for
is printed too. About 4 minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import median_of, where

HALF = 3
TOKENS = 1024
SETTINGS = f"""
name: saving
model:
  config: {{model_type: qwen3, vocab_size: 256, hidden_size: 768, num_hidden_layers: 6, num_attention_heads: 12,
            num_key_value_heads: 4, head_dim: 64, intermediate_size: 2560, max_position_embeddings: 8192}}
data: {{source: alike.jsonl, sequences_per_step: 1}}
cluster: {{ranks: 2, device: cpu}}
train: {{steps: 1, checkpoint_every: {2 * HALF}, keep_checkpoints: 1, export: false}}
"""


def write_run(folder: Path) -> None:
    """Settings, and samples that are all as long."""
    (folder / "saving.yaml").write_text(SETTINGS, encoding="utf-8")
    rows = [json.dumps({"input_ids": [(number + place) % 256 for place in range(TOKENS)]}) for number in range(64)]
    (folder / "alike.jsonl").write_text("\n".join(rows), encoding="utf-8")


def measure(folder: Path, num_pairs: int, background: bool) -> tuple[list[float], float, float, int]:
    """Train once.

    Returns:
        The delay of each save, seconds of a step without one, of the longest wait for one, and bytes of a checkpoint.
    """
    settings = {
        "train.save_in_background": str(background).lower(),
        "train.steps": str(2 * HALF * (num_pairs + 1)),  # the first threes warm up; the last save has no steps after it
    }
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "nestsp", "train", "saving.yaml", *given]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [step["step_s"] + step["wait_s"] + step["save_s"] for step in steps]
    threes = [seconds[first : first + HALF] for first in range(2 * HALF, len(seconds), HALF)]
    delays = [sum(beside) - sum(quiet) for beside, quiet in zip(threes[::2], threes[1::2], strict=True)]
    step_s = median(second for quiet in threes[1::2] for second in quiet)
    [checkpoint] = (run / "checkpoints").iterdir()
    num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    return delays, step_s, max(step["save_s"] for step in steps), num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--waiting-pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name))
        for background, num_pairs in ((True, options.pairs), (False, options.waiting_pairs)):
            delays, step_s, wait_s, num_bytes = measure(Path(name), num_pairs, background)
            print(f"{'beside training' if background else 'training waits'}: {num_bytes / 1e6:,.0f} MB a checkpoint")
            print(f"  step without a save {step_s:.2f} s (median of {HALF * num_pairs})")
            print(f"  delay by a save {', '.join(f'{delay:.2f}' for delay in delays)} s; waited at most {wait_s:.2f} s")
            over_steps = median_of([delay / step_s for delay in delays])
            print(f"  delay over step {over_steps} (target: below 1)", flush=True)
    print(where())


if __name__ == "__main__":
    main()
