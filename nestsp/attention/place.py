"""Where a rank is in its step: written as it goes, read by whoever must say where it stopped."""

from __future__ import annotations

from nestsp.schedule import Pass, Turn

__all__ = ["Place"]


class Place:
    """Marks of one rank, each a single attribute write; a reader on another thread may see a mark or its successor.

    Attributes:
        task: What the rank does outside attention, for people.
        step: The optimizer step, from 1; 0 before the first.
        microbatch: Of the step's plan.
        layer: Whose attention ran last in this microbatch; None before the first.
        which: The pass of that attention.
        turn: The turn that a group took last in it.
    """

    __slots__ = ("layer", "microbatch", "step", "task", "turn", "which")

    def __init__(self) -> None:
        self.task = "starts"
        self.step = 0
        self.enter(0)

    def enter(self, microbatch: int) -> None:
        """Begin a microbatch."""
        self.microbatch = microbatch
        self.layer: int | None = None
        self.which: Pass | None = None
        self.turn: Turn | None = None

    def __str__(self) -> str:
        """Words for people, such as ``runs microbatch 1, layer 3, backward, level 1, after exchange 2``.

        Microbatches are counted from 1 here, as in all that people read.
        """
        runs = self.task in ("runs", "evaluates")
        words = [f"{self.task} microbatch {self.microbatch + 1}" if runs else self.task]
        if runs:
            words += ["before its first attention"] if self.layer is None else [f"layer {self.layer}"]
            words += [] if self.which is None else [self.which.value]
            words += [] if self.turn is None else [f"level {self.turn.level}, after exchange {self.turn.number}"]
        return ", ".join(words)
