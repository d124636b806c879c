"""Where a microbatch's layers gather the parameters of the next layer, among the exchanges of their attention.

A gather is a collective of all ranks, so it has a place in the one order of exchanges that all ranks follow; the
Schedule says after how many of its turns a rank has come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nestsp.schedule import Pass

__all__ = ["Gathers"]


class Gathers:
    """Issues every gather of one run of a microbatch once, and none in a recompute.

    A layer announces each pass when it begins; where nobody announces, nothing is issued, and every layer gathers its
    own parameters when it needs them.

    Args:
        turns_before: For the forward and the backward pass, how many turns of a layer's attention are taken before the
            next layer's parameters are gathered.
        num_layers: Of the model.
        issue: Begins to gather the parameters of the layer of a number.
    """

    def __init__(self, turns_before: Mapping[Pass, int], num_layers: int, issue: Callable[[int], None]) -> None:
        self._turns_before, self._num_layers, self._issue = turns_before, num_layers, issue
        self._is_due: dict[tuple[Pass, int], bool] = {}

    def clear(self) -> None:
        """Forget what was issued: another run of the microbatch begins."""
        self._is_due.clear()

    def begin(self, layer: int, which: Pass) -> None:
        """A layer's pass begins; a second time is its recompute, and means nothing."""
        if (which, layer) not in self._is_due:
            self._is_due[which, layer] = True
            self.took(layer, which, 0)

    def took(self, layer: int, which: Pass, num_turns: int) -> None:
        """This rank has taken so many turns of a layer's attention."""
        if self._is_due.get((which, layer)) and num_turns == self._turns_before[which]:
            self._is_due[which, layer] = False
            following = layer + 1 if which is Pass.FORWARD else layer - 1
            if 0 <= following < self._num_layers:
                self._issue(following)
