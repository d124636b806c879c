"""Tokens on disk: a corpus is tokenised once, into columns that are memory-mapped from then on.

A store is a folder ``<cache_dir>/<key>`` of three files: ``tokens.npy`` (all documents end to end, in the smallest
unsigned integer that holds the vocabulary), ``offsets.npy`` (int64, where each document starts, and the end) and
``meta.json``. The key is a digest of everything that shapes the tokens, so a store is never updated: what differs is
another store. It appears whole, by one rename, and one process builds it while others wait. A store that is not as its
``meta.json`` says (a file missing or of another size, offsets that do not rise) is built again.

Building holds a few MB of text and 8 bytes a document; the standard library (27 MB of samples) takes 10 to 15 s with
byte tokens, nearly all of it in Python's parser.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import numpy as np
import numpy.typing as npt

from nestsp.data.corpus import Corpus, Skipped
from nestsp.data.tokenizer import Tokenizer, Tokens, token_dtype
from nestsp.errors import DataError

__all__ = ["Progress", "TokenStore", "open_store"]

Progress = Callable[[int, int | None], None]
"""Told (items done, items in all or None), now and then while a store is built."""

_FORMAT = 1  # raise it with any change to what is written, or to how corpora are cut into documents
_BATCH_TEXTS = 1024
_BATCH_CHARACTERS = 1 << 20
_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, eq=False)
class TokenStore:
    """A tokenised corpus on disk.

    Attributes:
        folder: Where it is; its name is the key.
        vocab_size: Of the tokenizer: every token is below it.
        digest: Of the tokens themselves and where documents start.
        skipped: (reason, number) of files that gave no document.
        tokens: unsigned integers [num_tokens], memory-mapped.
        offsets: int64 [num_documents + 1], memory-mapped; document i is tokens offsets[i] to offsets[i + 1] - 1.
        lengths: int64 [num_documents], tokens of each document; may be 0.
    """

    folder: Path
    vocab_size: int
    digest: str
    skipped: tuple[tuple[str, int], ...]
    tokens: Tokens = field(repr=False)
    offsets: npt.NDArray[np.int64] = field(repr=False)
    lengths: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a store that is there, without looking at the corpus that it was made from.

        Raises:
            DataError: It is missing or damaged.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != _FORMAT or meta["key"] != folder.name:
                raise ValueError("meta.json is of another store")
            for name, num_bytes in meta["bytes"].items():
                if (folder / name).stat().st_size != num_bytes:
                    raise ValueError(f"{name} has not {num_bytes:,} bytes")
            tokens = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)
            offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
            lengths = np.diff(offsets)
            if tokens.dtype != token_dtype(meta["vocab_size"]) or tokens.shape != (meta["num_tokens"],):
                raise ValueError("tokens.npy is not as meta.json says")
            if offsets.dtype != np.int64 or offsets.shape != (meta["num_documents"] + 1,):
                raise ValueError("offsets.npy is not as meta.json says")
            if offsets[0] != 0 or offsets[-1] != tokens.size or lengths.min(initial=0) < 0:
                raise ValueError("offsets.npy does not rise from 0 to the number of tokens")
            lengths.setflags(write=False)
            skipped = tuple((str(reason), int(number)) for reason, number in meta["skipped"])
            return cls(folder, meta["vocab_size"], meta["digest"], skipped, tokens, offsets, lengths)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise DataError(
                f"the token store {folder} cannot be used ({error}), but it must be whole; "
                "open its corpus to build it again"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)  # never the tokens: the receiver maps them itself

    @property
    def key(self) -> str:
        """Hex digest of all that the store was made from: content, tokenizer, flags, format."""
        return self.folder.name

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return int(self.lengths.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.tokens.size)

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Copy tokens start..stop-1 of a document from disk, and no others.

        Returns:
            unsigned integers [stop - start], `token_dtype` of the vocabulary.
        """
        assert 0 <= start <= stop <= self.lengths[document], f"tokens {start}..{stop} of document {document}"
        first = int(self.offsets[document])
        return np.array(self.tokens[first + start : first + stop])


