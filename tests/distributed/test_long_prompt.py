"""A long prompt before a short answer, over a ring: one rank holds every target, and all know as much."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nestsp.config import RunConfig
from nestsp.data.samples import open_samples
from nestsp.data.store import LabelledTokens
from nestsp.model.adapter import build_model, model_config
from nestsp.train import trainer
from tests.distributed.pool import RankPool
from tests.distributed.test_trainer import train_rank
from tests.e2e.runs import read_plans, tiny

PROMPT, ANSWER = 4096, 8
# Float32 over 4,104 tokens, against another order of adding up.
ROUNDING = 2e-5


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank knows of a step: its record's figures by name, and every rank's loss sum."""

    figures: dict[str, float]
    loss_sums: list[float]


def told_by_rank(rank: int, num_ranks: int, folder: Path, config: RunConfig) -> Told:
    """Train one step; what this rank knows of it."""
    steps: list[Any] = []
    step = trainer._Loop._step

    def watched(*args: Any) -> Any:
        steps.append(step(*args))
        return steps[-1]

    with patch.object(trainer._Loop, "_step", watched):
        assert train_rank(rank, num_ranks, folder, config, None) is None
    [done] = steps
    return Told(done.record.values(), [report.loss_sum for report in done.reports])


def loss_alone(config: RunConfig, ids: Tensor, num_targets: int) -> float:
    """Mean of the last tokens' losses, by Transformers' own model at the run's first weights."""
    model = build_model(model_config(config.model.config or {}), seed=config.train.seed)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, -num_targets - 1 : -1]
    return F.cross_entropy(logits.double(), ids[-num_targets:]).item()


def test_B5_a_rank_with_nothing_but_prompt_knows_every_figure_and_the_loss_is_the_answers(
    pool: RankPool, tmp_path: Path
) -> None:
    row = {"prompt": ("the quick fox " * 300)[:PROMPT], "completion": "abcdefgh"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    config = tiny(
        f"data.source={tmp_path / 'rows.jsonl'}", "data.tokens_per_step=null", "data.sequences_per_step=1",
        "data.append_eos=false",
        "model.config.max_position_embeddings=8192", "planner.attention=ring", "planner.max_tokens_per_rank=2052",
        "train.steps=1", "train.checkpoint_every=null", "train.export=false", "cluster.ranks=2",
    )  # fmt: skip
    told = pool.run(told_by_rank, tmp_path, config, ranks=2)
    [plan] = read_plans(tmp_path / "runs" / "tiny-1")
    [(_, placement)] = plan.placements()
    assert (plan.batch.lengths, placement.ring_degree) == ((PROMPT + ANSWER,), 2)
    assert told[0].loss_sums[0] > 0
    assert told[0].loss_sums[1] == 0, "the second rank has the two chunks in the middle, which are prompt"
    assert set(told[0].figures) == set(told[1].figures)
    assert "loss" in told[1].figures
    tokens = open_samples(config.data).read(0, 0, PROMPT + ANSWER)
    assert isinstance(tokens, LabelledTokens)
    expected = loss_alone(config, torch.from_numpy(tokens.ids.astype("int64")), ANSWER)
    assert [rank.figures["loss"] for rank in told] == [pytest.approx(expected, rel=ROUNDING)] * 2
