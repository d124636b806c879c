from __future__ import annotations

import time

import pytest

from nestsp.train.console import Screen


def test_without_a_terminal_long_work_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Screen().progress("tokenising", None, lines=True) as bar:
        for done, total in ((1, 8), (2, 8), (3, None), (4, None)):
            now += 20.0
            bar.set(done, total)
    assert capsys.readouterr().out.split("\n") == ["tokenising: 12%", "tokenising: 3", ""]
