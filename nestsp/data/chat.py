"""Chats to text and back to who said what: the tokenizer's chat template, and which characters the model is to learn.

A template is rendered by Jinja in its sandbox, as Transformers renders it. What has a loss is found in one of two ways:

- A template with ``{% generation %}`` marks says it itself.
- Of any other, an assistant's turn is what the template writes between the text that asks for it (the turns before,
  with ``add_generation_prompt``) and the text that ends with it. That both are beginnings of the whole chat's text is
  checked for every turn; a template that writes a turn otherwise once others follow (as some do with thoughts) is
  refused for that chat, because there is no exact answer. Price: two renderings for each assistant's turn.

``strftime_now`` is not there: with it tomorrow's tokens would not be today's. Templates that look whether it is there
write a fixed date.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nestsp.data.tokenizer import tokenizer_files
from nestsp.errors import DataError

__all__ = ["ChatTemplate", "Marked", "open_template"]

Marked = tuple[str, tuple[tuple[int, int], ...]]
"""A text, and the ranges of characters (start, stop) that have a loss: ascending, none empty."""

# Private characters that stand where generation begins and ends while a text is rendered.
_BEGIN, _END = "\uf8f2", "\uf8f3"
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """A compiled chat template.

    Args:
        name: What the user calls it.
        text: Its Jinja source.
        tokens: Special tokens by name, such as ``bos_token``, for the template to write.

    Raises:
        DataError: It is no Jinja.
    """

    def __init__(self, name: str, text: str, tokens: Mapping[str, str]) -> None:
        self.name, self.text, self.tokens = name, text, dict(tokens)
        self.has_marks = _MARK.search(text) is not None
        try:
            self._plain = _environment("", "").from_string(text)
            self._marked = _environment(_BEGIN, _END).from_string(text)
        except jinja2.TemplateError as error:
            raise DataError(f"{name} is no Jinja template ({_short(error)}), but it must be; mend it") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.name, self.text, self.tokens)

    @property
    def identity(self) -> str:
        """Hex digest of all that shapes a chat's text."""
        shape = [self.text, sorted(self.tokens.items()), jinja2.__version__]
        return hashlib.sha256(json.dumps(shape).encode()).hexdigest()

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Marked:
        """The text of a chat; every assistant's turn has a loss.

        Raises:
            ValueError: Half a sentence that says what is wrong with these messages.
        """
        text = self._render(self._plain, messages, tools)
        if self.has_marks:
            return text, self._spans(text, self._render(self._marked, messages, tools))
        spans = []
        for turn, message in enumerate(messages):
            if message.get("role") == "assistant":
                start = len(self._beginning(text, messages[:turn], tools, f"turn {turn}", asks=True))
                stop = len(self._beginning(text, messages[: turn + 1], tools, f"turn {turn}", asks=False))
                spans.append((start, stop))
        return text, _joined(spans)

    def completion(
        self, prompt: Sequence[Mapping[str, Any]], completion: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> Marked:
        """The text of a chat of which all turns after the prompt's have a loss.

        Raises:
            ValueError: As `chat`.
        """
        text = self._render(self._plain, [*prompt, *completion], tools)
        start = len(self._beginning(text, prompt, tools, "the completion", asks=True))
        return text, _joined([(start, len(text))])

    def _beginning(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any, turn: str, *, asks: bool) -> str:
        part = self._render(self._plain, messages, tools, add_generation_prompt=asks)
        if not text.startswith(part):
            raise ValueError(
                f"is a chat in which {turn} is written otherwise by {self.name} when it stands last than when more "
                "follows, but only then is it known which tokens have a loss; put {% generation %} marks into a "
                "template of your own (data.chat_template), or cut the chat after that turn"
            )
        return part

    def _spans(self, text: str, marked: str) -> tuple[tuple[int, int], ...]:
        pieces = re.split(f"([{_BEGIN}{_END}])", marked)
        if "".join(pieces[::2]) != text or "".join(pieces[1::2]) != (_BEGIN + _END) * (len(pieces) // 4):
            raise ValueError(
                f"is a chat in which {self.name} works on the text between its generation marks, but its characters "
                "must stay as they are; move the marks outwards"
            )
        spans, place = [], 0
        for number, piece in enumerate(pieces[::2]):
            if number % 2:
                spans.append((place, place + len(piece)))
            place += len(piece)
        return _joined(spans)

    def _render(
        self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], tools: Any, **options: bool
    ) -> str:
        values = {"messages": [_as_read(message) for message in messages], "tools": list(tools or ())}
        options = {"add_generation_prompt": False, **options}
        try:
            return template.render(**values, documents=None, **options, **self.tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"is a chat that {self.name} does not take ({_short(error)}); mend the messages, or give another "
                "data.chat_template"
            ) from None


def open_template(path: str | None, tokenizer: str) -> ChatTemplate | None:
    """A template of the user's own, or else the tokenizer's, or None if it has none.

    Args:
        path: Of a file with a Jinja template, or None.
        tokenizer: As in `nestsp.data.tokenizer.open_tokenizer`.

    Raises:
        DataError: A file cannot be read, or the template is no Jinja.
    """
    settings, in_file = tokenizer_files(tokenizer)
    tokens = {key: token for key in settings if key.endswith("_token") and (token := _content(settings[key]))}
    if path is not None:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.chat_template is {path}, but it cannot be read ({_short(error)}); give a file with a Jinja "
                "template"
            ) from None
        return ChatTemplate(f"the chat template {path}", text, tokens)
    own: Any = settings.get("chat_template") if in_file is None else in_file
    if isinstance(own, list):  # several by name
        own = next((entry.get("template") for entry in own if entry.get("name") == "default"), None)
    return ChatTemplate(f"the chat template of {tokenizer}", own, tokens) if isinstance(own, str) else None


def _environment(begin: str, end: str) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _to_json
    environment.extend(generation_marks=(begin, end))
    return environment


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: puts the environment's marks around what it holds."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.generation_marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Transformers has it: no HTML escapes, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: nulls left out, which columnar files are full of; thoughts under both names.

    Source: Transformers 5.24 does the same.
    """
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = next((given[key] for key in ("reasoning_content", "thinking", "reasoning") if key in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in spans if start < stop)


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
