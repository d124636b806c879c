"""Plans are as they were when somebody last read them."""

from __future__ import annotations

import json

import pytest

from nestsp.plan import Plan
from tests.golden.cases import CASES, FOLDER, reviewed, to_text


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_as_it_was_reviewed(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    kept = json.loads(text)
    made = reviewed(name)
    assert made["drawing"] == kept["drawing"], "if this is meant: python -m tests.golden.cases, and read the difference"
    assert made == kept
    assert to_text(made) + "\n" == text
    assert Plan.from_json(kept["plan"]).digest == kept["digest"]


def test_every_kept_file_belongs_to_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)
