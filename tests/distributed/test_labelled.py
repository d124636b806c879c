"""Chats, masks, weights and packs: loss and gradients of a planned step are those of the rows' own labels.

The reference knows nothing of stores or plans: the rows' own labels, each sequence alone, one sum of losses.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.config import DataConfig
from nestsp.data.samples import Targets, open_samples
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients
from nestsp.plan import Microbatch, Placement, Plan
from tests.distributed.equivalence import LLAMA, TOLERANCE, Case, make_executor, make_model
from tests.distributed.pool import RankPool
from tests.unit.data.chats import CHAT, MARKED, save_tokenizer

MODEL = {**LLAMA, "vocab_size": 320}
TREE = GroupTree((2, 2))


@dataclass(frozen=True)
class Labelled:
    """What a sequence is to the reference: labels are aligned with tokens, -100 has no loss."""

    ids: list[int]
    labels: list[int]
    weights: list[float] | None = None


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _masked(ids: list[int], every: int) -> list[int]:
    return [token if place % every else -100 for place, token in enumerate(ids)]


def _chats(folder: Path) -> tuple[list[dict[str, Any]], list[Labelled]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(save_tokenizer(folder / "tokenizer", MARKED))
    chats = [CHAT, CHAT[:3], CHAT[:2], CHAT[1:], CHAT[3:]]
    expected = []
    for chat in chats:
        out = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        labels = [i if mask else -100 for i, mask in zip(out["input_ids"], out["assistant_masks"], strict=True)]
        expected.append(Labelled(out["input_ids"], labels))
    return [{"messages": chat} for chat in chats], expected


def _packs(folder: Path) -> tuple[list[dict[str, Any]], list[Labelled]]:
    """Left and right pads, three ways of saying bounds, labels that differ from tokens, masked prompts."""
    expected, rows = [], []
    for number, lengths in enumerate([(13, 1, 7), (5, 29), (11,)]):
        part = [_ids(length, 10 * number + place) for place, length in enumerate(lengths)]
        labels = [_masked(_ids(len(ids), 7) if number == 1 else ids, 3) for ids in part]
        expected += [Labelled(ids, own) for ids, own in zip(part, labels, strict=True)]
        left, right = (2, 0) if number == 0 else (0, 3)
        rows.append(
            {
                "input_ids": [0] * left + [*itertools.chain(*part)] + [0] * right,
                "labels": [-100] * left + [*itertools.chain(*labels)] + [-100] * right,
                "attention_mask": [0] * left + [1] * sum(lengths) + [0] * right,
                "position_ids": [1] * left + [p for length in lengths for p in range(length)] + [1] * right,
            }
        )
    return rows, expected


def _weights(folder: Path) -> tuple[list[dict[str, Any]], list[Labelled]]:
    expected = []
    for number, length in enumerate((17, 9, 2, 23)):
        weights = torch.rand(length, generator=torch.Generator().manual_seed(number)).tolist()
        weights[:: number + 2] = [0.0] * len(weights[:: number + 2])
        expected.append(Labelled(_ids(length, number), _masked(_ids(length, number), 4), weights))
    return [{"input_ids": s.ids, "labels": s.labels, "weights": s.weights} for s in expected], expected


def _plan(lengths: Sequence[int], ring_degree: int) -> Plan:
    """The longest on all ranks, others on pairs and single ranks, in two microbatches."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    first = [Placement(TREE.group(0, 0), (order[0],), ring_degree), Placement(TREE.group(1, 2), (order[1],))]
    rest = [Placement(TREE.group(2, 1 + number % 2), (place,)) for number, place in enumerate(order[2:4])]
    second = [Placement(TREE.group(1, 0), tuple(order[4:]))] if order[4:] else []
    microbatches = [Microbatch(tuple(part)) for part in (first + rest, second) if part]
    plan = Plan(TREE, SequenceBatch.of_lengths(lengths), tuple(microbatches), (0, 1, 2), "test")
    plan.check()
    return plan


def labelled_step(rank: int, num_ranks: int, case: Case, config: str, sequences: Sequence[Labelled]) -> Any:
    """The step's targets; and on rank 0 how it compares."""
    samples = open_samples(DataConfig.model_validate_json(config))
    plan = Plan.from_json(case.plan)
    executor = make_executor(case, rank)
    executor.check(plan)
    total = executor.run(executor.load(plan, samples.read)).double()
    dist.all_reduce(total)
    planned = Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {})
    if rank != 0:
        return None
    targets = samples.targets(plan.batch)
    model = make_model(case.keys, "sdpa")
    reference = 0.0
    for sequence in sequences:
        ids, labels = torch.tensor([sequence.ids]), torch.tensor([sequence.labels])
        # Not Transformers' own loss, which computes in float32.
        logits = model(input_ids=ids).logits[0, :-1]
        nll = F.cross_entropy(logits, labels[0, 1:], reduction="none", ignore_index=-100)
        loss = nll.sum() if sequence.weights is None else (nll * torch.tensor(sequence.weights[1:]).double()).sum()
        loss.backward()
        reference += loss.item()
    found = {name: p.grad for name, p in model.named_parameters()}
    return targets, compare_gradients(planned, Gradients(reference, found, {}), targets.weight)


@pytest.mark.parametrize("make", [_chats, _packs, _weights])
def test_loss_and_gradients_are_those_of_the_rows_own_labels(pool: RankPool, tmp_path: Path, make: Any) -> None:
    """Rows C1, C3, C10, E10: shifted once, before sharding; nothing predicts the next sequence's first token."""
    rows, sequences = make(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        source=str(tmp_path / "rows.jsonl"),
        tokenizer=str(tmp_path / "tokenizer") if make is _chats else "bytes",
        cache_dir=str(tmp_path / "stores"),
        sequences_per_step=1,
    )
    samples = open_samples(config)
    assert samples.lengths.tolist() == [len(sequence.ids) for sequence in sequences]
    for ring_degree in (1, 4):
        case = Case(MODEL, _plan(samples.lengths.tolist(), ring_degree).to_json())
        outcome = pool.run(labelled_step, case, config.model_dump_json(), sequences)[0]
        targets: Targets
        verification: Verification
        targets, verification = outcome
        assert verification.passes(TOLERANCE), (ring_degree, verification)
        shifted = [
            (1.0 if s.weights is None else s.weights[place])
            for s in sequences
            for place in range(1, len(s.ids))
            if s.labels[place] != -100
        ]
        assert targets.number == sum(weight > 0 for weight in shifted)
        assert targets.weight == pytest.approx(sum(shifted), rel=1e-6)