def open_store(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path, progress: Progress | None = None) -> TokenStore:
    """Open the store of a corpus and tokenizer; build it first if it is not there or damaged.

    Several processes may call this at once: one builds, the others wait for it.

    Raises:
        DataError: The corpus cannot be read, has no token, or changes meanwhile; or the folder cannot be written.
    """
    content = corpus.digest
    shape = {"format": _FORMAT, "content": content, "tokenizer": tokenizer.identity}
    key = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]
    folder = cache_dir.expanduser().absolute() / key
    try:
        return TokenStore.open(folder)
    except DataError:
        pass  # missing or damaged: look again under the lock
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            try:
                return TokenStore.open(folder)
            except DataError:
                _build(corpus, content, tokenizer, folder, progress)
                return TokenStore.open(folder)
    except OSError as error:  # the corpus' own are DataErrors by now
        raise DataError(
            f"the token store {folder} cannot be written ({error.strerror or error}), but it must be; make room, "
            "or set data.cache_dir to another folder"
        ) from None


def _build(corpus: Corpus, content: str, tokenizer: Tokenizer, folder: Path, progress: Progress | None) -> None:
    """Write a store beside its place and move it there. The caller holds the store's lock."""
    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):  # of builders that were killed: none else builds under this lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        _write_columns(corpus, tokenizer, new, folder.name, progress)
        if corpus.digest != content:
            raise DataError(
                f"data.source {corpus.source} changed while it was read, but it must stay as it is; start again"
            )
        if folder.exists():
            folder.rename(Path(scratch, "damaged"))
        new.rename(folder)


def _write_columns(corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str, progress: Progress | None) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    offsets = array("q", [0])
    skipped: Counter[str] = Counter()
    digest = hashlib.sha256(dtype.str.encode())
    num_items = 0
    with (folder / "tokens.npy").open("wb") as file:
        file.write(_npy_header(dtype, 0))  # written again when the number is known
        for batch in _batches(corpus.read()):
            texts = [item for item in batch if isinstance(item, str)]
            skipped.update(item.reason for item in batch if isinstance(item, Skipped))
            for tokens in tokenizer.encode_batch(texts):
                assert tokens.dtype == dtype
                block = tokens.tobytes()
                file.write(block)
                digest.update(block)
                offsets.append(offsets[-1] + tokens.size)
            num_items += len(batch)
            if progress is not None:
                progress(num_items, corpus.num_items)
        num_tokens = offsets[-1]
        if num_tokens == 0:
            reasons = "".join(f", {number} skipped as {reason}" for reason, number in sorted(skipped.items()))
            raise DataError(
                f"data.source {corpus.source} has {len(offsets) - 1} documents and no token{reasons}, but it needs "
                "at least one; give another source"
            )
        file.seek(0)
        file.write(_npy_header(dtype, num_tokens))
        _to_disk(file)
    with (folder / "offsets.npy").open("wb") as file:
        file.write(_npy_header(np.dtype("<i8"), len(offsets)))
        column = np.frombuffer(offsets, dtype=np.int64).astype("<i8", copy=False)
        file.write(column.data)
        digest.update(column.data)
        _to_disk(file)
    meta = {
        "format": _FORMAT,
        "key": key,
        "source": corpus.source,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "num_documents": len(offsets) - 1,
        "num_tokens": num_tokens,
        "skipped": sorted(skipped.items()),
        "digest": digest.hexdigest(),
        "bytes": {name: (folder / name).stat().st_size for name in ("tokens.npy", "offsets.npy")},
    }
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps(meta, indent=2).encode() + b"\n")
        _to_disk(file)


def _batches(items: Iterable[str | Skipped]) -> Iterator[list[str | Skipped]]:
    """Cut a stream into lists that are worth a tokenizer's call, yet small in memory."""
    batch: list[str | Skipped] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += len(item) if isinstance(item, str) else 0
        if len(batch) >= _BATCH_TEXTS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _npy_header(dtype: np.dtype[Any], size: int) -> bytes:
    """The head of a .npy file with one axis: of one width whatever the size, so that it can be written again.

    Source: the .npy format, version 1.0, in NumPy's `numpy.lib.format`.
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({size},), }}".encode()
    start = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return (start + text).ljust(_HEADER_BYTES - 1) + b"\n"


def _to_disk(file: BinaryIO) -> None:
    """A file is on disk before the rename that publishes it, so a power cut leaves no hollow store."""
    file.flush()
    os.fsync(file.fileno())
