"""Tokens on disk: a source is tokenised once, into columns that are memory-mapped from then on.

A store is a folder ``<cache_dir>/<key>`` of ``tokens.npy`` (all documents end to end), ``offsets.npy`` (where each
document starts, and the end) and ``meta.json``. Where not every token is a target, ``weights.npy`` has each token's
weight as one (0 or 1 in a byte, or float32) and ``num_targets.npy`` how many tokens of a document have one above 0;
where rows have labels that differ from their tokens, ``labels.npy`` has them.

The key is a digest of everything that shapes the columns: the content of the source and its form, the tokenizer's
files, the chat template, this format. So a store is never updated: what differs is another store. It appears whole, by
one rename, and one process builds it while others wait. A store that is not as its ``meta.json`` says (a file missing
or of another size, offsets that do not rise) is built again. Limits and policies are no part of it: they are a view
(`nestsp.data.samples`).

Building holds a few MB of text for each worker and 8 bytes a document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import filelock
import numpy as np
import numpy.typing as npt

from nestsp.data.chat import ChatTemplate
from nestsp.data.forms import Encoded, Encoder, make_encoder
from nestsp.data.rows import Source
from nestsp.data.tokenizer import Tokenizer, Tokens
from nestsp.data.workers import encode_chunks
from nestsp.errors import DataError

__all__ = ["LabelledTokens", "Progress", "TokenStore", "open_store"]

Progress = Callable[[int, int | None], None]
"""Told (done, in all or None), in bytes, files or rows, now and then while a store is built."""

_FORMAT = 2  # raise it with any change to what is written, or to how sources are cut into documents
_HEADER_BYTES = 128
_INT64 = np.dtype("<i8")
_WAIT_S = 0.5
_TELL_S = 1.0


class LabelledTokens(NamedTuple):
    """Neighbouring tokens of a document of which not all are targets.

    Attributes:
        ids: unsigned integers [T].
        labels: unsigned integers [T]; what is to be predicted at each token's place, mostly the token itself.
        weights: uint8 or float32 [T], of each label.
    """

    ids: Tokens
    labels: Tokens
    weights: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TokenStore:
    """A tokenised source on disk.

    Attributes:
        folder: Where it is; its name is the key.
        meta: What was found and done: ``vocab_size``, ``digest``, ``form``, ``columns``, ``skipped`` and so on.
        tokens: unsigned integers [num_tokens], memory-mapped.
        offsets: int64 [num_documents + 1], memory-mapped; document i is tokens offsets[i] to offsets[i + 1] - 1.
        lengths: int64 [num_documents], tokens of each document; may be 0.
        weights: uint8 or float32 [num_tokens], memory-mapped, or None where every token is a target of weight 1.
        labels: unsigned integers [num_tokens], memory-mapped, or None where they are the tokens.
        document_targets: int64 [num_documents], tokens after the first with a weight above 0; None without weights.
    """

    folder: Path
    meta: Mapping[str, Any] = field(repr=False)
    tokens: Tokens = field(repr=False)
    offsets: npt.NDArray[np.int64] = field(repr=False)
    lengths: npt.NDArray[np.int64] = field(repr=False)
    weights: npt.NDArray[Any] | None = field(default=None, repr=False)
    labels: Tokens | None = field(default=None, repr=False)
    document_targets: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a store that is there, without looking at the source that it was made from.

        Raises:
            DataError: It is missing or damaged.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != _FORMAT or meta["key"] != folder.name:
                raise ValueError("meta.json is of another store")
            columns = {name: _mapped(folder, name, about) for name, about in meta["files"].items()}
            tokens, offsets = columns["tokens"], columns["offsets"]
            if (tokens.size, offsets.size) != (meta["num_tokens"], meta["num_documents"] + 1):
                raise ValueError("its columns are not as long as meta.json says")
            lengths = np.diff(offsets)
            if offsets[0] != 0 or offsets[-1] != tokens.size or lengths.min(initial=0) < 0:
                raise ValueError("offsets.npy does not rise from 0 to the number of tokens")
            lengths.setflags(write=False)
            weights, labels, targets = (columns.get(name) for name in ("weights", "labels", "num_targets"))
            return cls(folder, meta, tokens, offsets, lengths, weights, labels, targets)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise DataError(
                f"the token store {folder} cannot be used ({error}), but it must be whole; "
                "open its source to build it again"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)  # never the tokens: the receiver maps them itself

    @property
    def key(self) -> str:
        """Hex digest of all that the store was made from."""
        return self.folder.name

    @property
    def digest(self) -> str:
        """Hex digest of the columns themselves."""
        return str(self.meta["digest"])

    @property
    def vocab_size(self) -> int:
        """Every token and label is below it: the tokenizer's, or one more than the largest of tokens as they came."""
        return int(self.meta["vocab_size"])

    @property
    def skipped(self) -> tuple[tuple[str, int], ...]:
        """(reason, number) of files that gave no document."""
        return tuple((str(reason), int(number)) for reason, number in self.meta["skipped"])

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return int(self.lengths.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.tokens.size)

    def read(self, document: int, start: int, stop: int) -> Tokens | LabelledTokens:
        """Copy tokens start..stop-1 of a document from disk, and no others.

        Returns:
            unsigned integers [stop - start]; with labels and weights where not every token is a target.
        """
        part = self._part(document, start, stop)
        ids = np.array(self.tokens[part])
        if self.weights is None:
            return ids
        labels = ids if self.labels is None else np.array(self.labels[part])
        return LabelledTokens(ids, labels, np.array(self.weights[part]))

    def read_weights(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Copy the weights of tokens start..stop-1 of a document, where there are any."""
        assert self.weights is not None
        return np.array(self.weights[self._part(document, start, stop)])

    def _part(self, document: int, start: int, stop: int) -> slice:
        assert 0 <= start <= stop <= self.lengths[document], f"tokens {start}..{stop} of document {document}"
        first = int(self.offsets[document])
        return slice(first + start, first + stop)


def open_store(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    form: str = "auto",
    template: ChatTemplate | None = None,
    num_workers: int = 1,
) -> TokenStore:
    """Open the store of a source and tokenizer; build it first if it is not there or damaged.

    Several processes may call this at once, on one host or on several that share the folder: one builds, the others
    wait for it, and tell of its progress.

    Args:
        source: What is tokenised.
        tokenizer: By what.
        cache_dir: The folder of all stores.
        progress: Called while a store is built, here or elsewhere.
        form: What a row is, or ``auto``.
        template: For chats.
        num_workers: Processes that tokenise.

    Raises:
        DataError: The source cannot be read, has no token, or changes meanwhile; or the folder cannot be written.
    """
    shape = {
        "format": _FORMAT,
        "content": source.content,
        "form": form,
        "tokenizer": tokenizer.identity,
        "template": template.identity if template is not None else None,
    }
    key = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]
    folder = cache_dir.expanduser().absolute() / key
    with contextlib.suppress(DataError):  # missing or damaged: look again under the lock
        return TokenStore.open(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, progress):
            try:
                return TokenStore.open(folder)
            except DataError:
                _build(source, make_encoder(source, form, tokenizer, template), folder, progress, num_workers)
                return TokenStore.open(folder)
    except OSError as error:  # the source's own are DataErrors by now
        raise DataError(
            f"the token store {folder} cannot be written ({error.strerror or error}), but it must be; make room, "
            "or set data.cache_dir to another folder"
        ) from None


@contextmanager
def _lock(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the store's lock. Who waits for it tells what its holder has written of its progress."""
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    while True:
        try:
            lock.acquire(timeout=_WAIT_S)
            break
        except filelock.Timeout:
            if progress is not None:
                with contextlib.suppress(OSError, ValueError, TypeError):  # not there yet, or half written
                    done, total = json.loads(folder.with_suffix(".progress").read_text())
                    progress(done, total)
    try:
        yield
    finally:
        lock.release()


def _build(source: Source, encoder: Encoder, folder: Path, progress: Progress | None, num_workers: int) -> None:
    """Write a store beside its place and move it there. The caller holds the store's lock."""
    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):  # of builders that were killed: none else builds under this lock
        shutil.rmtree(left, ignore_errors=True)
    told = folder.with_suffix(".progress")
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            _write(source, encoder, new, folder.name, _told_to_others(told, progress), num_workers)
            if source.digest() != source.content:
                raise DataError(
                    f"data.source {source.name} changed while it was read, but it must stay as it is; start again"
                )
            if folder.exists():
                folder.rename(Path(scratch, "damaged"))
            new.rename(folder)
    finally:
        told.unlink(missing_ok=True)


