"""Samples: what of each document is trained on, by the policy for documents that are too long, and mixtures of sources.

The policy is a view, computed from lengths in milliseconds: the tokens on disk are those of whole documents, so another
limit or policy tokenises nothing again. Nothing is shortened or left out in silence: `SampleCounts` says how many.

A mixture lists the samples of its sources one after another. How many of each an epoch takes, its weight says: weight
times the source's samples, rounded. `nestsp.data.stream` says which.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.config import DataConfig, DataSource, MixturePart
from nestsp.data.chat import open_template
from nestsp.data.sources import open_source
from nestsp.data.store import LabelledTokens, Progress, TokenStore, open_store
from nestsp.data.stream import Share
from nestsp.data.tokenizer import Tokens, open_tokenizer
from nestsp.errors import DataError
from nestsp.units import format_count, plural

__all__ = ["OverLength", "SampleCounts", "SampleTable", "Targets", "open_evaluation", "open_samples"]

OverLength = Literal["error", "drop", "truncate", "split"]
Ints = npt.NDArray[np.int64]


class Targets(NamedTuple):
    """What a batch's loss is divided by, known before the first forward.

    Attributes:
        number: Tokens that have a loss.
        weight: The sum of their weights; equal to the number unless the rows have weights of their own.
    """

    number: int
    weight: float


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
        num_without_target: Samples without a token that has a loss: they are taken, but teach nothing.
        first_without_target: The document of the first of them, or None.
        skipped: (reason, number) of files of the corpus that gave no document.
        notes: (what, number) of what was done to rows.
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
    first_without_target: int | None = None
    skipped: tuple[tuple[str, int], ...] = ()
    notes: tuple[tuple[str, int], ...] = ()

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
            first = f" (the first is document {format_count(self.first_without_target or 0)})"
            parts.append(f"{plural(self.num_without_target, 'sample')} without a target{first}")
        parts += [f"{format_count(number)} {what}" for what, number in self.notes]
        parts += [f"{plural(number, 'file')} skipped: {reason}" for reason, number in self.skipped]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The samples of one store or several: sample ``i`` is ``lengths[i]`` tokens of ``documents[i]``.

    An id beyond the last sample is a sample that a mixture takes again: ids count on, ``id % num_samples`` is which.

    Attributes:
        stores: Where the tokens are.
        documents: int64 [num_samples]; documents of all stores are numbered on.
        starts: int64 [num_samples], the first token of the sample in its document.
        lengths: int64 [num_samples], each at least 1.
        num_targets: int64 [num_samples], tokens with a loss.
        counts: What became of the documents.
        identity: Hex digest of the samples themselves: equal when, and only when, every sample has the same tokens
            and targets under the same number. So a policy that met no long document leaves no trace in it.
        shares: What an epoch takes of each store; empty for every sample once.
    """

    stores: tuple[TokenStore, ...]
    documents: Ints = field(repr=False)
    starts: Ints = field(repr=False)
    lengths: Ints = field(repr=False)
    num_targets: Ints = field(repr=False)
    counts: SampleCounts
    identity: str
    shares: tuple[Share, ...] = ()

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
            store: A store.
            max_length: Longest sample, in tokens, or None for no limit.
            over_length: For a document that is longer: ``error``; ``drop`` it; ``truncate`` it to its first
                ``max_length`` tokens; or ``split`` it into samples of ``max_length``, the last with what remains. An
                end-of-text token ends the document, so a truncated one loses it and the last piece has it.
            skipped: Files that the source left out before it was read, added to the store's.

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
        num_targets = _num_targets(store, documents, starts, sample_lengths)
        without = np.flatnonzero(num_targets == 0)
        counts = SampleCounts(
            num_documents=store.num_documents,
            num_empty=int(np.count_nonzero(lengths == 0)),
            num_over_length=num_over,
            over_length=over_length,
            max_length=max_length,
            num_samples=int(documents.size),
            num_tokens=int(sample_lengths.sum()),
            num_lost_tokens=int((lengths - kept).sum()),
            num_without_target=int(without.size),
            first_without_target=int(documents[without[0]]) if without.size else None,
            skipped=(*skipped, *store.skipped),
            notes=tuple((str(what), int(number)) for what, number in store.meta.get("notes", ())),
        )
        if not counts.num_samples:
            raise DataError(
                f"the corpus has {plural(counts.num_documents, 'document')} ({format_count(counts.num_empty)} empty, "
                f"{format_count(num_over)} over {format_count(limit)} tokens and dropped), but no sample is left; "
                "raise data.max_length, or set data.over_length to truncate or split"
            )
        digest = hashlib.sha256(store.digest.encode())
        for column in (documents, starts, sample_lengths):
            digest.update(column.astype("<i8", copy=False).data)
        return _table((store,), documents, starts, sample_lengths, num_targets, counts, digest.hexdigest())

    @classmethod
    def mix(cls, parts: Sequence[tuple[MixturePart, SampleTable]], together: int = 1) -> SampleTable:
        """The samples of several tables, one after another; an epoch takes of each what its weight says.

        Args:
            parts: The tables, of whole runs of ``together`` samples.
            together: An epoch takes whole runs.

        Raises:
            DataError: An epoch takes no sample of a part.
        """
        if len(parts) == 1 and parts[0][0].weight == 1:
            return parts[0][1]
        shares = []
        for number, (part, table) in enumerate(parts):
            num_taken = round(part.weight * table.num_samples / together) * together
            if num_taken < 1:
                raise DataError(
                    f"data.mixture.{number} ({part.source}) has {plural(table.num_samples, 'sample')} and weight "
                    f"{part.weight:g}, but an epoch must take at least 1 of each source; raise its weight, or leave "
                    "it out"
                )
            shares.append(Share(table.num_samples, num_taken))
        tables = [table for _, table in parts]
        firsts = np.cumsum([0, *(table.counts.num_documents for table in tables)])
        digest = hashlib.sha256(repr([(table.identity, s) for table, s in zip(tables, shares, strict=True)]).encode())
        return _table(
            tuple(store for table in tables for store in table.stores),
            np.concatenate([table.documents + first for table, first in zip(tables, firsts, strict=False)]),
            np.concatenate([table.starts for table in tables]),
            np.concatenate([table.lengths for table in tables]),
            np.concatenate([table.num_targets for table in tables]),
            _sum([table.counts for table in tables]),
            digest.hexdigest(),
            tuple(shares),
        )

    @property
    def num_samples(self) -> int:
        """Samples in the table, at least 1."""
        return int(self.lengths.size)

    @property
    def vocab_size(self) -> int:
        """Every token is below it."""
        return max(store.vocab_size for store in self.stores)

    def read(self, sample: int, start: int, stop: int) -> Tokens | LabelledTokens:
        """Copy tokens start..stop-1 of a sample from disk, and no others; see `TokenStore.read`."""
        assert 0 <= start <= stop <= self.lengths[sample % self.num_samples], f"tokens {start}..{stop} of {sample}"
        store, document, first = self._place(sample)
        return store.read(document, first + start, first + stop)

    def targets(self, batch: SequenceBatch) -> Targets:
        """What the loss of a batch is divided by, from the store: all ranks know it without a collective."""
        samples = np.array(batch.ids, dtype=np.int64) % self.num_samples
        number = int(self.num_targets[samples].sum())
        weight = 0.0
        for sample, length in zip(samples.tolist(), batch.lengths, strict=True):
            store, document, first = self._place(sample)
            if store.weights is None or store.weights.dtype == np.uint8:
                weight += int(self.num_targets[sample])
            else:
                weight += float(store.read_weights(document, first + 1, first + length).sum(dtype=np.float64))
        return Targets(number, weight)

    def describe_sources(self) -> list[str]:
        """A line for each source: what its rows are, what tokenised them, what an epoch takes of it."""
        lines = []
        num_tokens = self._tokens_in_epoch()
        for number, store in enumerate(self.stores):
            meta = store.meta
            how = "tokens as they came" if meta["tokenizer"] is None else f"tokens by {meta['tokenizer']}"
            columns = "" if meta["columns"] == [meta["form"]] else f" ({', '.join(meta['columns'])})"
            line = f"{meta['source']}: {meta['form']}{columns}, {how}"
            if meta["ignored"]:
                line += f"; columns not read: {', '.join(meta['ignored'])}"
            if self.shares:
                share = self.shares[number]
                passes = f"{share.num_taken / share.num_samples:.3g} × its {format_count(share.num_samples)}"
                part = f"{num_tokens[number] / sum(num_tokens):.0%}"
                line += f"; an epoch takes {plural(share.num_taken, 'sample')} ({passes}), about {part} of all tokens"
            lines.append(line)
        return lines

    def _tokens_in_epoch(self) -> list[float]:
        sizes = [share.num_samples for share in self.shares] or [self.num_samples]
        parts = np.split(self.lengths, np.cumsum(sizes)[:-1])
        taken = [share.num_taken for share in self.shares] or sizes
        return [float(part.mean()) * number for part, number in zip(parts, taken, strict=True)]

    def _place(self, sample: int) -> tuple[TokenStore, int, int]:
        """A sample's store, its document there, and where in that it begins."""
        sample %= self.num_samples
        document = int(self.documents[sample])
        for store in self.stores[:-1]:
            if document < store.num_documents:
                return store, document, int(self.starts[sample])
            document -= store.num_documents
        return self.stores[-1], document, int(self.starts[sample])


