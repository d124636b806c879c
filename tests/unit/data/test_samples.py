"""Samples: every policy for long documents, with its counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.config import DataConfig
from nestsp.data.samples import OverLength, SampleTable, Targets, open_samples
from nestsp.data.store import TokenStore
from nestsp.data.stream import DataState, SampleStream
from nestsp.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _config(folder: Path, lengths: list[int], max_length: int | None = None, over: OverLength = "error") -> DataConfig:
    path = folder / "corpus.jsonl"
    texts = [(LETTERS * (length // 26 + 1))[:length] for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(
        source=str(path),
        cache_dir=str(folder / "cache"),
        max_length=max_length,
        over_length=over,
        tokens_per_step=100,
    )


def _texts(samples: SampleTable) -> list[str]:
    return [bytes(samples.read(i, 0, int(samples.lengths[i]))).decode() for i in range(samples.num_samples)]


def _of_lengths(lengths: list[int], max_length: int | None, over_length: OverLength) -> SampleTable:
    """A table over a store in memory: document i is all token i."""
    column = np.array(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(column)])
    tokens = np.repeat(np.arange(len(lengths), dtype=np.uint8), column)
    meta = {"vocab_size": 256, "digest": "digest", "skipped": []}
    store = TokenStore(Path("nowhere"), meta, tokens, offsets, column)
    return SampleTable.of_store(store, max_length, over_length)


def test_a_long_document_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Rows G12, G13."""
    sentence = (
        "document 1 has 5,000 tokens, but data.max_length is 4,096 and 2 of 3 documents are longer; "
        "set data.over_length to drop, truncate or split, or data.max_length to 6000"
    )
    with pytest.raises(DataError, match=re.escape(sentence)):
        open_samples(_config(tmp_path, [10, 5000, 6000], 4096))


def test_a_long_document_is_dropped_and_counted(tmp_path: Path) -> None:
    """Rows G12, G13."""
    samples = open_samples(_config(tmp_path, [10, 5000], 4096, "drop"))
    assert (samples.documents.tolist(), samples.starts.tolist(), samples.lengths.tolist()) == ([0], [0], [10])
    counts = samples.counts
    assert (counts.num_over_length, counts.num_samples, counts.num_tokens, counts.num_lost_tokens) == (1, 1, 10, 5000)
    assert counts.describe() == (
        "1 sample of 10 tokens from 2 documents; 1 document over 4,096 tokens: drop, 5,000 tokens lost"
    )


def test_a_long_document_is_truncated_and_counted(tmp_path: Path) -> None:
    """Rows G12, G13."""
    samples = open_samples(_config(tmp_path, [10, 5000], 4096, "truncate"))
    assert samples.lengths.tolist() == [10, 4096]
    assert _texts(samples)[1] == (LETTERS * 200)[:4096]
    counts = samples.counts
    assert (counts.num_over_length, counts.num_samples, counts.num_tokens, counts.num_lost_tokens) == (1, 2, 4106, 904)
    assert counts.describe().endswith("1 document over 4,096 tokens: truncate, 904 tokens lost")


def test_a_long_document_is_split_and_no_token_is_lost(tmp_path: Path) -> None:
    """Rows G11, G12, G13: the last piece has what remains."""
    samples = open_samples(_config(tmp_path, [10, 5000, 8192, 3], 4096, "split"))
    assert samples.documents.tolist() == [0, 1, 1, 2, 2, 3]
    assert samples.starts.tolist() == [0, 0, 4096, 0, 4096, 0]
    assert samples.lengths.tolist() == [10, 4096, 904, 4096, 4096, 3]
    texts = _texts(samples)
    assert texts[1] + texts[2] == (LETTERS * 200)[:5000]
    assert bytes(samples.read(2, 1, 3)) == (LETTERS * 200)[4097:4099].encode()
    counts = samples.counts
    assert (counts.num_over_length, counts.num_samples, counts.num_tokens, counts.num_lost_tokens) == (2, 6, 13205, 0)
    assert counts.describe() == "6 samples of 13,205 tokens from 4 documents; 2 documents over 4,096 tokens: split"


def test_a_document_of_exactly_the_limit_is_not_too_long(tmp_path: Path) -> None:
    samples = open_samples(_config(tmp_path, [10, 9], 10, "error"))
    assert samples.lengths.tolist() == [10, 9]
    assert samples.counts.num_over_length == 0


