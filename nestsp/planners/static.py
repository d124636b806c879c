"""One degree for the whole run: what people use today, and the baseline of every comparison.

Each sequence goes to a group of the one level, longest first, to the group and microbatch with the least work that has
room. Microbatches are as few as the packing finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners.packing import Loads, check_lengths, longest_first
from nestsp.shape import ModelShape
from nestsp.units import format_count

__all__ = ["StaticPlanner"]


@dataclass(frozen=True, slots=True)
class StaticPlanner:
    """Places all sequences on the groups of one degree.

    Attributes:
        tree: The groups; one level has the degree.
        shape: The model.
        max_tokens_per_rank: Hard cap on the tokens that a rank holds in a microbatch.
        degree: Ranks of each group.
    """

    tree: GroupTree
    shape: ModelShape
    max_tokens_per_rank: int
    degree: int

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit on a group of this degree.
            ConfigError: The tree has no groups of this degree.
        """
        level = self.tree.level_of_degree(self.degree)
        order = longest_first(batch)
        check_lengths(self.tree, self.max_tokens_per_rank, batch.ids, batch.lengths)
        longest = order[0] if order else None
        if longest is not None and -(-batch.lengths[longest] // self.degree) > self.max_tokens_per_rank:
            length = batch.lengths[longest]
            raise InfeasibleError(
                f"sequence {batch.ids[longest]} ({format_count(length)} tokens) needs "
                f"{format_count(-(-length // self.degree))} tokens on each of {self.degree} ranks, but "
                f"planner.max_tokens_per_rank is {format_count(self.max_tokens_per_rank)}; raise planner.degree or "
                "the cap"
            )
        least = max(1, -(-batch.num_tokens // (self.tree.num_ranks * self.max_tokens_per_rank)))
        for num_microbatches in range(least, max(least, batch.num_sequences) + 1):
            loads = self._pack(batch, order, level, num_microbatches)
            if loads is not None:
                return Plan.of_groups(self.tree, batch, loads.placed, "static")
        raise AssertionError("one microbatch for each sequence always fits")

    def _pack(self, batch: SequenceBatch, order: list[int], level: int, num_microbatches: int) -> Loads | None:
        loads = Loads.empty(self.tree, self.shape, self.max_tokens_per_rank, num_microbatches)
        for position in order:
            length = batch.lengths[position]
            best = loads.best_bin(level, length)
            if best is None:
                return None
            _, microbatch, group = best
            loads.place(microbatch, group, position, length)
        return loads
