"""Where rows come from: text corpora, .jsonl and .parquet files, saved data sets, the Hugging Face Hub.

A source is cut into chunks, which are small values that say where rows lie: a range of bytes, a row group, some files.
So workers read for themselves, and a source of any size takes little memory. Chunks and rows have one fixed order.

The digest covers the content of every file, so data that changed are never mistaken for data that did not; the price is
that of `nestsp.data.corpus`. A data set on the Hub is known by its commit: it is streamed, row after row, straight to
the token store, and nothing else of it stays on this disk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from nestsp.config import DataSource
from nestsp.data.corpus import Corpus, Skipped, file_digest, files_below, is_hidden, open_corpus, unreadable
from nestsp.errors import DataError, did_you_mean

__all__ = ["Chunk", "Row", "Source", "describe_json", "open_source"]

Row = Mapping[str, Any]

CHUNK_BYTES = 1 << 21
_CHUNK_ROWS = 1024
_DATA_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INSTALL = "pip install 'nestsp[datasets]'"


class Chunk(Protocol):
    """Some neighbouring rows of a source."""

    @property
    def size(self) -> int:
        """In the unit of the source's size."""

    def rows(self) -> Iterator[tuple[int, Row] | Skipped]:
        """Yield (number within the chunk, row), or `Skipped` in place of a file that has none, in order.

        Raises:
            DataError: Something cannot be read.
        """

    def place(self, number: int) -> str:
        """Where a row is, as a sentence's subject."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows in a fixed order. Made by `open_source`.

    Attributes:
        name: What the user named.
        content: Hex digest of all that decides which rows there are.
        size: Of all chunks, in a unit of the source's own (bytes, files or rows), or None if only reading tells.
        skipped: (reason, number) of files that are not read at all.
        columns: Tells the columns: of the first row, or of the schema. It may need the network.
        chunks: Gives the chunks; rows need only have the named columns.
        digest: Reads the files again and gives their digest.
    """

    name: str
    content: str
    size: int | None
    skipped: tuple[tuple[str, int], ...]
    columns: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    chunks: Callable[[Sequence[str]], Iterator[Chunk]] = field(repr=False, compare=False)
    digest: Callable[[], str] = field(repr=False, compare=False)


def open_source(config: DataSource) -> Source:
    """List and digest the files of a source.

    Raises:
        DataError: There is no such source, or it cannot be read.
    """
    name = config.source
    path = Path(name).expanduser()
    if name == "stdlib":
        return _texts(open_corpus(name))
    if name and path.is_file():
        if path.suffix.lower() not in _DATA_SUFFIXES:
            raise DataError(
                f"data.source is the file {name}, but a file must be .jsonl or .parquet; convert it, or give the "
                "folder that it is in"
            )
        return _files(name, path.parent, (path.name,))
    if name and path.is_dir():
        return _folder(config, path)
    if _HUB_NAME.fullmatch(name) and not name.lower().endswith(_DATA_SUFFIXES):
        return _hub(config)
    remedy = did_you_mean(name, ["stdlib"]) or (
        "; give 'stdlib', a .jsonl or .parquet file, a folder, or a name on the Hub such as org/name"
    )
    raise DataError(f"data.source is '{name}', but there is no such file or folder{remedy}")


