"""Data sets of Hugging Face `datasets`: folders that it saved, and names on the Hub.

A data set on the Hub is known by its commit: it is streamed, row after row, straight to the token store, and nothing
else of it stays on this disk. No code of a data set is run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestsp.config import DataSource
from nestsp.data.corpus import file_digest, files_below, is_hidden
from nestsp.data.rows import CHUNK_ROWS, INSTALL_DATASETS, Chunk, Row, Source, damaged
from nestsp.errors import DataError, did_you_mean

__all__ = ["open_hub", "open_saved"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def open_saved(config: DataSource, root: Path) -> Source:
    """A folder of `datasets`' save_to_disk.

    Raises:
        DataError: It has no such split, or cannot be read.
    """
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in root.glob("*/state.json"))
        if config.split not in splits:
            raise DataError(
                f"data.split is '{config.split}', but the data set {config.source} has {', '.join(splits) or 'none'}"
                f"{did_you_mean(config.split, splits) or '; name one of them'}"
            )
        root = root / config.split
    elif config.split != "train":
        raise DataError(
            f"data.split is '{config.split}', but the data set {config.source} was saved without splits; leave it out"
        )
    data = _load_saved(root)
    arrow_files = [name for name in files_below(root, is_hidden) if name.endswith((".arrow", "state.json"))]

    def digest() -> str:
        whole = hashlib.sha256(b"saved")
        for name in arrow_files:
            whole.update(file_digest(root / name))
        return whole.hexdigest()

    def chunks(columns: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, len(data), CHUNK_ROWS):
            yield _SavedRows(root, start, min(start + CHUNK_ROWS, len(data)), tuple(columns))

    return Source(config.source, digest(), len(data), (), lambda: tuple(data.column_names), chunks, digest)


def _load_saved(folder: Path) -> Any:
    datasets = _datasets(str(folder))
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # of datasets, pyarrow, JSON and the operating system
        raise damaged(folder, error) from None


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data.source is {name}, but reading it needs Hugging Face datasets, which is not installed; "
            f"{INSTALL_DATASETS}, or give .jsonl files"
        ) from None
    return datasets


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


def open_hub(config: DataSource) -> Source:
    """A data set on the Hub, at one commit.

    Raises:
        DataError: The Hub has no such data set, or cannot be reached.
    """
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
        for start in itertools.count(0, CHUNK_ROWS):
            try:
                part = tuple(itertools.islice(rows, CHUNK_ROWS))
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
