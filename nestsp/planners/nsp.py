"""Nested sequence parallelism: any sequence on any group of the tree, several levels at once on the same ranks.

Longest first, each sequence takes the smallest group on which it fits and on which no rank passes the mean work of the
batch; where no group keeps below the mean, the one whose busiest rank stays lowest. So long sequences are split as far
as memory and balance ask, and short ones fill what is left on single ranks, where they communicate nothing.
Microbatches are as few as the packing finds: each one costs a gather of all parameters. The plans of every single level
are made too, and one of them is taken if it needs fewer microbatches, or if it spares the slowest ranks a tenth of
their work: less than that is not worth splitting the short sequences, whose exchanges this first planner does not
price.

The method is ours; the idea of planning nested groups for every batch is that of Wang et al., arXiv:2609.22755, whose
planner searches with a cost model (ours, here, balances work alone).
"""

from __future__ import annotations

from dataclasses import dataclass

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners.packing import Loads, check_lengths, longest_first, work_of
from nestsp.planners.static import StaticPlanner
from nestsp.shape import ModelShape
from nestsp.simulate import plan_work, slowest_work

__all__ = ["NspPlanner"]

# A group may pass the mean work by this much before a larger one is tried: splitting further costs communication.
_SLACK = 1.05
# A plan of a single level must have this fraction of a nested plan's work to be taken instead.
_NESTED_BONUS = 0.9


@dataclass(frozen=True, slots=True)
class NspPlanner:
    """Places sequences on nested groups.

    Attributes:
        tree: The groups.
        shape: The model.
        max_tokens_per_rank: Hard cap on the tokens that a rank holds in a microbatch.
    """

    tree: GroupTree
    shape: ModelShape
    max_tokens_per_rank: int

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit even on all ranks together.
        """
        check_lengths(self.tree, self.max_tokens_per_rank, batch.ids, batch.lengths)
        candidates = [self._nested(batch)]
        for level in range(self.tree.num_levels):
            static = StaticPlanner(self.tree, self.shape, self.max_tokens_per_rank, self.tree.degree(level))
            try:
                candidates.append(static.plan(batch))
            except InfeasibleError:
                continue
        best = min(candidates, key=self._cost)
        return Plan(best.tree, best.batch, best.microbatches, best.level_order, "nsp")

    def _cost(self, plan: Plan) -> tuple[int, float]:
        work = slowest_work(plan_work(plan, self.shape)).total
        return len(plan.microbatches), work * (_NESTED_BONUS if plan.planner == "nsp" else 1.0)

    def _nested(self, batch: SequenceBatch) -> Plan:
        order = longest_first(batch)
        least = max(1, -(-batch.num_tokens // (self.tree.num_ranks * self.max_tokens_per_rank)))
        for num_microbatches in range(least, max(least, batch.num_sequences) + 1):
            loads = self._pack(batch, order, num_microbatches)
            if loads is not None:
                return Plan.of_groups(self.tree, batch, loads.placed, "nsp")
        raise AssertionError("one microbatch for each sequence always fits")

    def _pack(self, batch: SequenceBatch, order: list[int], num_microbatches: int) -> Loads | None:
        loads = Loads.empty(self.tree, self.shape, self.max_tokens_per_rank, num_microbatches)
        target = _SLACK * work_of(self.shape, batch.lengths) / (self.tree.num_ranks * num_microbatches)
        for position in order:
            best = self._best_bin(loads, batch.lengths[position], target)
            if best is None:
                return None
            loads.place(*best, position, batch.lengths[position])
        return loads

    def _best_bin(self, loads: Loads, length: int, target: float) -> tuple[int, Group] | None:
        fallback: tuple[float, int, Group] | None = None
        for level in reversed(range(self.tree.num_levels)):
            best = loads.best_bin(level, length)
            if best is None:
                continue
            if best[0] <= target:
                return best[1:]
            if fallback is None or best[0] < fallback[0]:
                fallback = best
        return fallback[1:] if fallback else None
