"""What a rank measured of its attention, turn by turn of the Schedule; see `nestsp.execute.measure`.

A turn has three instants: the rank came to it, the group's last exchange was there, the turn's computation was done and
the next exchange issued. An exchange is known to be on the wire from its issue to its arrival at most: nobody looks
before its reader waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nestsp.schedule import Pass

__all__ = ["TimedTurn", "attention_s", "waited_s"]


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """One turn of one group on one rank. Seconds count from the start of the step.

    Attributes:
        microbatch: Its microbatch.
        layer: Its layer.
        which: Its pass.
        level: The group's level.
        number: The turn's number in the pass.
        began_s: The rank came to it, and began to wait for the group's last exchange.
        arrived_s: That was there; the same for a first turn, which waits for nothing.
        ended_s: It had computed, and issued the next exchange.
    """

    microbatch: int
    layer: int
    which: Pass
    level: int
    number: int
    began_s: float
    arrived_s: float
    ended_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and a text; `from_json` reads them back."""
        return {
            "microbatch": self.microbatch,
            "layer": self.layer,
            "pass": self.which.value,
            "level": self.level,
            "turn": self.number,
            "began_s": round(self.began_s, 7),
            "arrived_s": round(self.arrived_s, 7),
            "ended_s": round(self.ended_s, 7),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TimedTurn:
        """Read what `to_json` wrote."""
        instants = (float(data[name]) for name in ("began_s", "arrived_s", "ended_s"))
        return cls(data["microbatch"], data["layer"], Pass(data["pass"]), data["level"], data["turn"], *instants)


def attention_s(turns: Iterable[TimedTurn]) -> float:
    """Seconds that a rank spent in attention, waiting included."""
    return sum(turn.ended_s - turn.began_s for turn in turns)


def waited_s(turns: Iterable[TimedTurn]) -> float:
    """Seconds that a rank waited for exchanges of its attention, late peers included."""
    return sum(turn.arrived_s - turn.began_s for turn in turns)
