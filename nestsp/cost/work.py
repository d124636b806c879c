"""How much one sequence computes, without communication or memory.

The linear part grows with a sequence's length and the attention part with its square, so counting tokens alone would
call one sequence of 8,000 equal to eight of 1,000.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestsp.shape import ModelShape

__all__ = ["Work", "sequence_work"]


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


def sequence_work(shape: ModelShape, length: int) -> Work:
    """Work of one whole sequence.

    Args:
        shape: The model.
        length: Tokens of the sequence.
    """
    return Work(float(length * shape.linear_flops_per_token), float(shape.attention_flops(length)))
