"""A checkpoint that means nothing under this run's settings is refused by the setting that makes it so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError
from nestsp.train.manifest import Progress
from nestsp.train.resume import lasting_settings, refuse_other_settings
from tests.e2e.runs import tiny

PREPARED: Any = SimpleNamespace(num_steps=9)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "data.seed=1",
            "step-000003 was saved with data.seed = 1, but this run has 0, so its place in the data means nothing "
            "here; set it back, or begin a new run without --resume",
        ),
        (
            "train.lora={rank: 2, targets: [q_proj]}",
            "so its weights and their optimizer's state fit nothing here; set it back",
        ),
    ],
)
def test_a_setting_that_must_last_is_named_with_what_it_gives_its_meaning(override: str, sentence: str) -> None:
    start = Progress(3, DataState(), lasting_settings(tiny(override)))
    with pytest.raises(CheckpointError) as caught:
        refuse_other_settings(Path("step-000003"), start, tiny(), PREPARED)
    assert sentence in str(caught.value)


def test_all_else_may_change_until_the_last_step() -> None:
    settings = lasting_settings(tiny())
    refuse_other_settings(Path("step-000003"), Progress(3, DataState(), settings), tiny("train.seed=4"), PREPARED)
    with pytest.raises(CheckpointError, match=r"is at step 9, but the run ends at step 9; raise train\.steps to go on"):
        refuse_other_settings(Path("step-000009"), Progress(9, DataState(), settings), tiny(), PREPARED)
