"""The one packing primitive of all planners: loads of ranks, kept exactly, and what a sequence would add to them.

A *bin* is one group in one microbatch. `Loads` knows how many tokens each rank holds, to the token (a group's tokens do
not always divide by its ranks), and how much work each rank has. Prices: one probe of a group costs O(degree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.cost.work import sequence_work
from nestsp.errors import InfeasibleError
from nestsp.shape import ModelShape
from nestsp.units import format_count

__all__ = ["Loads", "check_lengths", "longest_first", "smallest_fitting_level", "work_of"]


@dataclass(slots=True)
class Loads:
    """Tokens and work of every rank in every microbatch, while a plan is being made.

    Attributes:
        tree: The groups.
        shape: Decides how the query heads of a sequence fall on the members of its group.
        max_tokens_per_rank: The cap on a rank's tokens.
        tokens: int64 [microbatches, ranks].
        work: float64 [microbatches, ranks], FLOPs.
        placed: For each microbatch, the batch positions of each group.
    """

    tree: GroupTree
    shape: ModelShape
    max_tokens_per_rank: int
    tokens: npt.NDArray[np.int64]
    work: npt.NDArray[np.float64]
    placed: list[dict[Group, list[int]]]
    _group_tokens: list[dict[Group, int]] = field(repr=False)

    @classmethod
    def empty(cls, tree: GroupTree, shape: ModelShape, max_tokens_per_rank: int, num_microbatches: int) -> Loads:
        """Nothing placed yet."""
        sizes = (num_microbatches, tree.num_ranks)
        return cls(
            tree,
            shape,
            max_tokens_per_rank,
            np.zeros(sizes, np.int64),
            np.zeros(sizes),
            [{} for _ in range(num_microbatches)],
            [{} for _ in range(num_microbatches)],
        )

    def fits(self, microbatch: int, group: Group, length: int) -> bool:
        """Whether the group can take a sequence without a rank going over the cap."""
        added = self._added_tokens(microbatch, group, length)
        return bool((self._tokens_of(microbatch, group) + added <= self.max_tokens_per_rank).all())

    def peak_with(self, microbatch: int, group: Group, length: int) -> float:
        """The largest work of the group's ranks if it took a sequence, FLOPs."""
        return float((self._work_of(microbatch, group) + self._added_work(group, length)).max())

    def place(self, microbatch: int, group: Group, position: int, length: int) -> None:
        """Put a sequence on a group."""
        self._tokens_of(microbatch, group)[:] += self._added_tokens(microbatch, group, length)
        self._work_of(microbatch, group)[:] += self._added_work(group, length)
        self.placed[microbatch].setdefault(group, []).append(position)
        self._group_tokens[microbatch][group] = self._group_tokens[microbatch].get(group, 0) + length

    def _tokens_of(self, microbatch: int, group: Group) -> npt.NDArray[np.int64]:
        return self.tokens[microbatch, group.first_rank : group.ranks.stop]

    def _work_of(self, microbatch: int, group: Group) -> npt.NDArray[np.float64]:
        return self.work[microbatch, group.first_rank : group.ranks.stop]

    def _added_tokens(self, microbatch: int, group: Group, length: int) -> npt.NDArray[np.int64]:
        before = self._group_tokens[microbatch].get(group, 0)
        return _shares(before + length, group.degree) - _shares(before, group.degree)

    def _added_work(self, group: Group, length: int) -> npt.NDArray[np.float64]:
        work = sequence_work(self.shape, length)
        heads = _shares(self.shape.num_heads, group.degree) / self.shape.num_heads
        return work.linear / group.degree + work.attention * heads


def _shares(total: int, degree: int) -> npt.NDArray[np.int64]:
    """Sizes of `nestsp.cluster.share`, as an array."""
    return np.diff(np.arange(degree + 1, dtype=np.int64) * total // degree)


def work_of(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Work of whole sequences, FLOPs."""
    return sum(sequence_work(shape, length).total for length in lengths)


def longest_first(batch: SequenceBatch) -> list[int]:
    """Batch positions by falling length; equal lengths stay in order."""
    return sorted(range(batch.num_sequences), key=lambda position: (-batch.lengths[position], position))


def smallest_fitting_level(tree: GroupTree, max_tokens_per_rank: int, length: int) -> int | None:
    """The level with the fewest ranks on which a sequence fits when it is alone, or None."""
    for level in reversed(range(tree.num_levels)):
        if -(-length // tree.degree(level)) <= max_tokens_per_rank:
            return level
    return None


def check_lengths(tree: GroupTree, max_tokens_per_rank: int, names: Sequence[int], lengths: Sequence[int]) -> None:
    """Prove that every sequence fits on some group of the tree when it is alone.

    Args:
        tree: The groups.
        max_tokens_per_rank: The cap.
        names: What to call each sequence in the error.
        lengths: Tokens of each sequence.

    Raises:
        InfeasibleError: One does not; names the longest.
    """
    if not len(lengths):
        return
    values = np.asarray(lengths)
    longest = int(values.argmax())
    length, ranks = int(values[longest]), tree.num_ranks
    need = -(-length // ranks)
    if need > max_tokens_per_rank:
        enough = -(-length // max_tokens_per_rank)
        raise InfeasibleError(
            f"sequence {names[longest]} ({format_count(length)} tokens) needs {format_count(need)} tokens on each of "
            f"{ranks} rank{'s' if ranks > 1 else ''}, but planner.max_tokens_per_rank is "
            f"{format_count(max_tokens_per_rank)}; raise it to {format_count(need)}, take {enough} ranks, or set "
            "data.max_length"
        )
