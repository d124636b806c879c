"""Evaluation is exact, on any data, and leaves training as it was; so does `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from nestsp.cluster import GroupTree
from nestsp.data.samples import SampleTable, open_samples
from nestsp.execute.verify import reference_gradients
from nestsp.train.evaluate import measure_loss
from nestsp.train.generate import generating
from nestsp.train.update import update
from tests.distributed.equivalence import (
    QWEN3,
    QWEN3_MOE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_weights,
    weighted_gradients,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan
from tests.distributed.test_trainer import train_rank, working_in
from tests.e2e.runs import contents, losses, read_lines, tiny, write_corpus

EVAL_LENGTHS = (181, 3, 1, 40, 2, 77, 1)  # the longest is over the cap of a rank, two have no target


def reference_loss(folder: Path, samples: SampleTable) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = {}
    for number, length in enumerate(samples.lengths.tolist()):
        tokens = samples.read(number, 0, length)
        assert isinstance(tokens, np.ndarray)
        sequences[number] = torch.from_numpy(tokens.astype("int64"))
    return reference_gradients(model, sequences).loss_sum / sum(int(length) - 1 for length in samples.lengths)


def test_F4_G19_evaluation_is_exact_and_training_goes_on_as_if_there_were_none(pool: RankPool, tmp_path: Path) -> None:
    """Seven samples on four ranks, one of them longer than one rank may hold."""
    runs = []
    for name in ("plain", "evaluated"):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder / "corpus.jsonl")
        write_corpus(folder / "eval.jsonl", EVAL_LENGTHS, seed=1)
        more = ["data.eval={source: eval.jsonl}", "train.eval_every=2"] if name == "evaluated" else []
        config = tiny("train.steps=5", "train.checkpoint_every=null", *more)
        assert pool.run(train_rank, folder, config, None, ranks=4) == [None] * 4
        runs.append(folder / "runs" / "tiny-1")
    plain, evaluated = runs
    assert losses(evaluated) == losses(plain)
    assert (evaluated / "hf" / "model.safetensors").read_bytes() == (plain / "hf" / "model.safetensors").read_bytes()
    records = read_lines(evaluated / "evaluations.jsonl")
    assert [record["step"] for record in records] == [2, 4, 5]
    assert {(r["num_targets"], r["num_tokens"]) for r in records} == {(sum(EVAL_LENGTHS) - 7, sum(EVAL_LENGTHS))}
    with working_in(tmp_path / "evaluated"):
        samples = open_samples(config.data.model_copy(update={"source": "eval.jsonl", "eval": None}))
        assert records[-1]["loss"] == pytest.approx(reference_loss(evaluated / "hf", samples), rel=1e-6)
    assert "evaluations.jsonl" not in contents(plain)


def evaluated(rank: int, num_ranks: int, case: Case) -> list[float]:
    """Sums over the targets of all ranks."""
    plan = case.made
    executor = make_executor(case, rank)
    sums = measure_loss(executor, load(executor, plan, make_tokens(plan), weighted=True))
    dist.all_reduce(sums)
    return sums.tolist()


def test_C5_every_target_counts_once_with_its_weight(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2, 2)))
    for keys in (QWEN3, QWEN3_MOE):
        found = pool.run(evaluated, Case(keys, plan.to_json()), ranks=4)
        weights, tokens = make_weights(plan), make_tokens(plan)
        expected = weighted_gradients(make_model(keys, "sdpa"), tokens, weights).loss_sum
        total = sum(float(w[:-1].double().sum()) for w in weights.values())
        num_targets = sum(length - 1 for length in plan.batch.lengths)
        for sums in found:
            assert sums == pytest.approx([expected, total, num_targets], rel=1e-11)


def train_with_pauses(rank: int, num_ranks: int, case: Case, pause: bool) -> tuple[list[float], list[list[int]]]:
    """Losses of three steps, and what is generated before, between and after them."""
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)
    optimizer = torch.optim.SGD(executor.root.parameters(), lr=0.0)
    found, texts = [], []

    def generate() -> None:
        if pause:
            with generating(executor.root) as model:  # type: ignore[arg-type]
                texts.append(generated(model, tokens[0]))

    for _ in range(3):
        generate()
        total = executor.run(load(executor, plan, tokens))
        dist.all_reduce(total)
        found.append(total.item())
        update(executor.root, optimizer, total_weight=100.0, max_grad_norm=None, lr=0.1)
    generate()
    return found, texts


def generated(model: torch.nn.Module, prompt: Tensor) -> list[int]:
    result: Sequence[Tensor] = model.generate(prompt[None], max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return result[0].tolist()


@pytest.mark.parametrize("keys", [QWEN3, QWEN3_MOE], ids=["qwen3", "qwen3_moe"])
def test_generate_works_between_steps_and_changes_nothing(pool: RankPool, keys: dict[str, object]) -> None:
    case = Case(keys, nested_plan(GroupTree((2, 2))).to_json())
    paused = pool.run(train_with_pauses, case, True, ranks=4)
    plain = pool.run(train_with_pauses, case, False, ranks=4)
    assert [found for found, _ in paused] == [found for found, _ in plain]
    texts = paused[0][1]
    assert all(mine == texts for _, mine in paused)
    assert texts[0] == generated(make_model(keys, "sdpa").eval(), make_tokens(case.made)[0])
    assert len(texts) == 4
    assert texts[0] != texts[-1]
