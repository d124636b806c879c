"""E19: every model in every kind of group is right, or raises the sentence that the docs print."""

from __future__ import annotations

import pytest

from nestsp.shape import FAMILIES
from tests.support.table import MODELS, PAGE, Row, fill, page

# Of the page as it is: the text behind each number of a refusal, and each model's line.
_TEXT = PAGE.read_text(encoding="utf-8")
_LINES = _TEXT.splitlines()


def printed(name: str) -> list[str]:
    """The cells that the page has for a model, sentences in the place of their numbers."""
    (line,) = (line for line in _LINES if line.startswith(f"| {name} |"))
    sentences = dict(line.split(". ", 1) for line in _LINES if line.split(". ")[0].isdecimal())
    cells = [cell.strip() for cell in line.strip("|").split("|")[2:]]
    return [cell if cell == "right" else sentences[cell.removeprefix("refused (").removesuffix(")")] for cell in cells]


@pytest.mark.parametrize("name", MODELS)
def test_E19_a_model_is_right_or_refused_as_the_docs_say(name: str) -> None:
    """E3, E4, E6, E17, D8 among the rows."""
    row = fill(name)
    assert list(row.cells) == printed(name), "if this is meant: python -m tests.support.table, and read the difference"
    assert f"| {name} | {', '.join(row.features)} |" in _TEXT


def test_the_page_has_exactly_these_models_and_no_other_text() -> None:
    rows = {}
    for name in MODELS:
        (line,) = (line for line in _LINES if line.startswith(f"| {name} |"))
        rows[name] = Row((line.strip("|").split("|")[1].strip(),), tuple(printed(name)))
    assert page(rows) == _TEXT


def test_every_family_with_exact_sizes_is_in_the_table() -> None:
    assert FAMILIES.keys() <= {config["model_type"] for config in MODELS.values()}
