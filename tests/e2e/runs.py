"""A run small enough to be trained in seconds: twelve lines of text, two layers, hidden size 32.

At 200 tokens a step an epoch is five steps, the last one short; nine steps end in the middle of the second one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestsp.config import RunConfig, parse_config, to_yaml
from nestsp.plan import Plan

LENGTHS = (5, 9, 17, 23, 31, 40, 47, 60, 75, 90, 120, 150)

SETTINGS = """
name: tiny
model:
  config:
    model_type: qwen3_moe
    vocab_size: 256
    hidden_size: 32
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    intermediate_size: 64
    num_experts: 4
    num_experts_per_tok: 2
    moe_intermediate_size: 32
    max_position_embeddings: 512
data:
  source: corpus.jsonl
  tokens_per_step: 200
cluster:
  ranks: 4
planner:
  max_tokens_per_rank: 64
train:
  steps: 9
  checkpoint_every: 1
"""


def tiny(*overrides: str) -> RunConfig:
    """The settings of the run; overrides as on the command line."""
    return parse_config(SETTINGS, overrides)


def write_corpus(path: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> None:
    """A line of text of each length."""
    letters = random.Random(seed)
    lines = [json.dumps({"text": "".join(letters.choices("abcdefgh \n", k=length))}) for length in lengths]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_run(folder: Path, *overrides: str) -> Path:
    """The corpus and the settings' file in a folder; returns the file."""
    write_corpus(folder / "corpus.jsonl")
    path = folder / "tiny.yaml"
    path.write_text(to_yaml(tiny(*overrides)), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_plans(run: Path) -> list[Plan]:
    """Plans of a run, by step."""
    return [Plan.from_json(record) for record in read_lines(run / "plans.jsonl")]


def losses(run: Path) -> list[float]:
    """Losses of a run, by step; steps must be numbered from 1 without gap or repeat."""
    records = read_lines(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def contents(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
