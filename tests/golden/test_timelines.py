"""What plans cost, and what the costed planners make, is as it was when somebody last read it."""

from __future__ import annotations

import json

import pytest

from nestsp.plan import Plan
from tests.golden.timelines import BY_HAND, CASES, FOLDER, reviewed

MEANT = "if this is meant: python -m tests.golden.timelines, and read the difference"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_and_its_timeline_are_as_they_were_reviewed(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    made = reviewed(name)
    for key in ("drawing", "ranks", "events"):
        assert made.get(key) == kept.get(key), MEANT
    assert made == kept, MEANT
    assert Plan.from_json(kept["plan"]).digest == kept["digest"]
    assert kept["makespan_ms"] >= kept["bound_ms"] >= kept["ideal_ms"]


@pytest.mark.parametrize("name", BY_HAND)
def test_no_stream_of_a_rank_does_two_things_at_once(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    ends: dict[str, int] = {}
    for line in kept["events"]:
        words = line[:19]
        start, _, end = line[19:].split()[:3]
        assert int(start) >= ends.get(words, 0) - 1, line  # rounded to whole µs
        ends[words] = int(end)


def test_every_kept_timeline_belongs_to_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)
