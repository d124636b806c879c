"""The sequences of one optimizer step, as the planner sees them: identities and lengths, no tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from nestsp.errors import DataError

__all__ = ["SequenceBatch"]


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """The sequences of one optimizer step.

    Plans refer to a sequence by its *position* in the batch, 0 to ``num_sequences - 1``.

    Attributes:
        ids: Where each sequence is in the token store; all different.
        lengths: Tokens of each sequence, at least 1.

    Raises:
        DataError: A length is below 1 or not a whole number, or an id occurs twice.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.lengths):
            raise DataError(
                f"a batch has {len(self.ids)} ids, but {len(self.lengths)} lengths; give one length for each id"
            )
        # NumPy integers become plain ones: digests and JSON must not depend on where a number came from.
        object.__setattr__(self, "ids", tuple(_whole(i, "id") for i in self.ids))
        object.__setattr__(self, "lengths", tuple(_whole(n, "length") for n in self.lengths))
        if len(set(self.ids)) != len(self.ids):
            twice = next(i for i in self.ids if self.ids.count(i) > 1)
            raise DataError(f"sequence {twice} is twice in one batch, but every sequence may be there once; remove one")
        for identity, length in zip(self.ids, self.lengths, strict=True):
            if length < 1:
                raise DataError(
                    f"sequence {identity} has {length} tokens, but every sequence needs at least 1; drop it"
                )

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> SequenceBatch:
        """A batch whose ids are the positions.

        >>> SequenceBatch.of_lengths([5, 3]).num_tokens
        8
        """
        values = tuple(lengths)
        return cls(tuple(range(len(values))), values)

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


def _whole(value: int, what: str) -> int:
    try:
        return int(operator.index(value))  # int() also makes True a 1
    except TypeError:
        raise DataError(f"a sequence's {what} is {value!r}, but it must be a whole number; round it first") from None
