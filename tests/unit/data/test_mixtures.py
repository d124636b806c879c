"""Mixtures and labelled samples: what an epoch takes, in which order, and what its loss is divided by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.config import DataConfig, MixturePart
from nestsp.data import stream as stream_module
from nestsp.data.samples import SampleTable, Targets, open_evaluation, open_samples
from nestsp.data.store import LabelledTokens
from nestsp.data.stream import DataState, SampleStream, Share
from nestsp.errors import DataError


def _write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _texts(folder: Path, name: str, num_rows: int) -> str:
    return _write(folder, name, [{"text": f"{name}{number}"} for number in range(num_rows)])


def _config(folder: Path, *parts: tuple[str, float], **settings: Any) -> DataConfig:
    mixture = tuple(MixturePart(source=source, weight=weight) for source, weight in parts)
    return DataConfig(mixture=mixture, cache_dir=str(folder / "stores"), **{"sequences_per_step": 4, **settings})


def _stream(table: SampleTable, size: int = 4, seed: int = 0) -> SampleStream:
    return SampleStream(table.lengths, seed=seed, sequences_per_step=size, shares=table.shares)


def _epoch(stream: SampleStream, number: int) -> list[SequenceBatch]:
    batches, state = [], DataState(number)
    while state.epoch == number:
        batch, state = stream.take(state)
        batches.append(batch)
    return batches


def _read(table: SampleTable, batch: SequenceBatch) -> list[str]:
    found = []
    for identity, length in zip(batch.ids, batch.lengths, strict=True):
        tokens = table.read(identity, 0, length)
        found.append(bytes(tokens.ids if isinstance(tokens, LabelledTokens) else tokens).decode())
    return found


# mixtures


def test_a_weight_is_passes_over_the_source_in_one_epoch(tmp_path: Path) -> None:
    """Row G2: over the epochs every sample of a source comes equally often."""
    sources = [(_texts(tmp_path, "a", 10), 0.5), (_texts(tmp_path, "b", 4), 2.0), (_texts(tmp_path, "c", 3), 1.0)]
    table = open_samples(_config(tmp_path, *sources))
    stream = _stream(table)
    assert stream.num_samples == 5 + 8 + 3
    epochs = [Counter(text for batch in _epoch(stream, n) for text in _read(table, batch)) for n in range(2)]
    for epoch in epochs:
        assert Counter(text[0] for text in epoch.elements()) == {"a": 5, "b": 8, "c": 3}
        assert {count for text, count in epoch.items() if text[0] == "b"} == {2}
    assert {text for epoch in epochs for text in epoch if text[0] == "a"} == {f"a{i}" for i in range(10)}
    assert epochs[0].keys() & epochs[1].keys() & {f"a{i}" for i in range(10)} == set()


def test_a_sample_that_comes_twice_in_a_batch_has_two_ids(tmp_path: Path) -> None:
    table = open_samples(_config(tmp_path, (_texts(tmp_path, "a", 3), 5.0)))
    (batch,) = _epoch(_stream(table, 15), 0)
    assert len(set(batch.ids)) == 15
    assert Counter(_read(table, batch)) == {"a0": 5, "a1": 5, "a2": 5}
    assert table.targets(batch) == Targets(15, 15.0)


@settings(deadline=None, max_examples=60)
@given(
    shares=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=3),
    seed=st.integers(0, 2**70),
    epochs=st.integers(1, 5),
)
def test_every_card_of_a_deck_is_dealt_before_it_is_shuffled_again(
    shares: list[tuple[int, int]], seed: int, epochs: int
) -> None:
    """Rows G2, G5: counts of a source's samples never differ by more than one pass."""
    pairs = tuple(Share(*share) for share in shares)
    total = sum(share.num_samples for share in pairs)
    stream = SampleStream(np.arange(1, total + 1), seed=seed, sequences_per_step=7, shares=pairs)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        batches = _epoch(stream, epoch)
        ids = [identity for batch in batches for identity in batch.ids]
        assert len(ids) == len(set(ids)) == stream.num_samples
        assert len(batches) == stream.steps_in_epoch(epoch)
        for batch in batches:
            assert batch.lengths == tuple(identity % total + 1 for identity in batch.ids)
        seen.update(identity % total for identity in ids)
    first = 0
    for share in pairs:
        counts = [seen[number] for number in range(first, first + share.num_samples)]
        assert sum(counts) == epochs * share.num_taken
        assert max(counts) - min(counts) <= 1
        first += share.num_samples


