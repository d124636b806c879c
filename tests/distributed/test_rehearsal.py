"""The longest step, run before the first: it comes first, says what does not fit, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nestsp.batch import SequenceBatch
from nestsp.config import RunConfig
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.objective import Objective
from tests.distributed.pool import RankPool
from tests.distributed.test_trainer import ROUNDING, Refusal, train_rank
from tests.e2e.runs import LENGTHS, losses, read_lines, read_plans, tiny, write_corpus

ROUTED = ("train.steps=3", "train.checkpoint_every=2", "train.router_loss=previous_step", "data.sequences_per_step=4")
FEW = ("data.tokens_per_step=null", "planner.max_tokens_per_rank=null", *ROUTED)


def train_recorded(rank: int, num_ranks: int, folder: Path, config: RunConfig) -> list[tuple[int, ...]]:
    """The lengths of each batch that was run, in order."""
    ran: list[tuple[int, ...]] = []
    run = Objective.run

    def record(self: Objective, executor: Executor, local: LocalBatch, batch: SequenceBatch, weight: float) -> Any:
        ran.append(batch.lengths)
        return run(self, executor, local, batch, weight)

    with patch.object(Objective, "run", record):
        assert train_rank(rank, num_ranks, folder, config, None) is None
    return ran


def test_G27_the_longest_samples_run_first_and_change_no_loss_no_weight_and_no_count(
    pool: RankPool, tmp_path: Path
) -> None:
    runs = {}
    for name, first in (("with", "true"), ("without", "false")):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder / "corpus.jsonl")  # ascending
        config = tiny(*FEW, f"train.longest_first={first}")
        runs[name] = pool.run(train_recorded, folder, config, ranks=2)[0]
    assert runs["with"][0] == tuple(sorted(LENGTHS)[:-5:-1])
    assert runs["with"][1:] == runs["without"]
    assert max(runs["with"][1]) < max(LENGTHS), "the first step has the longest sample by chance: take another seed"
    with_it, without = (tmp_path / name / "runs" / "tiny-1" for name in ("with", "without"))
    assert losses(with_it) == losses(without)
    assert read_plans(with_it) == read_plans(without)
    for key in ("grad_norm", "router_loss", "num_tokens"):
        found, expected = ([record[key] for record in read_lines(run / "metrics.jsonl")] for run in (with_it, without))
        assert found == expected
    assert (with_it / "hf" / "model.safetensors").read_bytes() == (without / "hf" / "model.safetensors").read_bytes()


def run_out_of_memory(rank: int, num_ranks: int, folder: Path, config: RunConfig, error: Exception) -> Refusal | None:
    with patch.object(Objective, "run", side_effect=error):
        return train_rank(rank, num_ranks, folder, config, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=["gpu", "cpu"],
)
def test_G27_what_does_not_fit_is_said_before_the_first_step(pool: RankPool, tmp_path: Path, error: Exception) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    config = tiny("train.longest_first=true", "cluster.memory_per_rank=2GiB", "planner.max_tokens_per_rank=null")
    [refusal] = pool.run(run_out_of_memory, tmp_path, config, error, ranks=1)
    assert refusal is not None
    assert refusal.kind == "InfeasibleError"
    assert refusal.sentence == (
        f"the step of the longest samples (2 sequences of 197 tokens, the longest 150) ran out of memory on rank 0 "
        f"({error}), but every step must fit; lower cluster.memory_per_rank from 2.0 GiB, so that plans leave more "
        "free, or lower data.max_length"
    )
    assert read_lines(tmp_path / "runs" / "tiny-1" / "metrics.jsonl") == []


LOSSES = """
def ratio(sums):
    return (sums.nll_S / sums.reference_S).mean()


def only_below_2_a_token(sums):
    return (sums.nll_S / (sums.nll_S <= 2 * sums.weight_S)).mean()
"""
LIKELIHOODS = (
    "planner.max_tokens_per_rank=null",
    "train.steps=1",
    "train.checkpoint_every=null",
    "train.router_loss=off",
    "train.longest_first=true",
)


def test_a_loss_may_divide_by_the_reference_that_is_not_taken_yet(pool: RankPool, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "losses_of_a_rehearsal.py").write_text(LOSSES)
    config = tiny(*LIKELIHOODS, "train.sequence_loss=losses_of_a_rehearsal:ratio", "train.reference=true")
    assert pool.run(train_rank, tmp_path, config, None, ranks=1) == [None]
    assert losses(tmp_path / "runs" / "tiny-1") == pytest.approx([1.0], abs=ROUNDING)  # the model is its own reference


def test_a_loss_that_is_not_finite_in_the_rehearsal_is_said_once(pool: RankPool, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "losses_of_a_rehearsal.py").write_text(LOSSES)
    config = tiny(*LIKELIHOODS, "train.sequence_loss=losses_of_a_rehearsal:only_below_2_a_token")
    [refusal] = set(pool.run(train_rank, tmp_path, config, None, ranks=2))
    assert refusal is not None
    assert (refusal.kind, refusal.said_once) == ("NumericsError", True)
    assert refusal.sentence.startswith("the loss is inf, and its derivative is not finite for sequences [")


def test_the_step_of_the_most_tokens_runs_too_where_it_has_not_the_longest_sample(
    pool: RankPool, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus.jsonl", [100, 1, 60, 60, 60, 60])
    together = ("data.samples_together=2", "train.sequence_loss=sums_of_a_rehearsal:sums", "train.router_loss=off")
    (tmp_path / "sums_of_a_rehearsal.py").write_text("def sums(sums):\n    return sums.nll_S.sum()\n")
    config = tiny(*FEW, *together, "train.steps=1", "train.longest_first=true")
    ran = pool.run(train_recorded, tmp_path, config, ranks=1)[0]
    assert ran[:2] == [(100, 1, 60, 60), (60, 60, 60, 60)]
    assert len(ran) == 3, "the second is the run's own first step"
