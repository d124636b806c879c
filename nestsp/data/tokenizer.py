"""Texts to token numbers: one token a byte, or a Hugging Face tokenizer.

A Hugging Face tokenizer is read from its ``tokenizer.json`` by the `tokenizers` library alone, in milliseconds and
without torch; Transformers' AutoTokenizer would import torch (2.5 s). What that file says is what happens:

- Special tokens around a text are those of its own post-processor. ``add_bos_token`` and ``add_eos_token`` in
  ``tokenizer_config.json`` do not count beside it, as in Transformers 5.
- Truncation and padding that happen to be saved in it are switched off: they would change lengths in silence.
- The end-of-text token is the ``eos_token`` of ``tokenizer_config.json``, else of ``special_tokens_map.json``.
- An empty text has no tokens at all.

Special tokens that are spelled out in a text become those tokens, as everywhere with these tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nestsp.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "MarkedTokens",
    "Mask",
    "Span",
    "Tokenizer",
    "Tokens",
    "open_tokenizer",
    "token_dtype",
    "tokenizer_files",
]

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]
"""Characters start to stop - 1 of a text."""

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class MarkedTokens(NamedTuple):
    """A text's tokens, and which of them hold a character of its spans.

    Attributes:
        tokens: unsigned integers [num_tokens].
        mask: bool [num_tokens].
        num_shared: Tokens that also hold a character outside the spans.
    """

    tokens: Tokens
    mask: Mask
    num_shared: int


class Tokenizer(Protocol):
    """What a token store needs of a tokenizer."""

    @property
    def name(self) -> str:
        """What the user named."""

    @property
    def identity(self) -> str:
        """Hex digest of all that shapes the tokens."""

    @property
    def vocab_size(self) -> int:
        """The highest token number, plus one."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends every text, or None if nothing does."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, as `token_dtype` of the vocabulary. An empty text has none."""

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], *, whole: bool
    ) -> list[MarkedTokens]:
        """The tokens of each text, and which of them hold a character of its spans.

        Args:
            texts: Texts.
            spans: Of each text; ascending.
            whole: Whether the texts are treated as `encode_batch` does, with special tokens around them; those after a
                text are as its last token. Else they are taken as they are: a chat template has written all of it.
        """


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token for each byte of a text's UTF-8. No special tokens, so nothing ends a text."""

    name: str = "bytes"
    identity: str = hashlib.sha256(b"bytes").hexdigest()
    vocab_size: int = 256
    eos_id: int | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text, as uint8."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], *, whole: bool
    ) -> list[MarkedTokens]:
        """The bytes of each text, and which are of its spans; see `Tokenizer`."""
        encoded = []
        for text, marked, tokens in zip(texts, spans, self.encode_batch(texts), strict=True):
            mask = np.zeros(tokens.size, dtype=np.bool_)
            for start, stop in marked:
                first = len(text[:start].encode("utf-8"))
                mask[first : first + len(text[start:stop].encode("utf-8"))] = True
            encoded.append(MarkedTokens(tokens, mask, 0))
        return encoded


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library. Made by `open_tokenizer`.

    Attributes:
        eos_id: The token appended to every text that does not already end with it, or None to append nothing.
        backend: With its post-processor, which adds special tokens.
    """

    name: str
    identity: str
    vocab_size: int
    eos_id: int | None
    backend: tokenizers.Tokenizer = field(repr=False, compare=False)
    # A copy of the backend once `bare` was asked for: a memo, not state. It costs as long as reading the file.
    _memo: list[tokenizers.Tokenizer] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def bare(self) -> tokenizers.Tokenizer:
        """Without post-processor, so that offsets are those of whole tokens: post-processors cut spaces off them."""
        if not self._memo:
            import tokenizers

            bare = tokenizers.Tokenizer.from_str(self.backend.to_str())
            bare.post_processor = None
            self._memo.append(bare)
        return self._memo[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text; an empty text has none, not even special ones."""
        dtype = token_dtype(self.vocab_size)
        encoded = self.backend.encode_batch_fast([text for text in texts if text])
        rows = iter([np.array(encoding.ids, dtype=dtype) for encoding in encoded])
        return [self._ended(next(rows)) if text else np.empty(0, dtype) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], *, whole: bool
    ) -> list[MarkedTokens]:
        """The tokens of each text, and which hold a character of its spans; see `Tokenizer`."""
        dtype = token_dtype(self.vocab_size)
        bare = self.bare.encode_batch(list(texts), add_special_tokens=False)
        encoded = []
        for text, marked, encoding in zip(texts, spans, bare, strict=True):
            tokens = np.array(encoding.ids, dtype=dtype)
            mask, num_shared = _holds(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2), marked)
            if whole and text:
                full = self.backend.post_process(encoding, None, True)
                own = np.flatnonzero(np.array(full.special_tokens_mask, dtype=np.int64) == 0)
                tokens = self._ended(np.array(full.ids, dtype=dtype))
                first, stop = (int(own[0]), int(own[-1]) + 1) if own.size else (0, 0)
                assert stop - first == mask.size, "a post-processor puts special tokens before and after a text only"
                last = np.full(tokens.size - stop, bool(mask.size and mask[-1]))
                mask = np.concatenate([np.zeros(first, dtype=np.bool_), mask, last])
            encoded.append(MarkedTokens(tokens, mask, num_shared))
        return encoded

    def _ended(self, tokens: Tokens) -> Tokens:
        if self.eos_id is None or (tokens.size and tokens[-1] == self.eos_id):
            return tokens
        return np.append(tokens, tokens.dtype.type(self.eos_id))