def describe_json(value: object) -> str:
    """What a value is, for a sentence."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


# --- Text: the standard library's source, and folders of text files -------------------------------


@dataclass(frozen=True, slots=True)
class _TextFiles:
    corpus: Corpus

    @property
    def size(self) -> int:
        return len(self.corpus.files)

    def rows(self) -> Iterator[tuple[int, Row] | Skipped]:
        for number, item in enumerate(self.corpus.read()):
            yield item if isinstance(item, Skipped) else (number, {"text": item})

    def place(self, number: int) -> str:
        return f"document {number} of {self.corpus.root / self.corpus.files[0]} and the files after it"


def _texts(corpus: Corpus) -> Source:
    def chunks(columns: Sequence[str]) -> Iterator[Chunk]:
        files: list[str] = []
        num_bytes = 0
        for name in corpus.files:
            files.append(name)
            try:
                num_bytes += (corpus.root / name).stat().st_size
            except OSError as error:
                raise unreadable(corpus.root / name, error) from None
            if num_bytes >= CHUNK_BYTES:
                yield _TextFiles(replace(corpus, files=tuple(files)))
                files, num_bytes = [], 0
        if files:
            yield _TextFiles(replace(corpus, files=tuple(files)))

    def digest() -> str:
        return corpus.digest

    return Source(corpus.source, digest(), len(corpus.files), corpus.skipped, lambda: ("text",), chunks, digest)


# --- .jsonl and .parquet files ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _JsonLines:
    """The lines that begin in bytes start..stop-1 of a file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def rows(self) -> Iterator[tuple[int, Row]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                number = 0
                while file.tell() < self.stop:
                    line = file.readline()
                    if number == 0 and self.start == 0:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.strip():
                        yield number, self._parsed(line, number)
                    number += 1
        except OSError as error:
            raise unreadable(self.path, error) from None

    def place(self, number: int) -> str:
        lines_before = 0
        left = self.start
        with self.path.open("rb") as file:
            while block := file.read(min(left, 1 << 20)):
                lines_before += block.count(b"\n")
                left -= len(block)
        return f"{self.path}, line {lines_before + number + 1:,},"

    def _parsed(self, line: bytes, number: int) -> Row:
        try:
            record = json.loads(line.rstrip().decode("utf-8"))
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 at byte {error.start}, but it must be; convert the file"
        except json.JSONDecodeError as error:
            problem = f"is not JSON at column {error.colno} ({error.msg}), but it must be; mend it"
        except (ValueError, RecursionError):  # a number with too many digits, or brackets too deep
            problem = "is JSON that Python cannot read, but it must be; mend or remove it"
        else:
            if isinstance(record, dict):
                return record
            problem = f"is {describe_json(record)}, but it must be an object; mend it"
        raise DataError(f"{self.place(number)} {problem}")


@dataclass(frozen=True, slots=True)
class _ParquetRows:
    path: Path
    group: int
    size: int
    columns: tuple[str, ...]

    def rows(self) -> Iterator[tuple[int, Row]]:
        import pyarrow

        number = 0
        try:
            file = _parquet(self.path)
            for batch in file.iter_batches(_CHUNK_ROWS, row_groups=[self.group], columns=list(self.columns)):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None

    def place(self, number: int) -> str:
        metadata = _parquet(self.path).metadata
        before = sum(metadata.row_group(group).num_rows for group in range(self.group))
        return f"{self.path}, row {before + number:,},"


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"data.source has the file {path}, but reading .parquet needs pyarrow, which is not installed; "
            f"{_INSTALL}, or give .jsonl files"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(f"the file {path} cannot be read: {reason}; mend or remove it")


def _files(name: str, root: Path, files: tuple[str, ...], skipped: tuple[tuple[str, int], ...] = ()) -> Source:
    """Some .jsonl files, or some .parquet files."""
    suffix = PurePosixPath(files[0]).suffix.lower()
    paths = [root / file for file in files]

    def digest() -> str:
        whole = hashlib.sha256(suffix.encode())
        for path in paths:
            whole.update(file_digest(path))
        return whole.hexdigest()

    if suffix == ".jsonl":
        size = sum(_num_bytes(path) for path in paths)

        def columns() -> tuple[str, ...]:
            rows = itertools.chain.from_iterable(_JsonLines(path, 0, _num_bytes(path)).rows() for path in paths)
            return next((tuple(row) for _, row in rows), ())

        def ranges(columns: Sequence[str]) -> Iterator[Chunk]:
            for path in paths:
                yield from _line_ranges(path)

        return Source(name, digest(), size, skipped, columns, ranges, digest)

    schemas = [tuple(_parquet(path).schema_arrow.names) for path in paths]
    for path, schema in zip(paths, schemas, strict=True):
        if schema != schemas[0]:
            raise DataError(
                f"the file {path} has the columns {', '.join(schema)}, but {paths[0]} has {', '.join(schemas[0])}; "
                "give files of one kind, or a mixture"
            )

    def groups(columns: Sequence[str]) -> Iterator[Chunk]:
        for path in paths:
            metadata = _parquet(path).metadata
            for group in range(metadata.num_row_groups):
                yield _ParquetRows(path, group, metadata.row_group(group).num_rows, tuple(columns))

    num_rows = sum(_parquet(path).metadata.num_rows for path in paths)
    return Source(name, digest(), num_rows, skipped, lambda: schemas[0], groups, digest)


def _line_ranges(path: Path) -> Iterator[_JsonLines]:
    start, size = 0, _num_bytes(path)
    try:
        with path.open("rb") as file:
            while start < size:
                file.seek(min(start + CHUNK_BYTES, size) - 1)
                file.readline()
                stop = file.tell()
                yield _JsonLines(path, start, stop)
                start = stop
    except OSError as error:
        raise unreadable(path, error) from None


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None


# --- Folders ---------------------------------------------------------------------------------------


def _folder(config: DataSource, root: Path) -> Source:
    """A saved data set; else a folder of text; else of .parquet or .jsonl files."""
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return _saved(config, root)
    names = files_below(root, is_hidden)
    by_suffix = {suffix: tuple(n for n in names if n.lower().endswith(suffix)) for suffix in _DATA_SUFFIXES}
    found = [suffix for suffix, files in by_suffix.items() if files]
    others = [n for n in names if not n.lower().endswith(_DATA_SUFFIXES) and not _is_note(n)]
    corpus_error: DataError | None = None
    if others or not found:
        try:
            return _texts(open_corpus(config.source))
        except DataError as error:
            corpus_error = error
    if len(found) == 1:
        files = by_suffix[found[0]]
        num_others = len(names) - len(files)
        return _files(config.source, root, files, (("other suffix", num_others),) if num_others else ())
    if found:
        raise DataError(
            f"data.source is the folder {config.source}, but it has {' and '.join(found)} files; give one kind, or a "
            "mixture"
        )
    assert corpus_error is not None
    raise corpus_error


def _is_note(name: str) -> bool:
    """A data set's card or licence, which is no sample."""
    return PurePosixPath(name).stem.lower() in ("readme", "license", "licence")


@dataclass(frozen=True, slots=True)
class _SavedRows:
    folder: Path
    start: int
    stop: int
    columns: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def rows(self) -> Iterator[tuple[int, Row]]:
        part = _load_saved(self.folder).select_columns(list(self.columns))[self.start : self.stop]
        for number, values in enumerate(zip(*part.values(), strict=True)):
            yield number, dict(zip(part, values, strict=True))

    def place(self, number: int) -> str:
        return f"{self.folder}, row {self.start + number:,},"


def _saved(config: DataSource, root: Path) -> Source:
    """A folder of `datasets`' save_to_disk."""
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in root.glob("*/state.json"))
        if config.split not in splits:
            raise DataError(
                f"data.split is '{config.split}', but the data set {config.source} has {', '.join(splits) or 'none'}"
                f"{did_you_mean(config.split, splits) or '; name one of them'}"
            )
        root = root / config.split
    data = _load_saved(root)
    arrow_files = [name for name in files_below(root, is_hidden) if name.endswith((".arrow", "state.json"))]

    def digest() -> str:
        whole = hashlib.sha256(b"saved")
        for name in arrow_files:
            whole.update(file_digest(root / name))
        return whole.hexdigest()

    def chunks(columns: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, len(data), _CHUNK_ROWS):
            yield _SavedRows(root, start, min(start + _CHUNK_ROWS, len(data)), tuple(columns))

    return Source(config.source, digest(), len(data), (), lambda: tuple(data.column_names), chunks, digest)


