"""The order in which a rank's groups take their turns in one layer's attention.

A group's attention is a chain of phases joined by exchanges: exchange in, compute, exchange out. A group's *turn* runs
it from where it waits to the next exchange it issues, so with k exchanges it takes k + 1 turns. Turns of all groups on
a rank's path are ordered by the key (number of the turn, position of the group's level in the plan's level order):
while one group's exchange is on the wire, another group computes.

Every rank issues in increasing key and skips the groups it does not have, so all ranks follow one total order and no
set of groups can deadlock. The order is never chosen by readiness, which differs between ranks. A group of one rank
exchanges nothing; its one turn comes after all first turns, where it fills the first gap.

The simulator and the executor both read these turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nestsp.plan import Placement, Plan

__all__ = ["Pass", "Schedule", "Turn", "make_schedule", "num_exchanges"]


class Pass(Enum):
    """Which time a layer's attention runs."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Turn:
    """One group's turn.

    Attributes:
        level: The group's level; with the rank it names the group.
        number: 0 for the group's first turn. Turn n ends the wait for exchange n - 1 and issues exchange n.
        opens: The turn belongs to the first of the layer's two autograd nodes in the pass, the one that leaves with
            exchanges on the wire; all others belong to the second.
    """

    level: int
    number: int
    opens: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """The turns of every rank, microbatch and pass of a plan."""

    plan: Plan

    def turns(self, microbatch: int, rank: int, which: Pass) -> tuple[Turn, ...]:
        """The turns of one rank in one layer, in the order in which they are taken."""
        order = {level: position for position, level in enumerate(self.plan.level_order)}
        last = len(order)
        keyed: list[tuple[tuple[int, int], Turn]] = []
        for placement in self.plan.microbatches[microbatch].on_rank(rank):
            level, exchanges = placement.group.level, num_exchanges(placement, which)
            for number in range(exchanges + 1):
                position = order[level] if exchanges else last
                keyed.append(((number, position), Turn(level, number, opens=exchanges > 0 and number == 0)))
        return tuple(turn for _, turn in sorted(keyed, key=lambda item: item[0]))


def make_schedule(plan: Plan) -> Schedule:
    """The schedule of a checked plan."""
    return Schedule(plan)


def num_exchanges(placement: Placement, which: Pass) -> int:
    """How many collectives a group issues in one layer and pass.

    Ulysses needs one exchange in and one out. With ``keep == "output"`` the recompute needs none: output and
    log-sum-exp are there, and the backward pass brings queries, keys and values in its own first exchange.
    """
    if placement.group.degree == 1 or (which is Pass.RECOMPUTE and placement.keep == "output"):
        return 0
    return 2