def _told_to_others(path: Path, progress: Progress | None) -> Progress:
    last = -_TELL_S

    def tell(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _TELL_S:
            path.write_text(json.dumps([done, total]))
            last = time.monotonic()
        if progress is not None:
            progress(done, total)

    return tell


def _write(source: Source, encoder: Encoder, folder: Path, key: str, progress: Progress, num_workers: int) -> None:
    done = 0
    with ExitStack() as files:
        columns = _Columns(encoder, folder, files)
        chunks = encode_chunks(encoder, source.chunks(encoder.columns), num_workers)
        files.enter_context(contextlib.closing(chunks))  # ends the workers, whatever happens
        for chunk, encoded in chunks:
            columns.append(encoded)
            done += chunk.size
            progress(done, source.size)
        if columns.num_tokens == 0:
            reasons = "".join(f", {number} skipped as {reason}" for reason, number in sorted(columns.skipped.items()))
            raise DataError(
                f"data.source {source.name} has {columns.num_documents} documents and no token{reasons}, but it needs "
                "at least one; give another source"
            )
        about = columns.close()
    is_tokens = encoder.form == "tokens"
    meta = {
        "format": _FORMAT,
        "key": key,
        "source": source.name,
        "form": encoder.form,
        "columns": encoder.columns,
        "ignored": encoder.ignored,
        "tokenizer": None if is_tokens else encoder.tokenizer.name,
        "vocab_size": columns.largest + 1 if is_tokens else encoder.tokenizer.vocab_size,
        "num_documents": columns.num_documents,
        "num_tokens": columns.num_tokens,
        "skipped": sorted(columns.skipped.items()),
        "notes": sorted(columns.notes.items()),
        "digest": hashlib.sha256(json.dumps([about[name]["digest"] for name in sorted(about)]).encode()).hexdigest(),
        "files": about,
    }
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps(meta, indent=2).encode() + b"\n")
        _to_disk(file)


