"""The trainer with other models, shardings and losses than the usual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nestsp.cli.export import export_checkpoint
from nestsp.data.samples import open_samples
from tests.distributed.pool import RankPool
from tests.distributed.test_trainer import ROUNDING, stop_at, train_rank, working_in
from tests.e2e.runs import losses, read_lines, read_plans, tiny, write_corpus
from tests.e2e.test_train import mean_loss


def train(pool: RankPool, folder: Path, *overrides: str, resume: str | None = None) -> Path:
    """Train on four ranks; the run's folder."""
    if not (folder / "corpus.jsonl").exists():
        folder.mkdir(exist_ok=True)
        write_corpus(folder / "corpus.jsonl")
    before = set((folder / "runs").glob("*"))
    assert pool.run(train_rank, folder, tiny(*overrides), resume, ranks=4) == [None] * 4
    made = set((folder / "runs").glob("*")) - before
    return made.pop() if made else before.pop()


@pytest.fixture(scope="module")
def plain(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    return train(pool, tmp_path_factory.mktemp("plain") / "here", "train.steps=3", "train.checkpoint_every=null")


def test_a_model_from_files_begins_where_they_end(pool: RankPool, plain: Path, tmp_path: Path) -> None:
    """Fine-tuning: the first loss is that of the given weights, and what is exported can be given again."""
    given = plain / "hf"
    run = train(
        pool, tmp_path, "model.config=null", f"model.path={given}", "train.steps=2", "train.checkpoint_every=null"
    )
    model = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
    with working_in(tmp_path):
        samples = open_samples(tiny().data)
    assert losses(run)[0] == pytest.approx(mean_loss(model, samples, read_plans(run)[0]), abs=2e-6)
    assert losses(run)[0] < losses(plain)[0]
    again = train(
        pool, tmp_path, "model.config=null", f"model.path={run / 'hf'}", "train.steps=1", "train.checkpoint_every=null"
    )
    trained = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    assert losses(again)[0] == pytest.approx(mean_loss(trained, samples, read_plans(again)[0]), abs=2e-6)


@pytest.mark.parametrize("overrides", [("train.sharding=none",), ("train.sharding=hsdp", "train.shard_size=2")])
def test_other_shardings_train_alike(pool: RankPool, plain: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = train(pool, tmp_path, "train.steps=3", "train.checkpoint_every=null", *overrides)
    assert losses(run) == pytest.approx(losses(plain), abs=ROUNDING)
    records, expected = (read_lines(path / "metrics.jsonl") for path in (run, plain))
    for record, other in zip(records, expected, strict=True):
        assert record["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_a_run_resumes_under_another_sharding(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "straight"
    run = train(pool, folder, "train.steps=4", "train.sharding=hsdp", "train.shard_size=2")
    stopped = stop_at(folder, tmp_path / "stopped", 2)
    train(pool, tmp_path / "stopped", "train.steps=4", "train.sharding=none", resume="auto")
    assert losses(stopped)[:2] == losses(run)[:2]
    assert losses(stopped) == pytest.approx(losses(run), abs=ROUNDING)


SAVED: list[tuple[str, ...]] = [("train.mlp_slice_tokens=7",), ("train.offload=true", "train.recompute=true")]


def test_slices_and_offloading_train_alike(pool: RankPool, plain: Path, tmp_path: Path) -> None:
    for number, overrides in enumerate(SAVED):
        run = train(pool, tmp_path / str(number), "train.steps=3", "train.checkpoint_every=null", *overrides)
        assert losses(run) == pytest.approx(losses(plain), abs=ROUNDING)


@pytest.mark.parametrize("kind", ["counting_pass", "previous_step"])
def test_G22_a_run_with_a_router_loss_resumes_exactly_and_differs_from_one_without(
    pool: RankPool, plain: Path, tmp_path: Path, kind: str
) -> None:
    more = ("train.steps=6", f"train.router_loss={kind}", "train.router_loss_coefficient=3.0")
    run = train(pool, tmp_path / "straight", *more)
    values: list[Any] = [record["router_loss"] for record in read_lines(run / "metrics.jsonl")]
    different = 1 if kind == "counting_pass" else 2  # the first step has no batch before it
    assert losses(run)[:different] == losses(plain)[:different]
    assert losses(run)[different] != losses(plain)[different]
    assert values == pytest.approx([2.0] * 6, abs=0.1)  # 2 experts a token: 2 is an even router's
    export_checkpoint(run, tmp_path / "exported", "float32", None)
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()
    stopped = stop_at(tmp_path / "straight", tmp_path / "stopped", 3)
    train(pool, tmp_path / "stopped", *more, resume="auto")
    assert losses(stopped) == losses(run)
    assert [record["router_loss"] for record in read_lines(stopped / "metrics.jsonl")] == values
