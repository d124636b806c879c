"""The order in which a rank's groups take their turns in one layer's attention.

A group's attention is a chain of phases joined by exchanges: exchange in, compute, exchange out; or around a ring,
where every pass of keys is one and a block is computed while the next one travels. A group's *turn* runs it from where
it waits to the next exchange it issues, so with k exchanges it takes k + 1 turns. Turns of all groups on a rank's path
are ordered by the key (number of the turn, position of the group's level in the plan's level order): while one group's
exchange is on the wire, another group computes.

Every rank issues in increasing key and skips the groups it does not have, so all ranks follow one total order and no
set of groups can deadlock. The order is never chosen by readiness, which differs between ranks. A group of one rank
exchanges nothing; its one turn comes after all first turns, where it fills the first gap.

The gather of the next layer's parameters has a place in the same order: the plan names the number before whose turns
it comes, and the levels whose exchanges share its links. A rank issues it right after the last exchange of these levels
that comes before that place, and where the layer begins if it has none: so a rank without such groups holds nobody up.
All members of a smaller group lie in the same groups of these levels, so for them too the gather has one place.

The simulator and the executor both read these turns: the simulator those of one key together (`Schedule.steps`), the
executor those of one rank (`Schedule.turns`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nestsp.plan import Placement, Plan

__all__ = ["Pass", "Schedule", "Step", "Turn", "make_schedule", "num_exchanges", "turn_name"]


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
class Step:
    """The turns of one key: groups of one level, all at the same turn.

    Attributes:
        turn: What each of them does.
        placements: The groups, by rank.
    """

    turn: Turn
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The turns of every rank, microbatch and pass of a plan.

    Attributes:
        plan: The plan.
        streaming: Groups take turns. Otherwise each group takes all its turns before the next group's first, and
            computes before it issues, so that nothing hides an exchange.
    """

    plan: Plan
    streaming: bool = True

    def steps(self, microbatch: int, which: Pass) -> tuple[Step, ...]:
        """The turns of all ranks in one layer, in the one order that every rank follows."""
        return _steps(self, self.plan.microbatches[microbatch].placements, which)

    def turns(self, microbatch: int, rank: int, which: Pass) -> tuple[Turn, ...]:
        """The turns of one rank in one layer, in the order in which they are taken."""
        return tuple(step.turn for step in _steps(self, self.plan.microbatches[microbatch].on_rank(rank), which))

    def gather_turn(self, which: Pass) -> int:
        """The number before whose turns a layer gathers the next one's parameters; 0 is where the layer begins.

        Without streaming it is 0: turns of one number then lie apart, and no place among them is the same to all ranks.
        """
        assert which is not Pass.RECOMPUTE, "the recompute gathers nothing"
        gathers = self.plan.gathers
        if not self.streaming or not gathers.num_levels:
            return 0
        return gathers.forward if which is Pass.FORWARD else gathers.backward

    def turns_before_gather(self, microbatch: int, rank: int, which: Pass) -> int:
        """How many of `turns` a rank has taken when it issues the gather of the next layer's parameters."""
        before, num_levels = self.gather_turn(which), self.plan.gathers.num_levels
        groups = self.plan.microbatches[microbatch].on_rank(rank)
        exchanges = {p.group.level: num_exchanges(p, which) for p in groups if p.group.level < num_levels}
        taken = 0
        for position, turn in enumerate(self.turns(microbatch, rank, which), 1):
            if turn.number < min(before, exchanges.get(turn.level, 0)):
                taken = position
        return taken


def _steps(schedule: Schedule, placements: Iterable[Placement], which: Pass) -> tuple[Step, ...]:
    order = {level: position for position, level in enumerate(schedule.plan.level_order)}
    last = len(order)
    keyed: dict[tuple[int, int, int], list[Placement]] = {}
    for placement in placements:
        level, exchanges = placement.group.level, num_exchanges(placement, which)
        position = order[level] if exchanges else last
        for number in range(exchanges + 1):
            key = (number, position) if schedule.streaming else (position, number)
            keyed.setdefault((*key, level), []).append(placement)
    steps = []
    for (first, second, level), groups in sorted(keyed.items(), key=lambda item: item[0]):
        number, position = (first, second) if schedule.streaming else (second, first)
        steps.append(Step(Turn(level, number, opens=position != last and number == 0), tuple(groups)))
    return tuple(steps)


def make_schedule(plan: Plan, *, streaming: bool = True) -> Schedule:
    """The schedule of a checked plan.

    Args:
        plan: The plan.
        streaming: Whether groups take turns, which is what training does unless it is told otherwise.
    """
    return Schedule(plan, streaming)


def turn_name(degree: int, which: Pass, number: int) -> str:
    """What estimate and measurement call a turn of a group of some degree, and the exchange that it issues."""
    return f"degree {degree}, {which.value} {number}"


def num_exchanges(placement: Placement, which: Pass) -> int:
    """How many communications a group issues in one layer and pass.

    Ulysses needs one exchange in and one out. A ring passes keys and values on once for each further member. In the
    backward pass their gradients travel one pass behind them, so that every block is computed while another is on the
    wire: one more pass where there are members between, and one that brings them home. A hybrid needs both. Ulysses in
    slices brings each slice while it works on the one before, and sends what that one gave along with the next but one:
    so two more than there are slices. With ``keep == "output"`` the recompute needs none: output and log-sum-exp are
    there, and the backward pass brings queries, keys and values in its own exchanges.
    """
    degree, ring, slices = placement.group.degree, placement.ring_degree, placement.num_slices
    if degree == 1 or (which is Pass.RECOMPUTE and placement.keep == "output"):
        return 0
    if slices > 1:
        return slices + 2
    around = ring - 1
    if which is Pass.BACKWARD and ring > 1:
        around += 2 if ring > 2 else 1
    return around + (2 if ring < degree else 0)