def open_samples(config: DataConfig, progress: Progress | None = None) -> SampleTable:
    """From settings to samples: list the sources, tokenise each unless a store has it, apply the policy.

    Args:
        config: The settings.
        progress: Told (done, in all or None) while a store is built; never called if there is one.

    Raises:
        DataError: A source or the tokenizer cannot be used, or no sample is left.
    """
    parts = [(part, _open(part, config, progress)) for part in config.parts]
    if config.samples_together > 1:
        for part, table in parts:
            _check_runs(part.source, table.counts, config.samples_together)
    return SampleTable.mix(parts, config.samples_together)


def open_evaluation(config: DataConfig, progress: Progress | None = None) -> SampleTable | None:
    """The samples of ``data.eval`` under the tokenizer, limit and policy of the others, or None without it.

    Raises:
        DataError: As `open_samples`.
    """
    return None if config.eval is None else _open(config.eval, config, progress)


def _open(source: DataSource, config: DataConfig, progress: Progress | None) -> SampleTable:
    rows = open_source(source)
    store = open_store(
        rows,
        open_tokenizer(config.tokenizer, append_eos=config.append_eos),
        Path(config.cache_dir),
        progress,
        form=source.format,
        template=open_template(config.chat_template, config.tokenizer),
        num_workers=config.workers or _num_cores(),
    )
    return SampleTable.of_store(store, config.max_length, config.over_length, rows.skipped)