class _Columns:
    """The columns of a store while they are written."""

    def __init__(self, encoder: Encoder, folder: Path, files: ExitStack) -> None:
        types = {"tokens": encoder.token_type, "offsets": _INT64}
        if encoder.weight_type is not None:
            types |= {"weights": encoder.weight_type, "num_targets": _INT64}
        if encoder.has_labels:
            types["labels"] = encoder.token_type
        self._folder = folder
        self._columns = {name: files.enter_context(_Column(folder, name, dtype)) for name, dtype in types.items()}
        self._offsets, self._labels_differ = array("q", [0]), False
        self.largest = 0
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        return self._offsets[-1]

    def append(self, encoded: Encoded) -> None:
        """Write the documents of one more chunk."""
        ends = np.cumsum(encoded.lengths)
        self._offsets.extend((ends + self._offsets[-1]).tolist())
        self._columns["tokens"].append(encoded.tokens)
        self.largest = max(self.largest, int(encoded.tokens.max(initial=0)))
        if encoded.weights is not None:
            self._columns["weights"].append(encoded.weights)
            self._columns["num_targets"].append(_num_targets(encoded.weights, ends))
        if encoded.labels is not None:
            self._columns["labels"].append(encoded.labels)
            self.largest = max(self.largest, int(encoded.labels.max(initial=0)))
            self._labels_differ |= not np.array_equal(encoded.labels, encoded.tokens)
        self.skipped.update(encoded.skipped)
        self.notes.update(encoded.notes)

    def close(self) -> dict[str, dict[str, Any]]:
        """Finish all files.

        Returns:
            What ``meta.json`` says of each.
        """
        self._columns["offsets"].append(np.frombuffer(self._offsets, dtype=np.int64))
        about = {name: column.close() for name, column in self._columns.items()}
        if "labels" in about and not self._labels_differ:  # they are the tokens: the weights say all
            (self._folder / "labels.npy").unlink()
            del about["labels"]
        return about


class _Column:
    """One .npy file of one axis, written block by block."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._file = (folder / f"{name}.npy").open("wb")
        self._dtype, self._size = dtype, 0
        self._digest = hashlib.sha256(f"{name},{dtype.str}".encode())
        self._file.write(_npy_header(dtype, 0))  # written again when the size is known

    def append(self, block: npt.NDArray[Any]) -> None:
        """Write some more values."""
        data = np.ascontiguousarray(block, dtype=self._dtype).data
        self._file.write(data)
        self._digest.update(data)
        self._size += block.size

    def close(self) -> dict[str, Any]:
        """Finish the file; what ``meta.json`` says of it."""
        self._file.seek(0)
        self._file.write(_npy_header(self._dtype, self._size))
        _to_disk(self._file)
        self._file.close()
        num_bytes = _HEADER_BYTES + self._size * self._dtype.itemsize
        return {"dtype": self._dtype.str, "size": self._size, "bytes": num_bytes, "digest": self._digest.hexdigest()}

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _mapped(folder: Path, name: str, about: Mapping[str, Any]) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    if path.stat().st_size != about["bytes"]:
        raise ValueError(f"{path.name} has not {about['bytes']:,} bytes")
    column = np.load(path, mmap_mode="r", allow_pickle=False)
    if column.dtype.str != about["dtype"] or column.shape != (about["size"],):
        raise ValueError(f"{path.name} is not as meta.json says")
    return column  # type: ignore[no-any-return]


def _num_targets(weights: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of each document that are targets: not its first, and of a weight above 0.

    >>> _num_targets(np.array([1, 1, 0, 1, 1]), np.array([3, 3, 5])).tolist()
    [1, 0, 1]
    """
    before = np.concatenate([[0], np.cumsum(weights > 0)])
    starts = np.concatenate([[0], ends[:-1]])
    found: npt.NDArray[np.int64] = before[ends] - before[np.minimum(starts + 1, ends)]
    return found


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