def _load_saved(folder: Path) -> Any:
    datasets = _datasets(str(folder))
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # of datasets, pyarrow, JSON and the operating system
        raise _damaged(folder, error) from None


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data.source is {name}, but reading it needs Hugging Face datasets, which is not installed; {_INSTALL}, "
            "or give .jsonl files"
        ) from None
    return datasets


# --- The Hub ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HubRows:
    name: str
    start: int
    content: tuple[Row, ...]

    @property
    def size(self) -> int:
        return len(self.content)

    def rows(self) -> Iterator[tuple[int, Row]]:
        yield from enumerate(self.content)

    def place(self, number: int) -> str:
        return f"{self.name}, row {self.start + number:,},"


def _hub(config: DataSource) -> Source:
    """A data set on the Hub, at one commit."""
    import huggingface_hub

    name = config.source
    commit = config.revision if _COMMIT.fullmatch(config.revision or "") else None
    if commit is None:
        try:
            commit = huggingface_hub.HfApi().dataset_info(name, revision=config.revision).sha
        except Exception as error:  # of several libraries: hub, HTTP client, operating system
            raise DataError(
                f"data.source is '{name}', but there is no such file or folder, and the Hugging Face Hub does not give "
                f"such a data set ({type(error).__name__}); give a path, or mend the name or the network"
            ) from None
    assert commit is not None
    content = hashlib.sha256(json.dumps(["hub", name, config.subset, config.split, commit]).encode()).hexdigest()

    def stream() -> Any:
        datasets = _datasets(f"'{name}'")
        try:
            return datasets.load_dataset(name, config.subset, split=config.split, revision=commit, streaming=True)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"data.source is '{name}' at commit {commit[:8]}, but datasets cannot open its split "
                f"'{config.split}' ({type(error).__name__}: {reason}); set data.subset or data.split, or mend the "
                "network"
            ) from None

    def chunks(columns: Sequence[str]) -> Iterator[Chunk]:
        rows = iter(stream().select_columns(list(columns)))
        for start in itertools.count(0, _CHUNK_ROWS):
            try:
                part = tuple(itertools.islice(rows, _CHUNK_ROWS))
            except Exception as error:
                raise DataError(
                    f"data.source is '{name}', but its rows from {start:,} on cannot be had ({type(error).__name__}); "
                    "mend the network and start again"
                ) from None
            if not part:
                return
            yield _HubRows(name, start, part)

    def columns() -> tuple[str, ...]:
        first: Row = next(iter(stream().take(1)), {})
        return tuple(first)

    return Source(name, content, None, (), columns, chunks, lambda: content)