def test_a_sample_never_reads_its_neighbours_tokens(tmp_path: Path) -> None:
    samples = open_samples(_config(tmp_path, [10], 4, "split"))
    assert _texts(samples) == ["abcd", "efgh", "ij"]
    for start, stop in [(0, 5), (-1, 1)]:
        with pytest.raises(AssertionError):
            samples.read(1, start, stop)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    """Rows B7, B10, G17: a sequence without a token never reaches the planner."""
    samples = open_samples(_config(tmp_path, [0, 4, 0, 4]))
    assert samples.documents.tolist() == [1, 3]
    assert samples.lengths.tolist() == [4, 4]
    assert samples.counts.num_empty == 2
    assert samples.counts.describe() == "2 samples of 8 tokens from 4 documents; 2 empty documents left out"


def test_a_corpus_of_one_token_samples_is_used_and_reported(tmp_path: Path) -> None:
    """Row B13: they have no target, so steps change nothing, but nothing fails."""
    samples = open_samples(_config(tmp_path, [1, 1, 1]))
    assert samples.counts.num_without_target == 3
    assert samples.counts.describe().endswith("3 samples without a target (the first is document 0)")
    batch, _ = SampleStream(samples.lengths, sequences_per_step=3).take(DataState())
    assert samples.targets(batch) == Targets(0, 0.0)


def test_targets_are_all_tokens_but_the_last_of_each_sequence() -> None:
    """Rows A1, B13: the denominator is known from lengths alone."""
    table = _of_lengths([8, 512, 9, 300, 1], None, "error")
    assert table.targets(SequenceBatch((0, 1, 2, 3), (8, 512, 9, 300))) == Targets(825, 825.0)
    assert table.targets(SequenceBatch((4,), (1,))) == Targets(0, 0.0)


def test_no_sample_left_is_an_error(tmp_path: Path) -> None:
    """Row G12: only a corpus with no usable sample is one."""
    with pytest.raises(DataError, match=r"3 documents \(1 empty, 2 over 4 tokens and dropped\), but no sample is left"):
        open_samples(_config(tmp_path, [5, 0, 6], 4, "drop"))


def test_what_the_corpus_skipped_is_in_the_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.png").write_bytes(b"\xff")
    samples = open_samples(DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / ".cache"), sequences_per_step=1))
    assert samples.counts.skipped == (("other suffix", 1), ("not UTF-8", 1))
    assert samples.counts.describe().endswith("; 1 file skipped: other suffix; 1 file skipped: not UTF-8")


def test_another_limit_tokenises_nothing_again(tmp_path: Path) -> None:
    first = open_samples(_config(tmp_path, [10, 50]))

    def refuse(done: int, total: int | None) -> None:
        raise AssertionError("built again")

    second = open_samples(_config(tmp_path, [10, 50], 20, "split"), refuse)
    assert second.stores[0].key == first.stores[0].key


def test_identity_is_that_of_the_samples(tmp_path: Path) -> None:
    def identity(lengths: list[int], limit: int | None = None, over: OverLength = "error") -> str:
        return open_samples(_config(tmp_path, lengths, limit, over)).identity

    plain = identity([10, 50])
    assert identity([10, 50], 50) == plain  # no document was too long, so nothing differs
    assert identity([10, 50], 64, "drop") == plain
    cut = {identity([10, 50], 20, over) for over in ("drop", "truncate", "split")}
    others = {identity([10, 50], 25, "split"), identity([50, 10]), identity([10, 51])}
    assert len({plain, *cut, *others}) == 7


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    limit=st.integers(1, 45),
    policy=st.sampled_from(["drop", "truncate", "split"]),
)
def test_samples_are_the_policy_applied_to_each_document(lengths: list[int], limit: int, policy: OverLength) -> None:
    """Rows G12, G13: against the plain loop."""
    expected: list[tuple[int, int, int]] = []
    for document, length in enumerate(lengths):
        if length <= limit:
            expected += [(document, 0, length)] if length else []
        elif policy == "truncate":
            expected.append((document, 0, limit))
        elif policy == "split":
            expected += [(document, start, min(limit, length - start)) for start in range(0, length, limit)]
    if not expected:
        with pytest.raises(DataError, match="no sample is left"):
            _of_lengths(lengths, limit, policy)
        return
    table = _of_lengths(lengths, limit, policy)
    rows = zip(table.documents.tolist(), table.starts.tolist(), table.lengths.tolist(), strict=True)
    assert list(rows) == expected
    counts = table.counts
    assert counts.num_tokens + counts.num_lost_tokens == sum(lengths)
    assert counts.num_samples == len(expected)
    assert counts.num_empty == lengths.count(0)
    assert counts.num_over_length == sum(length > limit for length in lengths)
    assert counts.num_without_target == sum(length == 1 for _, _, length in expected)
