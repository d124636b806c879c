"""Chats: the text is Transformers' own, and exactly the assistant's characters have a loss."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from nestsp.data.chat import ChatTemplate, open_template
from nestsp.errors import DataError
from tests.unit.data.chats import CHAT, CHATML, FORGETFUL, MARKED, STRICT, TOOLS, save_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def _template(text: str) -> ChatTemplate:
    return ChatTemplate("the chat template", text, TOKENS)


def _learned(text: str, messages: list[dict[str, Any]] = CHAT) -> list[str]:
    rendered, spans = _template(text).chat(messages)
    return [rendered[start:stop] for start, stop in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL, TOOLS], ids=["chatml", "marked", "forgetful", "tools"])
@pytest.mark.parametrize("num_turns", [3, 5])
@pytest.mark.parametrize("in_file", [False, True])
def test_the_text_is_that_of_transformers(tmp_path: Path, template: str, num_turns: int, in_file: bool) -> None:
    folder = str(save_tokenizer(tmp_path, template, in_file=in_file))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_template(None, folder)
    assert ours is not None
    call = {"role": "user", "content": None, "tool_calls": [{"name": "<é>", "n": 1}]}
    messages: list[dict[str, Any]] = [*CHAT[:num_turns], *([call] if template is TOOLS else [])]
    if template is FORGETFUL:
        messages = CHAT[:3]
    tools = [{"type": "function", "function": {"name": "f", "description": "<&>"}}] if template is TOOLS else None
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ours.chat(messages, tools)[0] == expected


def test_a_turn_is_what_follows_the_text_that_asks_for_it() -> None:
    assert _learned(CHATML) == [" Fine,  thanks. 😀<|im_end|>\n", "Still fine.\n<|im_end|>\n"]
    assert _learned(CHATML, CHAT[:2]) == []
    assert _learned(CHATML, [CHAT[4], CHAT[1]]) == ["Still fine.\n<|im_end|>\n"]  # the assistant may begin


def test_generation_marks_say_what_has_a_loss() -> None:
    assert _learned(MARKED) == [" Fine,  thanks. 😀<|im_end|>", "Still fine.\n<|im_end|>"]
    assert "generation" not in _template(MARKED).chat(CHAT)[0]


def test_marks_agree_with_those_of_transformers(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path, MARKED))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    out = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    text, spans = _template(MARKED).chat(CHAT)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == out["input_ids"]
    learned = tokenizer.decode([i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m])
    assert learned == "".join(text[start:stop] for start, stop in spans)


def test_a_template_that_rewrites_turns_is_refused_for_chats_of_which_it_rewrites_one() -> None:
    assert _learned(FORGETFUL, CHAT[:3]) == [" Fine,  thanks. 😀<|im_end|>\n"]
    thoughtful = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>hm</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert _learned(FORGETFUL, thoughtful[:2]) == ["<think>hm</think>b<|im_end|>\n"]
    with pytest.raises(ValueError, match=r"turn 1 is written otherwise by the chat template when it stands last"):
        _template(FORGETFUL).chat(thoughtful)


def test_marks_that_the_template_works_on_are_refused() -> None:
    swallowed = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | length }}"
    with pytest.raises(ValueError, match="works on the text between its generation marks"):
        _template(swallowed).chat(CHAT)


def test_messages_that_a_template_refuses_are_refused_with_its_words() -> None:
    with pytest.raises(ValueError, match=r"is a chat that the chat template does not take \(roles must alternate\)"):
        _template(STRICT).chat(CHAT)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_runs_in_a_sandbox(attack: str) -> None:
    with pytest.raises(ValueError, match="unsafe"):
        _template(attack).chat(CHAT)


def test_a_date_is_not_given_since_tomorrows_tokens_would_not_be_todays() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}a day{% endif %}"
    assert _template(dated).chat(CHAT[:1])[0] == "a day"
    with pytest.raises(ValueError, match="'strftime_now' is undefined"):
        _template("{{ strftime_now('%d') }}").chat(CHAT)


def test_a_completion_is_all_after_the_prompt() -> None:
    text, spans = _template(CHATML).completion(CHAT[:2], CHAT[2:])
    assert [text[start:stop] for start, stop in spans] == [text[text.index(" Fine") :]]


def test_a_template_of_ones_own_counts_before_the_tokenizers(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", MARKED))
    (tmp_path / "own.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    own = open_template(str(tmp_path / "own.jinja"), folder)
    assert own is not None
    assert own.chat(CHAT)[0] == "<s>Be brief."
    theirs = open_template(None, folder)
    assert theirs is not None
    assert len({own.identity, theirs.identity, ChatTemplate("x", own.text, {}).identity}) == 3
    assert pickle.loads(pickle.dumps(own)).chat(CHAT) == own.chat(CHAT)


def test_a_named_list_of_templates_gives_its_default(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text('{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}')
    found = open_template(None, str(folder))
    assert found is not None
    assert found.text == "d"


def test_bytes_have_no_template(tmp_path: Path) -> None:
    assert open_template(None, "bytes") is None
    assert open_template(None, str(save_tokenizer(tmp_path))) is None


def test_a_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.chat_template is .*none\.jinja, but it cannot be read"):
        open_template(str(tmp_path / "none.jinja"), "bytes")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match=re.escape("bad.jinja is no Jinja template (")):
        open_template(str(tmp_path / "bad.jinja"), "bytes")
