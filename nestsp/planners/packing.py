"""The one packing primitive of all planners: loads of ranks, kept exactly, and what a sequence would add to them.

A *bin* is one group in one microbatch. `Loads` knows how many tokens each rank holds, to the token (a group's tokens do
not always divide by its ranks), and how much work each rank has. All bins of a level are probed at once: 64 ranks in
8 microbatches take about 0.1 ms.
"""

from __future__ import annotations

import math
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
    _group_tokens: tuple[npt.NDArray[np.int64], ...] = field(repr=False)  # of each level: [microbatches, groups]

    @classmethod
    def empty(cls, tree: GroupTree, shape: ModelShape, max_tokens_per_rank: int, num_microbatches: int) -> Loads:
        """Nothing placed yet."""
        sizes = (num_microbatches, tree.num_ranks)
        group_tokens = tuple(
            np.zeros((num_microbatches, tree.num_ranks // tree.degree(level)), np.int64)
            for level in range(tree.num_levels)
        )
        placed: list[dict[Group, list[int]]] = [{} for _ in range(num_microbatches)]
        return cls(tree, shape, max_tokens_per_rank, np.zeros(sizes, np.int64), np.zeros(sizes), placed, group_tokens)

    def best_bin(self, level: int, length: int) -> tuple[float, int, Group] | None:
        """Of a level's bins with room for a sequence, the one whose busiest rank would stay lowest.

        Args:
            level: The level of the tree.
            length: Tokens of the sequence.

        Returns:
            The busiest rank's work in FLOPs, the microbatch and the group; the first of equal ones. None if no bin can
            take the sequence without a rank going over the cap.
        """
        degree = self.tree.degree(level)
        shape_MGP = (len(self.placed), -1, degree)
        before_MG = self._group_tokens[level]
        added_MGP = _shares(before_MG + length, degree) - _shares(before_MG, degree)
        room_MG = (self.tokens.reshape(shape_MGP) + added_MGP <= self.max_tokens_per_rank).all(-1)
        if not room_MG.any():
            return None
        peak_MG = (self.work.reshape(shape_MGP) + self._added_work(degree, length)).max(-1)
        peak_MG[~room_MG] = np.inf
        microbatch, index = divmod(int(peak_MG.argmin()), peak_MG.shape[1])
        return float(peak_MG[microbatch, index]), microbatch, Group(level, index * degree, degree)

    def place(self, microbatch: int, group: Group, position: int, length: int) -> None:
        """Put a sequence on a group."""
        ranks = slice(group.first_rank, group.ranks.stop)
        of_level, index = self._group_tokens[group.level], group.first_rank // group.degree
        before = of_level[microbatch, index]
        self.tokens[microbatch, ranks] += _shares(before + length, group.degree) - _shares(before, group.degree)
        self.work[microbatch, ranks] += self._added_work(group.degree, length)
        of_level[microbatch, index] += length
        self.placed[microbatch].setdefault(group, []).append(position)

    def _added_work(self, degree: int, length: int) -> npt.NDArray[np.float64]:
        work = sequence_work(self.shape, length)
        heads = _shares(np.int64(self.shape.num_heads), degree) / self.shape.num_heads
        return work.linear / degree + work.attention * heads


def _shares(total: np.int64 | npt.NDArray[np.int64], degree: int) -> npt.NDArray[np.int64]:
    """Sizes of `nestsp.cluster.share`, as an array [..., degree]."""
    cuts: npt.NDArray[np.int64] = np.arange(degree + 1) * np.expand_dims(total, -1) // degree
    return cuts[..., 1:] - cuts[..., :-1]


def work_of(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Work of whole sequences, FLOPs."""
    return math.fsum(sequence_work(shape, length).total for length in lengths)  # equal in any order


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
