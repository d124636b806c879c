"""When a layer's pass begins and its turns are taken, the next layer's gather is issued once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nestsp.attention.gathers import Gathers
from nestsp.schedule import Pass


def run(gathers: Gathers, layer: int, which: Pass, num_turns: int) -> None:
    for taken in range(1, num_turns + 1):
        gathers.took(layer, which, taken)


@pytest.mark.parametrize("before", [0, 1, 3])
def test_every_layer_but_the_last_of_a_pass_gathers_the_next_one_once(before: int) -> None:
    issued: list[tuple[int, int]] = []
    now = 0
    gathers = Gathers({Pass.FORWARD: before, Pass.BACKWARD: before}, 3, lambda layer: issued.append((now, layer)))
    for which, layers in ((Pass.FORWARD, (0, 1, 2)), (Pass.BACKWARD, (2, 1, 0))):
        issued.clear()
        for now in layers:
            gathers.begin(now, which)
            if which is Pass.BACKWARD:  # its recompute comes first
                gathers.begin(now, Pass.FORWARD)
                run(gathers, now, Pass.FORWARD, 4)  # what kept nothing repeats the forward pass
                run(gathers, now, Pass.RECOMPUTE, 4)
            assert (now in [at for at, _ in issued]) == (before == 0 and now != layers[-1])
            run(gathers, now, which, 4)
        assert issued == list(pairwise(layers))


def test_a_layer_that_announces_no_pass_gathers_nothing_ahead() -> None:
    issued: list[int] = []
    gathers = Gathers({Pass.FORWARD: 1, Pass.BACKWARD: 1}, 3, issued.append)
    run(gathers, 0, Pass.FORWARD, 4)
    run(gathers, 1, Pass.BACKWARD, 4)
    assert issued == []


def test_another_run_gathers_anew() -> None:
    issued: list[int] = []
    gathers = Gathers({Pass.FORWARD: 0, Pass.BACKWARD: 0}, 2, issued.append)
    for _ in range(2):
        gathers.begin(0, Pass.FORWARD)
        gathers.begin(0, Pass.FORWARD)
        gathers.clear()
    assert issued == [1, 1]
