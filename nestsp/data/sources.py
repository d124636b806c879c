"""Where rows come from: text corpora, .jsonl and .parquet files; others are in `nestsp.data.hub`.

A source is cut into chunks, which are small values that say where rows lie: a range of bytes, a row group, some files.
So workers read for themselves, and a source of any size takes little memory. Chunks and rows have one fixed order.

The digest covers the content of every file, so data that changed are never mistaken for data that did not; the price is
that of `nestsp.data.corpus`.

A folder's files whose names tell splits (train-00000-of-00002.parquet beside test-00000-of-00001.parquet) are those of
``data.split`` alone. Where nothing tells a split, asking for one is an error: no run trains on what it should not see.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from nestsp.config import DataSource
from nestsp.data.corpus import Corpus, Skipped, file_digest, files_below, is_hidden, open_corpus, unreadable
from nestsp.data.hub import open_hub, open_saved
from nestsp.data.rows import CHUNK_ROWS, INSTALL_DATASETS, Chunk, Row, Source, damaged, describe_json
from nestsp.errors import DataError, did_you_mean

__all__ = ["open_source"]

CHUNK_BYTES = 1 << 21
_DATA_SUFFIXES = (".jsonl", ".parquet")
_SPLIT_WORDS = frozenset(("train", "validation", "valid", "val", "dev", "test", "eval"))
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_source(config: DataSource) -> Source:
    """List and digest the files of a source.

    Raises:
        DataError: There is no such source, or it cannot be read.
    """
    name = config.source
    path = Path(name).expanduser()
    if name == "stdlib":
        _refuse_split(config)
        return _texts(open_corpus(name))
    if name and path.is_file():
        _refuse_split(config)
        if path.suffix.lower() not in _DATA_SUFFIXES:
            raise DataError(
                f"data.source is the file {name}, but a file must be .jsonl or .parquet; convert it, or give the "
                "folder that it is in"
            )
        return _files(name, path.parent, (path.name,))
    if name and path.is_dir():
        return _folder(config, path)
    if _HUB_NAME.fullmatch(name) and not name.lower().endswith(_DATA_SUFFIXES):
        return open_hub(config)
    remedy = did_you_mean(name, ["stdlib"]) or (
        "; give 'stdlib', a .jsonl or .parquet file, a folder, or a name on the Hub such as org/name"
    )
    raise DataError(f"data.source is '{name}', but there is no such file or folder{remedy}")


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
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=[self.group], columns=list(self.columns)):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise damaged(self.path, error) from None

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
            f"{INSTALL_DATASETS}, or give .jsonl files"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise damaged(path, error) from None


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
        _refuse(config, "subset", "revision")
        return open_saved(config, root)
    names = files_below(root, is_hidden)
    data = [name for name in names if name.lower().endswith(_DATA_SUFFIXES)]
    others = [name for name in names if name not in data and not _is_note(name)]
    if others or not data:
        try:
            corpus = open_corpus(config.source)
        except DataError:  # none of the others is text
            if not data:
                raise
        else:
            _refuse_split(config)
            return _texts(corpus)
    chosen = _of_split(config, data)
    suffixes = sorted({PurePosixPath(name).suffix.lower() for name in chosen})
    if len(suffixes) > 1:
        raise DataError(
            f"data.source is the folder {config.source}, but it has {' and '.join(suffixes)} files; give one kind, or "
            "a mixture"
        )
    skipped = {"other suffix": len(names) - len(data), "other split": len(data) - len(chosen)}
    return _files(config.source, root, tuple(chosen), tuple((why, number) for why, number in skipped.items() if number))


def _of_split(config: DataSource, names: Sequence[str]) -> list[str]:
    """The files of a split, where their names tell it."""
    _refuse(config, "subset", "revision")
    splits = {name: _SPLIT_WORDS & set(re.split(r"[/_.-]", name.lower())) for name in names}
    found = sorted(set().union(*splits.values()))
    if not found:
        _refuse_split(config)
    elif found != [config.split] and config.split not in found:
        raise DataError(
            f"data.split is '{config.split}', but the files in {config.source} are of {', '.join(found)} by name; name "
            "one of them"
        )
    return [name for name in names if config.split in splits[name]] if len(found) > 1 else list(names)


def _refuse_split(config: DataSource) -> None:
    _refuse(config, "split", "subset", "revision")


def _refuse(config: DataSource, *names: str) -> None:
    """Settings that mean nothing for this source must be left at their defaults, so that none is ignored in silence."""
    for name in names:
        value = getattr(config, name)
        if value != DataSource.model_fields[name].default:
            raise DataError(
                f"data.{name} is '{value}', but {config.source} has none to choose from; leave it out, or name the "
                "files that are meant"
            )


def _is_note(name: str) -> bool:
    """A data set's card or licence, which is no sample."""
    return PurePosixPath(name).stem.lower() in ("readme", "license", "licence")
