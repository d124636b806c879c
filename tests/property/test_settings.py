"""Settings survive being written and read, whatever their texts look like."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nestsp.config import parse_config, to_yaml
from nestsp.errors import ConfigError

BASE: dict[str, Any] = {
    "model": {"config": "m"},
    "data": {"tokens_per_step": 8},
    "planner": {"max_tokens_per_rank": 4},
    "train": {"steps": 3},
}
_TRAPS = st.sampled_from(
    [
        "1e3",
        "1E-3",
        "12",
        "1_0",
        "0x1f",
        "null",
        "~",
        "yes",
        "1:30",
        "2024-01-05",
        "=",
        "<<",
        "",
        " x ",
        "\x85",
        "a\nb",
        "\u2028",
        "é 中",
    ]
)
_TEXT = _TRAPS | st.text(st.characters(codec="utf-8"), max_size=12)
_NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(["1e3", "5E-1", "12", "null", "no", "1_0", "0x1f", "a.b-c", "2024-01-05"])
    | st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z"),
    _TEXT,
    _TEXT | st.dictionaries(_TEXT, _JSON, max_size=3),
    st.none() | st.lists(st.integers(2, 9), max_size=4),
    st.floats(1e-12, 1e12),
)
def test_settings_are_equal_after_yaml(name: str, source: str, model: Any, tree: Any, rate: float) -> None:
    config = parse_config(
        to_yaml_text(
            {
                **BASE,
                "name": name,
                "model": {"config": model},
                "data": {**BASE["data"], "source": source},
                "cluster": {"tree": tree},
                "train": {**BASE["train"], "learning_rate": rate},
            }
        )
    )
    assert (config.name, config.data.source, config.model.config) == (name, source, model)
    assert config.train.learning_rate == rate
    assert parse_config(to_yaml(config)) == config


def to_yaml_text(data: dict[str, Any]) -> str:
    """The data as JSON, which is YAML too: independent of how nestsp writes YAML."""
    return json.dumps(data)


def _sentences(*attempts: tuple[str, list[str]]) -> list[str]:
    """What is said against each text and its overrides; nothing for those that are settings."""
    sentences = []
    for text, overrides in attempts:
        try:
            parse_config(text, overrides)
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


_YAML_LIKE = st.text(alphabet="{}[]:,-&*!|>'\"%@ \n\tab1e.~?#=", max_size=40)


@given(st.text(max_size=40) | _YAML_LIKE)
def test_any_text_is_settings_or_one_sentence(text: str) -> None:
    assert all("\n" not in sentence for sentence in _sentences((text, [])))


@given(_YAML_LIKE, st.sampled_from(["train.steps", "name", "model.config.x", "cluster.tree"]))
def test_any_override_is_a_setting_or_one_sentence(value: str, key: str) -> None:
    base = to_yaml_text(BASE)
    assert all("\n" not in sentence for sentence in _sentences((base, [value]), (base, [f"{key}={value}"])))
