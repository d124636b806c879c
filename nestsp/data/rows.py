"""Rows and the chunks that they come in, whatever they are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nestsp.data.corpus import Skipped
from nestsp.errors import DataError

__all__ = ["CHUNK_ROWS", "INSTALL_DATASETS", "Chunk", "Row", "Source", "damaged", "describe_json"]

Row = Mapping[str, Any]

CHUNK_ROWS = 1024
INSTALL_DATASETS = "pip install 'nestsp[datasets]'"


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


def describe_json(value: object) -> str:
    """What a value is, for a sentence."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def damaged(path: Path, error: Exception) -> DataError:
    """What to say of a file that its library cannot read."""
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(f"the file {path} cannot be read: {reason}; mend or remove it")
