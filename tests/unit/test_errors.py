from __future__ import annotations

import pytest

from nestsp import errors
from nestsp.errors import NestspError, did_you_mean


def test_every_error_that_a_user_can_cause_is_a_nestsp_error_and_in_the_drawn_tree() -> None:
    kinds = {name for name in errors.__all__ if name.endswith("Error")}
    assert all(issubclass(getattr(errors, name), NestspError) for name in kinds)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in kinds)
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == kinds


@pytest.mark.parametrize(
    ("word", "hint"),
    [("stepz", "; did you mean 'steps'?"), ("steps", "; did you mean 'steps'?"), ("qqq", ""), ("", "")],
)
def test_a_hint_is_given_only_for_a_near_word(word: str, hint: str) -> None:
    assert did_you_mean(word, ("epochs", "steps", "seed")) == hint


def test_a_hint_is_of_the_nearest_word() -> None:
    assert did_you_mean("epoch", ["epochs", "epochal"]) == "; did you mean 'epochs'?"
    assert did_you_mean("epochs", iter(["epoch", "epochs"])) == "; did you mean 'epochs'?"
