"""The longest step, run before the first: it comes first, says what does not fit, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nestsp.batch import SequenceBatch
from nestsp.config import RunConfig
from nestsp.data.stream import SampleStream
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.objective import Objective
from nestsp.train.rehearsal import longest_step
from tests.distributed.pool import RankPool
from tests.distributed.test_trainer import Refusal, train_rank
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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"sequences_per_step": 2}, [9, 7]),
        ({"sequences_per_step": 99}, [9, 7, 4, 4, 2, 1]),
        ({"tokens_per_step": 9}, [9]),
        ({"tokens_per_step": 5}, [9]),  # one longer sample is a step of its own
        ({"tokens_per_step": 12}, [9, 2, 1]),  # 7 and both 4 do not fit beside 9
        ({"tokens_per_step": 24}, [9, 7, 4, 4]),
        ({"tokens_per_step": 99}, [9, 7, 4, 4, 2, 1]),
    ],
)
def test_the_longest_step_is_as_full_as_a_step_may_be(sizes: dict[str, Any], expected: list[int]) -> None:
    lengths = np.array([2, 4, 9, 1, 4, 7])
    batch = longest_step(SampleStream(lengths, **sizes))
    assert list(batch.lengths) == expected
    assert [int(lengths[number]) for number in batch.ids] == expected


def test_the_longest_step_keeps_together_what_stays_together() -> None:
    lengths = np.array([5, 5, 1, 9, 4, 4, 6, 1])
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"sequences_per_step": 4}, [1, 9, 5, 5]),
        ({"tokens_per_step": 19}, [1, 9, 4, 4]),
    ]
    for sizes, expected in cases:
        assert list(longest_step(SampleStream(lengths, **sizes, together=2)).lengths) == expected
