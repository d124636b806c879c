"""How much one sequence computes: a first model of cost, without communication or memory.

The linear part grows with a sequence's length and the attention part with its square, so counting tokens alone would
call one sequence of 8,000 equal to eight of 1,000. Time follows from two measured rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestsp.shape import ModelShape

__all__ = ["Rates", "Work", "sequence_work"]


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of a forward pass.

    Attributes:
        linear: Of projections, feed-forward blocks and the head.
        attention: Of attention's two products.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        """Both parts."""
        return self.linear + self.attention

    def __add__(self, other: Work) -> Work:
        return Work(self.linear + other.linear, self.attention + other.attention)

    def scaled(self, linear: float, attention: float) -> Work:
        """Each part times a factor."""
        return Work(self.linear * linear, self.attention * attention)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured seconds per forward FLOP; they cover the backward pass and recomputation too."""

    linear_s_per_flop: float
    attention_s_per_flop: float

    def seconds(self, work: Work) -> float:
        """Time of some work."""
        return work.linear * self.linear_s_per_flop + work.attention * self.attention_s_per_flop


def sequence_work(shape: ModelShape, length: int) -> Work:
    """Work of one whole sequence.

    Args:
        shape: The model.
        length: Tokens of the sequence.
    """
    return Work(float(length * shape.linear_flops_per_token), float(shape.attention_flops(length)))