def test_an_order_of_a_mixture_stays_what_it_was_released_as() -> None:
    """Row G3: a changed order would resume runs on other data. These numbers may never change."""
    stream = SampleStream(np.ones(7, np.int64), sequences_per_step=100, shares=(Share(4, 2), Share(3, 4)))
    assert [batch.ids for epoch in (0, 1) for batch in _epoch(stream, epoch)] == [
        (4, 6, 2, 0, 13, 5),
        (5, 3, 4, 13, 1, 11),
    ]


@pytest.mark.parametrize("size", [1, 5])
def test_a_mixture_resumed_before_any_step_takes_the_same_batches(size: int) -> None:
    """Rows G3, G5, G7, G36."""
    shares = (Share(6, 9), Share(5, 2))
    steps, state = [], DataState()
    stream = SampleStream(np.arange(1, 12), seed=3, sequences_per_step=size, shares=shares)
    while state.epoch < 3:
        batch, after = stream.take(state)
        steps.append((state, batch))
        state = after
    for state, batch in reversed(steps):
        again = SampleStream(np.arange(1, 12), seed=3, sequences_per_step=size, shares=shares)
        assert again.take(state)[0] == batch


def test_resuming_makes_one_epochs_order_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows G3, G36: counted, so that it holds on every machine."""
    calls: list[int] = []
    shuffle = stream_module.splitmix64

    def counted(start: int, num_outputs: int) -> Any:
        calls.append(num_outputs)
        return shuffle(start, num_outputs)

    monkeypatch.setattr(stream_module, "splitmix64", counted)
    for state in (DataState(0, 1), DataState(0, 9000), DataState(500, 9999)):
        stream = SampleStream(np.ones(10_000, np.int64), sequences_per_step=3)
        calls.clear()
        stream.take(state)
        assert calls == [10_000]
    mixed = SampleStream(np.ones(10_000, np.int64), sequences_per_step=3, shares=(Share(4000, 8000), Share(6000, 3000)))
    mixed.take(DataState(500, 9999))
    assert sum(calls) <= 10_000 + 11_000 + 2 * 4000 + 6000  # one order, and the decks that the epoch takes from


def test_a_mixtures_order_depends_on_nothing_but_seed_epoch_and_sources(tmp_path: Path) -> None:
    parts = [(_texts(tmp_path, "a", 9), 1.0), (_texts(tmp_path, "b", 5), 1.0)]
    first = open_samples(_config(tmp_path, *parts))
    again = open_samples(_config(tmp_path, *parts))
    assert again.identity == first.identity
    assert _epoch(_stream(first), 1) == _epoch(_stream(again), 1)
    others = {
        open_samples(_config(tmp_path, *other)).identity
        for other in (parts[::-1], [(parts[0][0], 2.0), parts[1]], parts[:1])
    }
    assert len({first.identity, *others}) == 4
    assert _epoch(_stream(first, seed=1), 1) != _epoch(_stream(first), 1)


def test_a_mixture_of_one_source_once_is_that_source(tmp_path: Path) -> None:
    source = _texts(tmp_path, "a", 9)
    plain = open_samples(DataConfig(source=source, cache_dir=str(tmp_path / "stores"), sequences_per_step=4))
    mixed = open_samples(_config(tmp_path, (source, 1.0)))
    assert (mixed.identity, mixed.shares) == (plain.identity, ())


def test_a_weight_that_takes_no_sample_is_refused(tmp_path: Path) -> None:
    parts = [(_texts(tmp_path, "a", 3), 1.0), (_texts(tmp_path, "b", 3), 0.1)]
    with pytest.raises(DataError, match=r"data\.mixture\.1 \(.*b\.jsonl\) has 3 samples and weight 0\.1, but an epoch"):
        open_samples(_config(tmp_path, *parts))


def test_the_banner_says_what_an_epoch_takes_of_each_source(tmp_path: Path) -> None:
    """Row G10."""
    chat = _write(tmp_path, "tokens", [{"input_ids": [1, 2, 3], "labels": [1, 2, -100], "id": 0}] * 2)
    table = open_samples(_config(tmp_path, (_texts(tmp_path, "a", 9), 1.0), (chat, 3.0)))
    first, second = table.describe_sources()
    assert first.endswith(
        "a.jsonl: text, tokens by bytes; an epoch takes 9 samples (1 × its 9), about 50% of all tokens"
    )
    assert second.endswith(
        "tokens.jsonl: tokens (input_ids, labels), tokens as they came; columns not read: id; an epoch takes 6 "
        "samples (3 × its 2), about 50% of all tokens"
    )
    assert table.counts.describe() == "11 samples of 24 tokens from 11 documents"
    assert table.vocab_size == 256


def test_counts_of_a_mixture_are_those_of_its_sources_together(tmp_path: Path) -> None:
    parts = [(_write(tmp_path, name, [{"text": "x" * n} for n in sizes]), 1.0) for name, sizes in
             (("a", [0, 5, 20]), ("b", [5, 1, 30]))]  # fmt: skip
    counts = open_samples(_config(tmp_path, *parts, max_length=10, over_length="truncate")).counts
    assert counts.describe() == (
        "5 samples of 31 tokens from 6 documents; 2 documents over 10 tokens: truncate, 30 tokens lost; 1 empty "
        "document left out; 1 sample without a target (the first is document 4)"
    )


# labelled samples


def _labelled(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> SampleTable:
    source = _write(folder, "rows", rows)
    return open_samples(DataConfig(source=source, cache_dir=str(folder / "stores"), sequences_per_step=1, **settings))


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_what_is_cut_keeps_tokens_and_labels_aligned(tmp_path: Path, policy: str) -> None:
    """Rows G12, G13, for all forms."""
    labels = [-100, 1, 2, -100, 4, 5, -100, 7, 8]
    table = _labelled(tmp_path, [{"input_ids": list(range(9)), "labels": labels}], max_length=4, over_length=policy)
    pieces = [[0, 1, 2, 3]] if policy == "truncate" else [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    targets = [2] if policy == "truncate" else [2, 2, 0]  # 4 and 8 begin a piece: nothing predicts them
    assert table.num_targets.tolist() == targets
    for sample, piece in enumerate(pieces):
        tokens = table.read(sample, 0, len(piece))
        assert isinstance(tokens, LabelledTokens)
        assert tokens.ids.tolist() == piece
        assert tokens.weights.tolist() == [int(labels[i] != -100) for i in piece]
    whole = SequenceBatch(tuple(range(len(pieces))), tuple(len(piece) for piece in pieces))
    assert table.targets(whole) == Targets(sum(targets), float(sum(targets)))


def test_samples_without_a_target_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    """Rows B13, G12."""
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [1, 2], "labels": [1, -100]}] * 2
    table = _labelled(tmp_path, rows)
    assert table.counts.describe() == (
        "4 samples of 8 tokens from 4 documents; 2 samples without a target (the first is document 1)"
    )
    assert table.targets(SequenceBatch((1, 3), (2, 2))) == Targets(0, 0.0)


def test_a_loss_is_divided_by_the_sum_of_weights(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "weights": [9, 0.5, 2]},
        {"input_ids": [1, 2], "weights": [1, 0]},
    ]
    table = _labelled(tmp_path, rows)
    assert table.targets(SequenceBatch((0, 1), (3, 2))) == Targets(2, 2.5)
    cut = _labelled(tmp_path, rows, max_length=2, over_length="split")
    assert cut.targets(SequenceBatch((0, 1), (2, 1))) == Targets(1, 0.5)


def test_labels_are_part_of_the_samples_identity(tmp_path: Path) -> None:
    identities = {
        _labelled(tmp_path, [{"input_ids": [1, 2, 3], "labels": labels}]).identity
        for labels in ([1, 2, 3], [-100, 2, 3], [1, 2, 4])
    }
    assert len(identities) == 3


# evaluation


def test_evaluation_data_are_under_the_same_tokenizer_and_limit(tmp_path: Path) -> None:
    config = DataConfig.model_validate(
        {
            "source": _texts(tmp_path, "a", 3),
            "eval": {"source": _texts(tmp_path, "held_out_", 4)},
            "cache_dir": str(tmp_path / "stores"),
            "sequences_per_step": 1,
            "max_length": 4,
            "over_length": "truncate",
        }
    )
    table = open_evaluation(config)
    assert table is not None
    assert table.lengths.tolist() == [4] * 4
    assert open_evaluation(config.model_copy(update={"eval": None})) is None


def test_a_bad_evaluation_source_is_refused(tmp_path: Path) -> None:
    config = DataConfig.model_validate(
        {"source": _texts(tmp_path, "a", 3), "eval": {"source": "gone.jsonl"}, "sequences_per_step": 1}
    )
    with pytest.raises(DataError, match=re.escape("'gone.jsonl', but there is no such file or folder")):
        open_evaluation(config)
