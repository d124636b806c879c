"""Lengths without tokens: what planning and simulation need of data.

A source is a file of lengths (``.jsonl`` with a ``length`` or ``text`` field, ``.npy``, ``.npz``, ``.csv``), or a
built-in corpus. The built-in corpora are tables of quantiles, drawn from by interpolating the logarithm of the
length; they say what long-tailed text looks like, and replace no data of one's own. Beyond the end of a table lies a
Pareto tail where the source had more.

Sources of the tables: *wikipedia*: token lengths of 1,000,000 articles of a Wikipedia corpus, up to 1,823,777; *github*
and *arxiv*: token lengths (GPT-2 tokenizer) of 20,000 samples each, in buckets of 256 up to 131,072, of which 49 of
arxiv's were longer (their tail falls as length to the power of -2.29, as the decade before it does).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.errors import DataError, did_you_mean

__all__ = ["LENGTH_TABLES", "Drawn", "LengthTable", "draw_batch", "read_lengths"]

_PROBABILITIES = (
    0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9,
    0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.992, 0.994, 0.996, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 0.99995,
    0.99998, 0.99999, 1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles of a corpus.

    Attributes:
        lengths: Length at each of the first so many probabilities.
        tail_start: Where the Pareto tail begins, in tokens, or None if the table reaches the longest sample.
        tail_probability: Part of the samples beyond that.
        tail_exponent: The tail falls as length to the power of minus this.
    """

    lengths: tuple[int, ...]
    tail_start: int | None = None
    tail_probability: float = 0.0
    tail_exponent: float = 1.0

    def draw(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Lengths at numbers that are uniform in [0, 1)."""
        body = 1.0 - self.tail_probability
        places = list(_PROBABILITIES[: len(self.lengths)])
        logarithms = [math.log(length) for length in self.lengths]
        if self.tail_start is not None:
            places.append(body)
            logarithms.append(math.log(self.tail_start))
        drawn = np.exp(np.interp(uniform, places, logarithms))
        if self.tail_start is not None:
            beyond = uniform > body
            left = np.maximum((1 - uniform[beyond]) / self.tail_probability, 1e-12)
            drawn[beyond] = self.tail_start * left ** (-1 / self.tail_exponent)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


LENGTH_TABLES: dict[str, LengthTable] = {
    "wikipedia": LengthTable(
        (1, 39, 48, 67, 87, 103, 122, 146, 171, 205, 243, 290, 347, 411, 472, 556, 685, 862, 1092, 1464, 2112, 2565,
         3235, 3720, 4392, 5390, 7087, 8536, 10919, 12343, 14413, 18168, 26511, 37353, 51510, 75413, 101537, 129653,
         193461, 230941, 1823777),
    ),
    "github": LengthTable(
        (1, 9, 19, 48, 97, 145, 194, 243, 315, 395, 476, 583, 712, 872, 1066, 1317, 1656, 2148, 2837, 3886, 5865, 7092,
         8954, 10439, 12431, 14998, 19273, 22848, 27776, 30144, 33536, 37376, 44032, 51200, 56320, 65792, 75008, 75264,
         75417, 75468, 75520),
    ),
    "arxiv": LengthTable(
        (1, 123, 247, 1273, 4034, 5248, 6179, 7082, 8005, 8969, 10092, 11252, 12529, 13881, 15455, 17240, 19357, 21858,
         24925, 29119, 35540, 38737, 43387, 46549, 50432, 56459, 65248, 72192, 82176, 88832, 96000, 112896),
        tail_start=131072, tail_probability=0.00245, tail_exponent=2.29,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch and what was left out of it.

    Attributes:
        batch: The sequences; ids are places in the source.
        num_empty: Sequences without tokens that were dropped.
        num_too_long: Sequences over the limit that were dropped.
    """

    batch: SequenceBatch
    num_empty: int
    num_too_long: int


def read_lengths(source: str, *, num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """The lengths of a source, in its own order; of a built-in corpus, so many drawn ones.

    Raises:
        DataError: There is no such file or corpus, or it holds no whole numbers of 0 or more.
    """
    if source in LENGTH_TABLES:
        return LENGTH_TABLES[source].draw(np.random.default_rng(seed).random(num_samples))
    path = Path(source)
    readers = {".jsonl": _read_jsonl, ".npy": _read_numpy, ".npz": _read_numpy, ".csv": _read_csv}
    if not path.is_file() or path.suffix not in readers:
        known = (*LENGTH_TABLES, "a .jsonl, .npy, .npz or .csv file")
        what = "there is no such file" if path.suffix in readers else "it is neither a corpus nor such a file"
        raise DataError(
            f"the lengths are {source!r}, but {what}; give {', '.join(known)}{did_you_mean(source, LENGTH_TABLES)}"
        )
    try:
        values = list(readers[path.suffix](path))
    except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise DataError(f"the lengths in {source} cannot be read: {' '.join(str(error).split())}") from None
    if not values:
        raise DataError(f"{source} has no lengths, but planning needs at least one; give another file")
    for place, value in enumerate(values):
        whole = isinstance(value, (int, np.integer)) or (
            isinstance(value, (float, np.floating)) and value == int(value)
        )
        if isinstance(value, bool) or not whole or value < 0:
            raise DataError(
                f"length {place} of {source} is {value!r}, but a length is a whole number of 0 or more; correct it"
            )
    return np.array([int(value) for value in values], dtype=np.int64)


def draw_batch(
    lengths: npt.NDArray[np.int64], *, max_tokens: int | None, max_length: int | None, start: int = 0
) -> Drawn:
    """The sequences of one step: in order, until the next would pass a number of tokens.

    Args:
        lengths: All lengths of the source.
        max_tokens: Tokens of the batch; None for all sequences.
        max_length: Longer ones are dropped and counted; None for no limit.
        start: Where in the source to begin.

    Raises:
        DataError: No sequence is left.
    """
    ids: list[int] = []
    total = empty = too_long = 0
    for place in range(start, len(lengths)):
        length = int(lengths[place])
        if length == 0:
            empty += 1
        elif max_length is not None and length > max_length:
            too_long += 1
        elif max_tokens is not None and ids and total + length > max_tokens:
            break
        else:
            ids.append(place)
            total += length
    if not ids:
        raise DataError(
            f"none of {len(lengths) - start:,} sequences is left: {empty:,} are empty and {too_long:,} are longer than "
            f"{max_length or 0:,} tokens; raise the limit"
        )
    return Drawn(SequenceBatch(tuple(ids), tuple(int(lengths[i]) for i in ids)), empty, too_long)


def _read_jsonl(path: Path) -> Iterable[Any]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        if isinstance(record, (int, float)):
            yield record
        elif isinstance(record, dict) and "length" in record:
            yield record["length"]
        elif isinstance(record, dict) and isinstance(record.get("text"), str):
            yield len(record["text"].encode())  # byte tokens
        else:
            raise ValueError(f"line {number} has neither 'length' nor 'text'")


def _read_numpy(path: Path) -> Iterable[Any]:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        array = loaded
    elif "lengths" in loaded.files or len(loaded.files) == 1:
        array = loaded["lengths" if "lengths" in loaded.files else loaded.files[0]]
    else:
        raise ValueError(f"it holds {', '.join(loaded.files)}, but one of them must be named 'lengths'")
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"it is an array of {array.dtype} with {array.ndim} axes, but must be one of numbers with one axis"
        )
    values: list[Any] = array.tolist()
    return values


def _read_csv(path: Path) -> Iterable[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    column = 0
    if rows and not _is_number(rows[0][0]):
        header = [name.strip() for name in rows.pop(0)]
        if "length" not in header and len(header) > 1:
            raise ValueError(f"its columns are {', '.join(header)}, but one of them must be named 'length'")
        column = header.index("length") if "length" in header else 0
    for row in rows:
        yield float(row[column])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
