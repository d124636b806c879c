"""Samples: what of each document is trained on, by the policy for documents that are too long.

The policy is a view, computed from lengths in milliseconds: the tokens on disk are those of whole documents, so another
limit or policy tokenises nothing again. Nothing is shortened or left out in silence: `SampleCounts` says how many.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.config import DataConfig
from nestsp.data.corpus import open_corpus
from nestsp.data.store import Progress, TokenStore, open_store
from nestsp.data.tokenizer import Tokens, open_tokenizer
from nestsp.errors import DataError
from nestsp.units import format_count, plural

__all__ = ["OverLength", "SampleCounts", "SampleTable", "num_targets", "open_samples"]

OverLength = Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """What became of a corpus.

    Attributes:
        num_documents: Documents in the store.
        num_empty: Documents without a token, left out.
        num_over_length: Documents longer than the limit, to which the policy was applied.
        over_length: The policy.
        max_length: The limit in tokens, or None.
        num_samples: Samples to train on.
        num_tokens: Tokens of the samples.
        num_lost_tokens: Tokens of documents that are in no sample, because they were dropped or truncated.
        num_without_target: Samples of one token, which have no target: they are taken, but teach nothing.
        skipped: (reason, number) of files of the corpus that gave no document.
    """

    num_documents: int
    num_empty: int
    num_over_length: int
    over_length: OverLength
    max_length: int | None
    num_samples: int
    num_tokens: int
    num_lost_tokens: int
    num_without_target: int
    skipped: tuple[tuple[str, int], ...] = ()

    def describe(self) -> str:
        """All of it as one line; what did not happen is left out.

        >>> SampleCounts(2, 0, 1, "truncate", 4096, 2, 4106, 904, 0).describe()
        '2 samples of 4,106 tokens from 2 documents; 1 document over 4,096 tokens: truncate, 904 tokens lost'
        """
        parts = [
            f"{plural(self.num_samples, 'sample')} of {plural(self.num_tokens, 'token')} "
            f"from {plural(self.num_documents, 'document')}"
        ]
        if self.num_over_length:
            assert self.max_length is not None
            lost = f", {plural(self.num_lost_tokens, 'token')} lost" if self.num_lost_tokens else ""
            documents = plural(self.num_over_length, "document")
            parts.append(f"{documents} over {plural(self.max_length, 'token')}: {self.over_length}{lost}")
        if self.num_empty:
            parts.append(f"{plural(self.num_empty, 'empty document')} left out")
        if self.num_without_target:
            parts.append(f"{plural(self.num_without_target, 'sample')} of 1 token, without a target")
        parts += [f"{plural(number, 'file')} skipped: {reason}" for reason, number in self.skipped]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The samples of a store: sample ``i`` is ``lengths[i]`` tokens of ``documents[i]``, from token ``starts[i]``.

    Attributes:
        documents: int64 [num_samples].
        starts: int64 [num_samples].
        lengths: int64 [num_samples], each at least 1.
        counts: What became of the documents.
        identity: Hex digest of the samples themselves: equal when, and only when, every sample has the same tokens
            under the same number. So a policy that met no long document leaves no trace in it.
    """

    store: TokenStore
    documents: npt.NDArray[np.int64] = field(repr=False)
    starts: npt.NDArray[np.int64] = field(repr=False)
    lengths: npt.NDArray[np.int64] = field(repr=False)
    counts: SampleCounts
    identity: str

    @classmethod
    def of_store(
        cls,
        store: TokenStore,
        max_length: int | None = None,
        over_length: OverLength = "error",
        skipped: tuple[tuple[str, int], ...] = (),
    ) -> SampleTable:
        """Apply a policy to a store's documents, in their order.

        Args:
            max_length: Longest sample, in tokens, or None for no limit.
            over_length: For a document that is longer: ``error``; ``drop`` it; ``truncate`` it to its first
                ``max_length`` tokens; or ``split`` it into samples of ``max_length``, the last with what remains. An
                end-of-text token ends the document, so a truncated one loses it and the last piece has it.
            skipped: Files that the corpus left out before it was read, added to the store's.

        Raises:
            DataError: A document is too long and the policy is ``error``, or no sample is left.
        """
        assert max_length is None or max_length >= 1
        lengths = store.lengths
        limit = max_length if max_length is not None else int(lengths.max(initial=1))
        over = lengths > limit
        num_over = int(np.count_nonzero(over))
        if num_over and over_length == "error":
            raise _too_long(lengths, over, limit)
        match over_length:
            case "drop":
                kept = np.where(over, 0, lengths)
            case "truncate":
                kept = np.minimum(lengths, limit)
            case "error" | "split":
                kept = lengths
        # One formula for all: a document's kept tokens in pieces of the limit, one piece unless it is split.
        num_pieces = -(-kept // limit)
        documents = np.repeat(np.arange(lengths.size, dtype=np.int64), num_pieces)
        first_piece = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        starts = (np.arange(documents.size, dtype=np.int64) - first_piece) * limit
        sample_lengths = np.minimum(kept[documents] - starts, limit)
        counts = SampleCounts(
            num_documents=store.num_documents,
            num_empty=int(np.count_nonzero(lengths == 0)),
            num_over_length=num_over,
            over_length=over_length,
            max_length=max_length,
            num_samples=int(documents.size),
            num_tokens=int(sample_lengths.sum()),
            num_lost_tokens=int((lengths - kept).sum()),
            num_without_target=int(np.count_nonzero(sample_lengths == 1)),
            skipped=(*skipped, *store.skipped),
        )
        if not counts.num_samples:
            raise DataError(
                f"the corpus has {plural(counts.num_documents, 'document')} ({format_count(counts.num_empty)} empty, "
                f"{format_count(num_over)} over {format_count(limit)} tokens and dropped), but no sample is left; "
                "raise data.max_length, or set data.over_length to truncate or split"
            )
        digest = hashlib.sha256(store.digest.encode())
        for column in (documents, starts, sample_lengths):
            column.setflags(write=False)
            digest.update(column.astype("<i8", copy=False).data)
        return cls(store, documents, starts, sample_lengths, counts, digest.hexdigest())

    @property
    def num_samples(self) -> int:
        """Samples in the table, at least 1."""
        return int(self.lengths.size)

    def read(self, sample: int, start: int, stop: int) -> Tokens:
        """Copy tokens start..stop-1 of a sample from disk, and no others.

        Returns:
            unsigned integers [stop - start].
        """
        assert 0 <= start <= stop <= self.lengths[sample], f"tokens {start}..{stop} of sample {sample}"
        first = int(self.starts[sample])
        return self.store.read(int(self.documents[sample]), first + start, first + stop)


def open_samples(config: DataConfig, progress: Progress | None = None) -> SampleTable:
    """From settings to samples: list the corpus, tokenise it unless a store has it, apply the policy.

    Args:
        progress: Told (items done, items in all or None) while a store is built; never called if there is one.

    Raises:
        DataError: The corpus or tokenizer cannot be used, or no sample is left.
    """
    corpus = open_corpus(config.source)
    tokenizer = open_tokenizer(config.tokenizer, append_eos=config.append_eos)
    store = open_store(corpus, tokenizer, Path(config.cache_dir), progress)
    return SampleTable.of_store(store, config.max_length, config.over_length, corpus.skipped)


def num_targets(batch: SequenceBatch) -> int:
    """Tokens of a batch that have a loss: all but the last of each sequence.

    >>> num_targets(SequenceBatch.of_lengths([5, 1, 3]))
    6
    """
    return batch.num_tokens - batch.num_sequences


def _too_long(lengths: npt.NDArray[np.int64], over: npt.NDArray[np.bool_], limit: int) -> DataError:
    first = int(np.argmax(over))
    num_over = int(np.count_nonzero(over))
    documents = f"{plural(int(lengths.size), 'document')} {'is' if num_over == 1 else 'are'}"
    return DataError(
        f"document {first} has {format_count(int(lengths[first]))} tokens, but data.max_length is "
        f"{format_count(limit)} and {format_count(num_over)} of {documents} longer; "
        f"set data.over_length to drop, truncate or split, or data.max_length to {int(lengths.max())}"
    )
