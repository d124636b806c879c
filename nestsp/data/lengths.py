"""Lengths without tokens: what planning and simulation need of data.

A source is a file of lengths or texts (``.jsonl``, ``.npy``, ``.npz``, ``.csv``, ``.parquet``), a folder of text files,
the standard library's own source (``stdlib``), or a built-in table of quantiles. Where a file has several fields,
``length`` counts before ``input_ids`` before ``text``; texts are measured by a tokenizer, by default one token a byte,
as training does it.

The tables are drawn from by interpolating the logarithm of the length; they say what long-tailed text looks like, and
replace no data of one's own. Beyond the end of a table lies a Pareto tail where the source had more.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.data.corpus import Skipped, open_corpus
from nestsp.data.tokenizer import open_tokenizer
from nestsp.errors import DataError, did_you_mean
from nestsp.units import plural

__all__ = [
    "LENGTH_TABLES",
    "Drawn",
    "LengthTable",
    "Lengths",
    "OverLength",
    "draw_batch",
    "draw_batches",
    "open_lengths",
    "read_lengths",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
OverLength = Literal["drop", "truncate", "split", "error"]

# Longer than anything; below it every product in the cost model is exact enough in float64.
_MOST_TOKENS = 2**40
_TEXTS_AT_ONCE = 256
# No more are drawn from a table, or made by splitting: a batch of so many would take an hour to plan.
_MOST_SEQUENCES = 1 << 24

_PROBABILITIES = (
    0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9,
    0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.992, 0.994, 0.996, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 0.99995,
    0.99998, 0.99999, 1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles of a corpus.

    Attributes:
        source: What was measured.
        lengths: Length at each of the first so many probabilities.
        tail_start: Where the Pareto tail begins, in tokens, or None if the table reaches the longest sample.
        tail_probability: Part of the samples beyond that.
        tail_exponent: The tail falls as length to the power of minus this.
    """

    source: str
    lengths: tuple[int, ...]
    tail_start: int | None = None
    tail_probability: float = 0.0
    tail_exponent: float = 1.0

    def draw(self, uniform: npt.NDArray[np.float64]) -> Ints:
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
        "token lengths of 1,000,000 articles of Wikipedia, up to 1,823,777",
        (1, 39, 48, 67, 87, 103, 122, 146, 171, 205, 243, 290, 347, 411, 472, 556, 685, 862, 1092, 1464, 2112, 2565,
         3235, 3720, 4392, 5390, 7087, 8536, 10919, 12343, 14413, 18168, 26511, 37353, 51510, 75413, 101537, 129653,
         193461, 230941, 1823777),
    ),
    "github": LengthTable(
        "token lengths (GPT-2 tokenizer) of 20,000 files from GitHub, in buckets of 256",
        (1, 9, 19, 48, 97, 145, 194, 243, 315, 395, 476, 583, 712, 872, 1066, 1317, 1656, 2148, 2837, 3886, 5865, 7092,
         8954, 10439, 12431, 14998, 19273, 22848, 27776, 30144, 33536, 37376, 44032, 51200, 56320, 65792, 75008, 75264,
         75417, 75468, 75520),
    ),
    "arxiv": LengthTable(
        "token lengths (GPT-2 tokenizer) of 20,000 papers from arXiv, in buckets of 256 up to 131,072; the 49"
        " longer ones as a Pareto tail of exponent 2.29, that of the decade before",
        (1, 123, 247, 1273, 4034, 5248, 6179, 7082, 8005, 8969, 10092, 11252, 12529, 13881, 15455, 17240, 19357, 21858,
         24925, 29119, 35540, 38737, 43387, 46549, 50432, 56459, 65248, 72192, 82176, 88832, 96000, 112896),
        tail_start=131072, tail_probability=0.00245, tail_exponent=2.29,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The lengths of a source.

    Attributes:
        values: int64 [sequences], tokens of each, 0 where one is empty; a sequence's id is its place here.
        notes: What a reader of any figure made of them should know, a phrase each.
        cut: bool [sequences], which are pieces of longer ones; None if none was split.
    """

    values: Ints
    notes: tuple[str, ...]
    cut: Bools | None = None

    def split(self, limit: int | None) -> Lengths:
        """Longer sequences in pieces of the limit, the last with what remains, as training splits them.

        Raises:
            DataError: That would be too many.

        >>> Lengths(np.array([5, 0, 2]), ()).split(2).values.tolist()
        [2, 2, 1, 0, 2]
        """
        if limit is None:
            return self
        num_pieces = np.maximum(1, -(-self.values // limit))
        if num_pieces.sum(dtype=float) > _MOST_SEQUENCES:
            raise DataError(
                f"the limit of a sequence is {limit:,}, but splitting there makes {num_pieces.sum(dtype=float):,.0f} "
                f"sequences of {len(self.values):,}, and at most {_MOST_SEQUENCES:,} are planned; raise it"
            )
        pieces = np.full(num_pieces.sum(), limit, dtype=np.int64)
        pieces[np.cumsum(num_pieces) - 1] = self.values - (num_pieces - 1) * limit
        return Lengths(pieces, self.notes, np.repeat(num_pieces > 1, num_pieces))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch and what was left out of it.

    Attributes:
        batch: The sequences; ids are places in the source.
        num_empty: Sequences without tokens that were dropped.
        num_too_long: Sequences over the limit, which were dropped or truncated; or pieces of such.
        stop: How many sequences of the source were looked at, from its beginning; the next batch starts there.
    """

    batch: SequenceBatch
    num_empty: int
    num_too_long: int
    stop: int


def open_lengths(source: str, *, num_samples: int, seed: int, tokenizer: str = "bytes") -> Lengths:
    """The lengths of a source, in its own order; of a built-in table, so many drawn ones.

    Args:
        source: A file, a folder, ``stdlib``, or the name of a table.
        num_samples: How many lengths to draw from a table; of the same seed, fewer are the beginning of more.
        seed: Of what is drawn.
        tokenizer: What measures texts: ``bytes``, a folder, or a name on the Hugging Face Hub.

    Raises:
        DataError: There is no such source, it cannot be read, or it holds no whole numbers of 0 or more.
    """
    if source in LENGTH_TABLES:
        table = LENGTH_TABLES[source]
        drawn = table.draw(np.random.default_rng(seed).random(num_samples))
        return Lengths(drawn, (f"drawn with seed {seed} from built-in quantiles: {table.source}",))
    path = Path(source).expanduser()
    skipped: Counter[str] = Counter()
    if source == "stdlib" or (source and path.is_dir()):
        values: Iterable[Any] = _corpus_texts(source, skipped)
    elif path.suffix in _READERS and path.is_file():
        values = _READERS[path.suffix](path)
    else:
        named = ("stdlib", *LENGTH_TABLES)
        what = "there is no such file" if path.suffix in _READERS else "it is neither a known name nor such a file"
        raise DataError(
            f"the lengths are {source!r}, but {what}; give {', '.join(named)}, a {', '.join(_READERS)} file, or a "
            f"folder of text{did_you_mean(source, named)}"
        )
    measure = _Measure(source, tokenizer)
    try:
        lengths = np.array(list(measure(values)), dtype=np.int64)
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise DataError(f"the lengths in {source} cannot be read: {' '.join(str(error).split())}") from None
    if not lengths.size:
        raise DataError(f"{source} has no lengths, but planning needs at least one; give another file")
    notes = [f"{plural(count, 'file')} skipped: {reason}" for reason, count in skipped.items()]
    if measure.num_texts:
        how = "one token a byte" if tokenizer == "bytes" else f"the tokenizer {tokenizer}"
        notes.insert(0, f"{plural(measure.num_texts, 'text')} measured by {how}")
    return Lengths(lengths, tuple(notes))


def read_lengths(source: str, *, num_samples: int, seed: int) -> Ints:
    """The lengths of a source; see `open_lengths`."""
    return open_lengths(source, num_samples=num_samples, seed=seed).values


def draw_batch(
    lengths: Ints,
    *,
    max_tokens: int | None,
    max_length: int | None,
    over_length: OverLength = "drop",
    start: int = 0,
    order: Sequence[int] | None = None,
    cut: Bools | None = None,
) -> Drawn:
    """The sequences of one step: in order, until the next would pass a number of tokens.

    Args:
        lengths: All lengths of the source.
        max_tokens: Tokens of the batch; None for all sequences.
        max_length: The limit of a sequence; None for none.
        over_length: What becomes of longer ones, which are counted: ``drop``, ``truncate``, or ``error``. Who wants
            them in pieces splits them before: see `Lengths.split`.
        start: Where in the order to begin.
        order: Places in the source in the order in which they are taken; None for the source's own.
        cut: Which are pieces of longer ones, and counted as such; None for none.

    Raises:
        DataError: No sequence is left, or one is longer than the limit and that is an error.
    """
    ids: list[int] = []
    taken: list[int] = []
    total = empty = too_long = 0
    stop = num_left = len(lengths)
    for position in range(start, len(lengths)):
        place = position if order is None else order[position]
        length = int(lengths[place])
        if length == 0:
            empty += 1
            continue
        is_longer = max_length is not None and length > max_length
        if is_longer and over_length == "drop":
            too_long += 1
            continue
        if max_length is not None and is_longer:
            if over_length == "error":
                raise DataError(
                    f"sequence {place} has {length:,} tokens, but the limit is {max_length:,} and longer ones are an "
                    "error; raise the limit, or drop or truncate them"
                )
            length = max_length
        if max_tokens is not None and ids and total + length > max_tokens:
            stop = position
            break
        too_long += is_longer or (cut is not None and bool(cut[place]))
        ids.append(place)
        taken.append(length)
        total += length
    if not ids:
        long = "" if max_length is None else f" and {too_long:,} are longer than {max_length:,} tokens"
        remedy = "give another source" if not too_long else "raise the limit"
        raise DataError(f"none of {plural(num_left - start, 'sequence')} is left: {empty:,} are empty{long}; {remedy}")
    return Drawn(SequenceBatch(tuple(ids), tuple(taken)), empty, too_long, stop)


def draw_batches(
    source: str,
    num_batches: int,
    *,
    max_tokens: int,
    max_length: int | None,
    over_length: OverLength = "drop",
    seed: int,
    tokenizer: str = "bytes",
) -> tuple[tuple[Drawn, ...], Lengths]:
    """The first batches of an epoch. A table gives as many as are asked for, other sources at most one epoch.

    Args:
        source: See `open_lengths`.
        num_batches: At most so many.
        max_tokens: Tokens of each batch.
        max_length: The limit of a sequence.
        over_length: What becomes of longer ones; see `draw_batch`, or ``split`` for pieces, which are sequences of
            their own: ids are then places among all pieces.
        seed: Of what is drawn from a table, and of the order of any other source.
        tokenizer: What measures texts.

    Raises:
        DataError: The source cannot be read, or no sequence is left.
    """
    num_samples = 1 << 14
    while True:
        if num_samples > _MOST_SEQUENCES:
            raise DataError(
                f"{num_batches:,} times {max_tokens:,} tokens are asked for, but those are more than "
                f"{_MOST_SEQUENCES:,} sequences of {source}, the most that are drawn; lower --max-tokens"
            )
        lengths = open_lengths(source, num_samples=num_samples, seed=seed, tokenizer=tokenizer)
        if over_length == "split":
            lengths = lengths.split(max_length)
        order = None
        if source not in LENGTH_TABLES:
            order = np.random.default_rng(seed).permutation(len(lengths.values)).tolist()
        drawn: list[Drawn] = []
        start = 0
        while len(drawn) < num_batches and start < len(lengths.values):
            if drawn and not _any_left(lengths.values, order, start, max_length if over_length == "drop" else None):
                break
            limits: dict[str, Any] = {"max_tokens": max_tokens, "max_length": max_length, "over_length": over_length}
            drawn.append(draw_batch(lengths.values, **limits, start=start, order=order, cut=lengths.cut))
            start = drawn[-1].stop
        # The last batch of what was drawn from a table may have ended only because the draw did.
        if source not in LENGTH_TABLES or start < len(lengths.values):
            return tuple(drawn), lengths
        num_samples *= 4


def _any_left(lengths: Ints, order: Sequence[int] | None, start: int, max_length: int | None) -> bool:
    rest = lengths[start:] if order is None else lengths[order[start:]]
    return bool(((rest > 0) & (rest <= (_MOST_TOKENS if max_length is None else max_length))).any())


@dataclass(slots=True)
class _Measure:
    """Checks numbers, counts lists, tokenises texts."""

    source: str
    tokenizer: str
    num_texts: int = 0

    def __call__(self, values: Iterable[Any]) -> Iterator[int]:
        encode = open_tokenizer(self.tokenizer).encode_batch
        iterator = enumerate(values)
        while chunk := list(itertools.islice(iterator, _TEXTS_AT_ONCE)):
            texts = [value for _, value in chunk if isinstance(value, str)]
            self.num_texts += len(texts)
            counts = iter([len(tokens) for tokens in encode(texts)])
            for place, value in chunk:
                yield next(counts) if isinstance(value, str) else self._number(place, value)

    def _number(self, place: int, value: Any) -> int:
        if isinstance(value, list):
            return len(value)
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value != int(value) or not 0 <= value <= _MOST_TOKENS:
            raise DataError(
                f"sequence {place} of {self.source} has length {value!r}, but a length is a whole number from 0 to "
                f"{_MOST_TOKENS:,}; correct it"
            )
        return int(value)


def _corpus_texts(source: str, skipped: Counter[str]) -> Iterator[str]:
    try:
        corpus = open_corpus(source)
    except DataError as error:
        raise DataError(f"the lengths are{str(error).removeprefix('data.source is')}") from None
    skipped.update(dict(corpus.skipped))
    for text in corpus.read():
        if isinstance(text, Skipped):
            skipped[text.reason] += 1
        else:
            yield text


def _read_jsonl(path: Path) -> Iterator[Any]:
    # Not splitlines, which also cuts at separators that JSON allows inside a text.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not JSON: {error}") from None
            if isinstance(record, dict):
                yield _field(record, f"line {number}")
            elif isinstance(record, (int, float)):
                yield record
            else:
                raise ValueError(
                    f"line {number} is neither a number nor an object with 'length', 'input_ids' or 'text'"
                )


def _field(record: Mapping[str, Any], where: str) -> Any:
    kinds = {"length": (int, float), "input_ids": list, "text": str}
    for name, kind in kinds.items():
        if name in record:
            if not isinstance(record[name], kind):  # type: ignore[arg-type]
                raise ValueError(f"{where} has {record[name]!r:.40} as '{name}', which is no {name}")
            return record[name]
    raise ValueError(f"{where} has none of 'length', 'input_ids' and 'text'")


def _read_numpy(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        try:
            loaded = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):  # NumPy's own words are about pickles
            raise ValueError("it is no NumPy file, or a damaged one") from None
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
    yield from array.tolist()


def _read_csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows: Iterator[list[str]] = (row for row in csv.reader(file) if row)
        first = next(rows, None)
        if first is None:
            return
        column, is_text = 0, False
        if _is_number(first[0]):
            rows = itertools.chain([first], rows)
        else:
            header = [name.strip() for name in first]
            known = [name for name in ("length", "text") if name in header]
            if not known and len(header) > 1:
                raise ValueError(f"its columns are {', '.join(header)}, but one of them must be 'length' or 'text'")
            column = header.index(known[0]) if known else 0
            is_text = known[:1] == ["text"]
        for number, row in enumerate(rows, 1):
            if column >= len(row):
                raise ValueError(f"row {number} has only {plural(len(row), 'column')}")
            yield row[column] if is_text else float(row[column])


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"the lengths are in {path}, but reading .parquet needs pyarrow, which is not installed; "
            "pip install 'nestsp[parquet]', or give a .jsonl file"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        name = next((name for name in ("length", "input_ids", "text") if name in names), None)
        if name is None and len(names) > 1:
            raise ValueError(f"its columns are {', '.join(names)}, but one must be 'length', 'input_ids' or 'text'")
        for batch in file.iter_batches(columns=[name or names[0]]):
            column = batch.column(0)
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                column = pyarrow.compute.list_value_length(column)
            yield from column.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_READERS: Mapping[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _read_jsonl,
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
