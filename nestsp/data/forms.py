"""What a row is, and how it becomes documents: tokens, and for each token its weight as a target.

| form | columns | has a loss |
|---|---|---|
| text | ``text`` | every token |
| tokens | ``input_ids``; if there: ``labels``, ``attention_mask``, weights, bounds | as labels and weights say |
| chat | ``messages``; ``tools`` if there | the assistant's turns (`nestsp.data.chat`) |
| prompt_completion | ``prompt`` and ``completion``, both texts or both lists of messages | the completion |
| preference | ``prompt``, ``chosen`` and ``rejected``, texts or lists of messages; two documents | the answers |

A text is tokenised as a whole and never in parts, so its tokens are those that anybody else's pass over it gives. A
token has a loss if it holds a character that has one: where a prompt and its completion share a token, that token does,
and it is counted.

Already packed rows are cut at their boundaries, each sequence a document of its own; padding is taken off at either
end. All rows of a source have the columns of the first: a row that has one more or one less that matters is an error.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from nestsp.data.chat import ChatTemplate, Marked
from nestsp.data.corpus import Skipped
from nestsp.data.rows import Chunk, Row, Source, describe_json
from nestsp.data.tokenizer import Tokenizer, Tokens, token_dtype
from nestsp.errors import DataError

__all__ = ["Encoded", "Encoder", "Form", "make_encoder"]

S = TypeVar("S")
T = TypeVar("T")
Form = Literal["text", "tokens", "chat", "prompt_completion", "preference"]
Ints = npt.NDArray[np.int64]

_NEEDS: dict[Form, tuple[str, ...]] = {  # in the order in which auto looks for them
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "text": ("text",),
}
_ANSWERS: dict[Form, tuple[str, ...]] = {"prompt_completion": ("completion",), "preference": ("chosen", "rejected")}
_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_BOUNDARIES = ("seq_lens", "seq_lengths", "cu_seqlens", "position_ids")
_MAY_HAVE: dict[Form, tuple[str, ...]] = {
    "tokens": ("labels", "attention_mask", "weights", *_MASKS, *_BOUNDARIES),
    "chat": ("tools",),
    "prompt_completion": ("tools",),
    "preference": ("tools",),
    "text": (),
}
_IGNORED_LABEL = -100
_BATCH_TEXTS = 1024
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The documents of one chunk, end to end.

    Attributes:
        tokens: unsigned integers [num_tokens].
        lengths: int64 [num_documents].
        weights: Of each token as a target, [num_tokens]; None where all are 1.
        labels: Of each token's place, [num_tokens], where rows have labels of their own, else None.
        notes: What was done to rows, by what it is called.
        skipped: Files without a document, by reason.
    """

    tokens: Tokens
    lengths: Ints
    weights: npt.NDArray[Any] | None
    labels: Tokens | None
    notes: Counter[str]
    skipped: Counter[str]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns chunks into documents. Made by `make_encoder`.

    Attributes:
        form: What a row is.
        columns: Those that are read.
        ignored: Those of the first row that are not.
        tokenizer: For all but rows of tokens.
        template: For chats.
    """

    form: Form
    columns: tuple[str, ...]
    ignored: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None = field(repr=False)

    @property
    def token_type(self) -> np.dtype[Any]:
        """Of the token column: tokens that come from elsewhere may be of any vocabulary."""
        return np.dtype("<u4") if self.form == "tokens" else token_dtype(self.tokenizer.vocab_size)

    @property
    def weight_type(self) -> np.dtype[Any] | None:
        """Of the column of weights, or None where all are 1."""
        if "weights" in self.columns:
            return np.dtype("<f4")
        marked = self.form in ("chat", *_ANSWERS) or {"labels", *_MASKS} & set(self.columns)
        return np.dtype("u1") if marked else None

    @property
    def has_labels(self) -> bool:
        """Whether tokens have labels of their own."""
        return "labels" in self.columns

    def encode(self, chunk: Chunk) -> Encoded:
        """Read a chunk and make its documents.

        Raises:
            DataError: A row cannot be read, or is not of this form; names it.
        """
        skipped: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        parts: list[_Document] = []
        for batch in _batches(chunk.rows(), skipped):
            for number, row in batch:
                self._check(row, chunk, number)
            match self.form:
                case "text":
                    parts += self._texts(batch, chunk)
                case "tokens":
                    for number, row in batch:
                        parts += _at(chunk, number, lambda row: _token_documents(row, self.columns, notes), row)
                case "chat" | "prompt_completion" | "preference":
                    parts += self._marked(batch, chunk, notes)
        return self._joined(parts, notes, skipped)

    def _check(self, row: Row, chunk: Chunk, number: int) -> None:
        for name in self.columns:
            if name not in row:
                fields = _short(", ".join(map(repr, row)) or "no field at all")
                raise DataError(
                    f"{chunk.place(number)} has {fields}, but it needs the field '{name}'; rename or add it"
                )
        for name in _MAY_HAVE[self.form]:
            if name in row and name not in self.columns:
                raise DataError(
                    f"{chunk.place(number)} has '{name}', but the first row has none, so its meaning would be lost; "
                    "give it to all rows or to none"
                )

    def _texts(self, batch: Sequence[tuple[int, Row]], chunk: Chunk) -> Iterator[_Document]:
        texts = [_at(chunk, number, lambda row: _text(row, "text"), row) for number, row in batch]
        for tokens in self.tokenizer.encode_batch(texts):
            yield _Document(tokens)

    def _marked(self, batch: Sequence[tuple[int, Row]], chunk: Chunk, notes: Counter[str]) -> Iterator[_Document]:
        # Special tokens are added to plain texts, not to what a template wrote. Rows of both kinds come in runs.
        answers = _ANSWERS.get(self.form, ("",))
        for whole, run in itertools.groupby(batch, lambda item: self._is_plain(item[1])):
            marked = [_at(chunk, number, self._mark, (row, answer)) for number, row in run for answer in answers]
            texts, spans = [text for text, _ in marked], [spans for _, spans in marked]
            for tokens, mask, num_shared in self.tokenizer.encode_marked(texts, spans, whole=whole):
                notes["tokens with a loss that also hold characters without one"] += num_shared
                yield _Document(tokens, mask)

    def _is_plain(self, row: Row) -> bool:
        return self.form in _ANSWERS and isinstance(row["prompt"], str)

    def _mark(self, item: tuple[Row, str]) -> Marked:
        row, answer = item
        if self.form == "chat":
            assert self.template is not None
            return _unicode(self.template.chat(_messages(row, "messages"), row.get("tools")))
        if self._is_plain(row):
            prompt, completion = _text(row, "prompt"), _text(row, answer)
            spans = ((len(prompt), len(prompt) + len(completion)),) if completion else ()
            return prompt + completion, spans
        if self.template is None:
            raise ValueError(f"has {describe_json(row['prompt'])} as 'prompt', but {_NO_TEMPLATE}")
        prompt_turns, turns = _messages(row, "prompt"), _messages(row, answer)
        return _unicode(self.template.completion(prompt_turns, turns, row.get("tools")))

    def _joined(self, parts: Sequence[_Document], notes: Counter[str], skipped: Counter[str]) -> Encoded:
        tokens = _concatenated([part.tokens for part in parts], self.token_type)
        weights = labels = None
        if self.weight_type is not None:
            weights = _concatenated([part.weights for part in parts], self.weight_type)
        if self.has_labels:
            labels = _concatenated([part.labels for part in parts], self.token_type)
        lengths = np.array([part.tokens.size for part in parts], dtype=np.int64)
        return Encoded(tokens, lengths, weights, labels, +notes, skipped)


def make_encoder(source: Source, format: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> Encoder:
    """Tell the form of a source by its columns, unless it is given.

    Raises:
        DataError: The columns are of no form, or not of the given one, or chats have no template.
    """
    there = source.columns()
    forms = [form for form, needs in _NEEDS.items() if set(needs) <= set(there)]
    if format != "auto":
        forms = [form for form in forms if form == format]
    if not forms and there:
        known = "; ".join(f"{form}: {' and '.join(needs)}" for form, needs in _NEEDS.items())
        wanted = "a sample has those of one form" if format == "auto" else f"data.format is {format}"
        raise DataError(
            f"data.source {source.name} has the columns {_short(', '.join(there))}, but {wanted} ({known}); rename "
            "or add columns"
        )
    form: Form = forms[0] if forms else "text"  # a source without a row: the store says so
    columns = [*_NEEDS[form], *(name for name in _MAY_HAVE[form] if name in there)]
    marks = [name for name in ("weights", *_MASKS) if name in columns]
    if len(marks) > 1:
        raise DataError(
            f"data.source {source.name} has {' and '.join(marks)}, but one column says which tokens have a loss; "
            "leave one of them"
        )
    if form == "chat" and template is None:
        raise DataError(f"data.source {source.name} has chats, but {_NO_TEMPLATE}")
    ignored = tuple(name for name in there if name not in columns)
    return Encoder(form, tuple(columns), ignored, tokenizer, template)


_NO_TEMPLATE = "the tokenizer has no chat template; set data.chat_template to a file with one, or name a chat model's"


# --- Rows to documents: raise ValueError with the rest of a sentence whose subject is the row's place -----------------


@dataclass(frozen=True, slots=True, eq=False)
class _Document:
    tokens: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None = None
    labels: npt.NDArray[Any] | None = None


def _token_documents(row: Row, columns: Sequence[str], notes: Counter[str]) -> list[_Document]:
    """The documents of a row of tokens: one, or as many as its boundaries say."""
    ids = _column(row, "input_ids", "iu")
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise ValueError(f"has token {int(ids.min())}, but tokens are whole numbers from 0; mend it")
    values = {name: _column(row, name, "f" if name == "weights" else "iu") for name in columns if name in _PER_TOKEN}
    for name, column in values.items():
        if column.size != ids.size:
            raise ValueError(f"has {column.size} {name} for {ids.size} input_ids, but needs one for each; mend it")
    kept = slice(None)
    if "attention_mask" in values:
        kept = _without_pads(values["attention_mask"])
        notes["pads taken off"] += ids.size - ids[kept].size
    ids = ids[kept]
    values = {name: column[kept] for name, column in values.items()}
    weights, labels = _weights(values, ids), None
    if "labels" in values:
        labels = np.where(values["labels"] == _IGNORED_LABEL, ids, values["labels"])
    edges = _edges(row, columns, values, ids.size)
    notes["sequences cut out of packs"] += len(edges) - 1 if len(edges) > 2 else 0
    return [
        _Document(
            ids[start:stop],
            None if weights is None else weights[start:stop],
            None if labels is None else labels[start:stop],
        )
        for start, stop in itertools.pairwise(edges)
    ]


_PER_TOKEN = ("labels", "attention_mask", "weights", *_MASKS, "position_ids")


def _weights(values: dict[str, npt.NDArray[Any]], ids: Ints) -> npt.NDArray[Any] | None:
    marks = [values[name] for name in ("weights", *_MASKS) if name in values]
    for name in _MASKS:
        if name in values and not np.isin(values[name], (0, 1)).all():
            raise ValueError(f"has other numbers than 0 and 1 as '{name}', but it is a mask; name weights 'weights'")
    for column in marks:
        if not (np.isfinite(column).all() and (column >= 0).all()):
            raise ValueError("has a weight that is below 0 or not finite, but losses are divided by their sum; mend it")
    if "labels" not in values:
        return marks[0] if marks else None
    labels = values["labels"]
    if labels.size and not ((labels == _IGNORED_LABEL) | ((labels >= 0) & (labels < 1 << 32))).all():
        raise ValueError(f"has a label below 0 that is not {_IGNORED_LABEL}, but labels are tokens; mend it")
    there = labels != _IGNORED_LABEL
    return np.where(there, marks[0], 0) if marks else there


def _without_pads(mask: npt.NDArray[Any]) -> slice:
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(
            "has other numbers than 0 and 1 in 'attention_mask', but it tells tokens from pads; give the bounds of "
            "packed sequences as 'seq_lens'"
        )
    there = np.flatnonzero(mask)
    if not there.size:
        return slice(0, 0)
    first, stop = int(there[0]), int(there[-1]) + 1
    if stop - first != there.size:
        raise ValueError("has pads between tokens, but they can only be at either end; take them out")
    return slice(first, stop)


def _edges(row: Row, columns: Sequence[str], values: dict[str, npt.NDArray[Any]], num_tokens: int) -> list[int]:
    """Where the sequences of a row begin and end, pads apart."""
    found: dict[str, list[int]] = {}
    for name in columns:
        if name in ("seq_lens", "seq_lengths"):
            found[name] = [0, *np.cumsum(_column(row, name, "iu")).tolist()]
        elif name == "cu_seqlens":
            found[name] = _column(row, name, "iu").tolist()
        elif name == "position_ids":
            positions = values[name]
            starts = np.flatnonzero(positions == 0)
            expected = np.arange(num_tokens)
            if num_tokens and (not starts.size or starts[0] != 0):
                raise ValueError("has position_ids that do not begin at 0, but every sequence must; mend them")
            lengths = np.diff([*starts.tolist(), num_tokens])
            expected = expected - np.repeat(starts, lengths)
            if not np.array_equal(positions, expected):
                raise ValueError("has position_ids that do not count up by 1 from 0, but they must; mend them")
            found[name] = [*starts.tolist(), num_tokens]
    for name, edges in found.items():
        rises = all(start < stop for start, stop in itertools.pairwise(edges))
        if not num_tokens:
            edges = [0, 0]
        elif not edges or edges[0] != 0 or edges[-1] != num_tokens or not rises:
            raise ValueError(
                f"has {name} that do not cut its {num_tokens} tokens into sequences of at least one; mend them"
            )
        found[name] = edges
    if len({tuple(edges) for edges in found.values()}) > 1:
        raise ValueError(f"has {' and '.join(found)} that cut it differently, but they must agree; leave one of them")
    return next(iter(found.values()), [0, num_tokens])


def _column(row: Row, name: str, kinds: str) -> npt.NDArray[Any]:
    """A list of numbers as int64 or float64 [length]."""
    value = row[name]
    try:
        column = np.asarray(value)
    except (ValueError, OverflowError):  # of unequal lists
        column = np.empty((0, 0))
    if column.ndim == 1 and not column.size:
        column = column.astype(np.int64)
    if column.dtype.kind == "b" and name != "input_ids":
        column = column.astype(np.int64)
    if not isinstance(value, list | np.ndarray) or column.ndim != 1 or column.dtype.kind not in kinds + "iu":
        what = "numbers" if "f" in kinds else "whole numbers"
        given = f"a list of {column.ndim} levels" if column.ndim > 1 else describe_json(value)
        raise ValueError(f"has {given} as '{name}', but it must be one list of {what}; mend it")
    return column.astype(np.float64 if "f" in kinds else np.int64)


def _text(row: Row, name: str) -> str:
    text = row[name]
    if not isinstance(text, str):
        raise ValueError(f"has {describe_json(text)} as '{name}', but it must be a string; mend or remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half a surrogate pair in '{name}' at character {error.start}, but a text must be Unicode; mend or "
            "remove it"
        ) from None
    return text


def _messages(row: Row, name: str) -> list[dict[str, Any]]:
    messages = row[name]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"has {describe_json(messages)} as '{name}', but it must be a list of messages; mend it")
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"has no role in turn {turn} of '{name}', but every message needs one; mend it")
    return messages


def _unicode(marked: Marked) -> Marked:
    _text({"messages": marked[0]}, "messages")
    return marked


def _at(chunk: Chunk, number: int, make: Callable[[S], T], row: S) -> T:
    try:
        return make(row)
    except ValueError as error:
        raise DataError(f"{chunk.place(number)} {error}") from None


def _batches(items: Iterable[tuple[int, Row] | Skipped], skipped: Counter[str]) -> Iterator[list[tuple[int, Row]]]:
    """Cut rows into lists that are worth a tokenizer's call, yet small in memory; count those that are skipped."""
    batch: list[tuple[int, Row]] = []
    num_characters = 0
    for item in items:
        if isinstance(item, Skipped):
            skipped[item.reason] += 1
            continue
        batch.append(item)
        num_characters += sum(len(value) for value in item[1].values() if isinstance(value, str))
        if len(batch) >= _BATCH_TEXTS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _concatenated(parts: Sequence[npt.NDArray[Any] | None], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(part.astype(dtype, copy=False) for part in parts if part is not None)])


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
