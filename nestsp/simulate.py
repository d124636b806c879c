"""What a plan will cost, before it runs: the work of each rank, and from measured rates its time.

This is the closed form: every microbatch lasts as long as its slowest rank. It leaves out communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from nestsp.cluster import share
from nestsp.cost.work import Rates, Work, sequence_work
from nestsp.plan import Plan
from nestsp.shape import ModelShape

__all__ = ["estimate_s", "imbalance", "plan_work", "slowest_work"]


def plan_work(plan: Plan, shape: ModelShape) -> tuple[tuple[Work, ...], ...]:
    """Work of every rank (inner) in every microbatch (outer).

    A member of a group works for its share of the group's tokens and of the query heads.
    """
    result = []
    for number, microbatch in enumerate(plan.microbatches):
        linear = [float(tokens * shape.linear_flops_per_token) for tokens in plan.rank_tokens(number)]
        attention = [0.0] * plan.tree.num_ranks
        for placement in microbatch.placements:
            degree = placement.group.degree
            flops = sum(sequence_work(shape, plan.batch.lengths[s]).attention for s in placement.sequences)
            for member, rank in enumerate(placement.group.ranks):
                attention[rank] += flops * len(share(shape.num_heads, degree, member)) / shape.num_heads
        result.append(tuple(Work(a, b) for a, b in zip(linear, attention, strict=True)))
    return tuple(result)


def slowest_work(work: Sequence[Sequence[Work]]) -> Work:
    """Sum over microbatches of the work of each one's slowest rank, by FLOPs."""
    return sum((max(microbatch, key=lambda rank: rank.total) for microbatch in work), Work(0.0, 0.0))


def estimate_s(work: Sequence[Sequence[Work]], rates: Rates) -> float:
    """Seconds of a step: every microbatch lasts as long as its slowest rank."""
    return sum(max(rates.seconds(rank) for rank in microbatch) for microbatch in work)


def imbalance(work: Sequence[Sequence[Work]]) -> float:
    """Slowest rank over mean, minus 1, over all microbatches, by FLOPs; 0 is perfect."""
    slowest = sum(max(rank.total for rank in microbatch) for microbatch in work)
    mean = sum(sum(rank.total for rank in microbatch) / len(microbatch) for microbatch in work)
    return slowest / mean - 1 if mean else 0.0