def _holds(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> tuple[Mask, int]:
    """Which tokens hold a character of a span, and how many of them another one too.

    A token without characters is taken to hold the next one.
    """
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    mask = np.zeros(len(offsets), dtype=np.bool_)
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for start, stop in spans:
        mask |= (starts < stop) & (stops > start)
        inside |= (starts >= start) & (stops <= stop)
    return mask, int(np.count_nonzero(mask & ~inside))


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest unsigned integer, little-endian, that holds every token.

    >>> [token_dtype(size).name for size in (256, 257, 65_536, 151_936)]
    ['uint8', 'uint16', 'uint16', 'uint32']
    """
    if vocab_size <= 1 << 8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def open_tokenizer(name: str, *, append_eos: bool = True) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: ``"bytes"``; or a folder with a ``tokenizer.json``; or a name on the Hugging Face Hub, looked up in the
            local cache first and on the network only if it is not there.
        append_eos: End every text with the tokenizer's end-of-text token, if it has one.

    Raises:
        DataError: There is no such tokenizer, or it cannot be read.
    """
    if name == "bytes":
        return ByteTokenizer()
    import tokenizers

    folder = _tokenizer_folder(name)
    path = folder / _FILES[0]
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"the tokenizer {name} has a {_FILES[0]} that cannot be read ({error}), but it must be one of the "
            f"tokenizers library; save it again with save_pretrained"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    settings = _settings(folder)
    eos = _special_token(name, backend, settings, "eos_token") if append_eos else None
    eos_id = eos[1] if eos else None
    # The library's version counts: what the same file means is the library's business.
    shape = [backend.to_str(), eos_id, tokenizers.__version__]
    return HuggingFaceTokenizer(
        name=name,
        identity=hashlib.sha256(json.dumps(shape).encode()).hexdigest(),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1,
        eos_id=eos_id,
        backend=backend,
    )


def tokenizer_files(name: str) -> tuple[dict[str, Any], str | None]:
    """What a tokenizer's folder says besides its tokens.

    Args:
        name: As in `open_tokenizer`.

    Returns:
        The settings of ``tokenizer_config.json`` and, below them, ``special_tokens_map.json``; and the text of
        ``chat_template.jinja``, if there is one. Nothing for bytes.

    Raises:
        DataError: There is no such tokenizer, or a file cannot be read.
    """
    if name == "bytes":
        return {}, None
    folder = _tokenizer_folder(name)
    path = folder / _FILES[3]
    try:
        template = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the file {path} cannot be read: {error}; save the tokenizer again") from None
    return _settings(folder), template


def _settings(folder: Path) -> dict[str, Any]:
    return _json_object(folder / _FILES[2]) | _json_object(folder / _FILES[1])


def _tokenizer_folder(name: str) -> Path:
    path = Path(name).expanduser()
    if name and path.is_dir():
        if (path / _FILES[0]).is_file():
            return path
        raise DataError(
            f"data.tokenizer is the folder {name}, but it has no {_FILES[0]}; "
            "load it with Transformers' AutoTokenizer and save it there with save_pretrained"
        )
    if name and path.is_file():
        raise DataError(f"data.tokenizer is the file {name}, but it must be a folder; give {path.parent}")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"data.tokenizer is '{name}', but there is no such folder; give 'bytes', a folder or a Hub name"
        )
    return _hub_folder(name)


def _hub_folder(name: str) -> Path:
    import huggingface_hub

    problem = "it has no tokenizer.json"
    for local_files_only in (True, False):
        try:
            folder = Path(
                huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES), local_files_only=local_files_only)
            )
        except Exception as error:  # of several libraries: hub, HTTP client, operating system
            problem = type(error).__name__
            continue
        if (folder / _FILES[0]).is_file():
            return folder
    raise DataError(
        f"data.tokenizer is '{name}', but there is no such folder, and the Hugging Face Hub and its local cache "
        f"do not give it ({problem}){did_you_mean(name, ['bytes']) or '; download it first and give its folder'}"
    )


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"the file {path} cannot be read: {error}; save the tokenizer again") from None
    if not isinstance(content, dict):
        raise DataError(
            f"the file {path} is {type(content).__name__}, but it must be an object; save the tokenizer again"
        )
    return content


def _special_token(
    name: str, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], key: str
) -> tuple[str, int] | None:
    """A special token and its number, or None if the settings name none."""
    value = settings.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if token is None:
        return None
    number = backend.token_to_id(token) if isinstance(token, str) else None
    if number is None:
        raise DataError(
            f"the tokenizer {name} has {token!r} as its {key}, but its {_FILES[0]} has no such token; "
            "save it again with save_pretrained"
        )
    return token, number