def _check_runs(source: str, counts: SampleCounts, together: int) -> None:
    """Every document is one sample, and they are whole runs: else some would stand beside the wrong neighbours.

    Raises:
        DataError: They are not.
    """
    num_left_out = counts.num_empty + sum(number for _, number in counts.skipped)
    if num_left_out:
        raise DataError(
            f"{source} has {plural(num_left_out, 'document')} that {'is' if num_left_out == 1 else 'are'} empty or "
            f"skipped, but data.samples_together is {together}, so the ones behind would stand beside the wrong "
            "neighbours; remove their whole runs"
        )
    if counts.num_samples % together:
        raise DataError(
            f"{source} has {plural(counts.num_samples, 'sample')}, but data.samples_together is {together}; give whole "
            "runs of so many"
        )


def _num_cores() -> int:
    """Cores that this process may use; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_targets(store: TokenStore, documents: Ints, starts: Ints, lengths: Ints) -> Ints:
    """Tokens of each sample that have a loss: never its first, which nothing predicts."""
    if store.document_targets is None:
        return lengths - 1
    num_targets: Ints = store.document_targets[documents]
    cut = np.flatnonzero(lengths < store.lengths[documents])
    for sample in cut.tolist():
        start = int(starts[sample])
        weights = store.read_weights(int(documents[sample]), start + 1, start + int(lengths[sample]))
        num_targets[sample] = np.count_nonzero(weights)
    return num_targets


def _table(
    stores: tuple[TokenStore, ...],
    documents: Ints,
    starts: Ints,
    lengths: Ints,
    num_targets: Ints,
    counts: SampleCounts,
    identity: str,
    shares: tuple[Share, ...] = (),
) -> SampleTable:
    for column in (documents, starts, lengths, num_targets):
        column.setflags(write=False)
    return SampleTable(stores, documents, starts, lengths, num_targets, counts, identity, shares)


def _sum(counts: Sequence[SampleCounts]) -> SampleCounts:
    """Counts of several sources under one policy, together."""
    total = {
        each.name: sum(getattr(count, each.name) for count in counts)
        for each in fields(SampleCounts)
        if each.type == "int"
    }
    before, first = 0, None
    for count in counts:
        if first is None and count.first_without_target is not None:
            first = before + count.first_without_target
        before += count.num_documents
    skipped, notes = Counter[str](), Counter[str]()
    for count in counts:
        skipped.update(dict(count.skipped))
        notes.update(dict(count.notes))
    return SampleCounts(
        **total,
        over_length=counts[0].over_length,
        max_length=counts[0].max_length,
        first_without_target=first,
        skipped=tuple(sorted(skipped.items())),
        notes=tuple(sorted(notes.items())),
    )


def _too_long(lengths: npt.NDArray[np.int64], over: npt.NDArray[np.bool_], limit: int) -> DataError:
    first = int(np.argmax(over))
    num_over = int(np.count_nonzero(over))
    documents = f"{plural(int(lengths.size), 'document')} {'is' if num_over == 1 else 'are'}"
    return DataError(
        f"document {first} has {format_count(int(lengths[first]))} tokens, but data.max_length is "
        f"{format_count(limit)} and {format_count(num_over)} of {documents} longer; "
        f"set data.over_length to drop, truncate or split, or data.max_length to {int(lengths.max())}"
    )
