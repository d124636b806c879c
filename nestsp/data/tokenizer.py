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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from nestsp.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import tokenizers

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "open_tokenizer", "token_dtype"]

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


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


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library. Made by `open_tokenizer`.

    Attributes:
        eos_id: The token appended to every text that does not already end with it, or None to append nothing.
    """

    name: str
    identity: str
    vocab_size: int
    eos_id: int | None
    backend: tokenizers.Tokenizer = field(repr=False, compare=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text; an empty text has none, not even special ones."""
        dtype = token_dtype(self.vocab_size)
        encoded = self.backend.encode_batch_fast([text for text in texts if text])
        rows = iter([np.array(encoding.ids, dtype=dtype) for encoding in encoded])
        return [self._ended(next(rows)) if text else np.empty(0, dtype) for text in texts]

    def _ended(self, tokens: Tokens) -> Tokens:
        if self.eos_id is None or (tokens.size and tokens[-1] == self.eos_id):
            return tokens
        return np.append(tokens, tokens.dtype.type(self.eos_id))


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
    settings = _json_object(folder / _FILES[2]) | _json_object(folder / _FILES[1])
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
