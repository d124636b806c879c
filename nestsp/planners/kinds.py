"""How each group attends: Ulysses, a ring, or a hybrid of both, by the cost model's price.

Ulysses moves queries too, and each member then works for some heads: as slowly as the one with most of them, and with
no gain beyond one head a rank. A ring moves keys and values alone, which is less where few query heads share many keys
or the group is small; it computes each block while the next one travels, but in shorter calls of the kernel. A hybrid
is a ring of Ulysses members.

1. *Alone.* Every used group gets the kind with which its own attention would last least if nothing else ran.
2. *Together.* What recomputation keeps is decided anew, and the whole plan is judged: other groups may hide what a kind
   would spare. The plan of Ulysses groups stays unless the other one is faster.

The search for placements knows Ulysses alone, so a plan is never slower for the choice. Price: a simulation or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest

from nestsp.cost.comm import LinkTime
from nestsp.cost.compute import Direction
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.plan import AttentionKind, Placement, Plan
from nestsp.planners.baselines import Judged
from nestsp.planners.ground import Ground

__all__ = ["alone_s", "choose_kinds", "ring_degrees", "with_kinds"]


def choose_kinds(judged: Judged, ground: Ground, cost: CostModel, kind: AttentionKind) -> Judged:
    """The plan with the kinds that a run wants.

    Args:
        judged: A finished plan of Ulysses groups.
        ground: Finishes and judges plans.
        cost: What everything costs.
        kind: ``auto`` for whatever is faster, else one for all groups; where a group has no such kind, Ulysses.

    Raises:
        InfeasibleError: The groups do not fit into memory as that kind.
    """
    wanted = with_kinds(judged.plan, cost, kind)
    if wanted == judged.plan:
        return judged
    plan = ground.finish(wanted)
    other = Judged(plan, ground.evaluate(plan))
    if kind == "auto":
        return min(judged, other, key=lambda j: j.makespan_s)
    if other.makespan_s == float("inf"):
        raise InfeasibleError(
            f"planner.attention is {kind}, but as such the batch's groups do not fit into memory; take auto, or more "
            "ranks"
        )
    return other


def with_kinds(plan: Plan, cost: CostModel, kind: AttentionKind) -> Plan:
    """The same placement; each group has the kind with which it alone is fastest, of those that are wanted."""
    microbatches = tuple(
        dataclasses.replace(m, placements=tuple(_with_kind(plan, p, cost, kind) for p in m.placements))
        for m in plan.microbatches
    )
    return dataclasses.replace(plan, microbatches=microbatches)


def _with_kind(plan: Plan, placement: Placement, cost: CostModel, kind: AttentionKind) -> Placement:
    degree = placement.group.degree
    lengths = [plan.batch.lengths[s] for s in placement.sequences]
    best = min(ring_degrees(degree, kind), key=lambda ring: (alone_s(placement.group.level, ring, lengths, cost), ring))
    return dataclasses.replace(placement, ring_degree=best)


def ring_degrees(degree: int, kind: AttentionKind) -> list[int]:
    """The ring degrees that a group of some degree may have; Ulysses alone where it has none of the kind.

    >>> [ring_degrees(6, kind) for kind in ("auto", "ulysses", "ring", "hybrid")]
    [[1, 2, 3, 6], [1], [6], [2, 3]]
    >>> ring_degrees(5, "hybrid")
    [1]
    """
    divisors = [ring for ring in range(1, degree + 1) if degree % ring == 0]
    return {"auto": divisors, "ulysses": [1], "ring": [degree], "hybrid": divisors[1:-1] or [1]}[kind]


def alone_s(level: int, ring_degree: int, lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds that a layer's attention of one group lasts if nothing else runs: forward, again, and backward.

    Args:
        level: The group's level.
        ring_degree: Members of its ring.
        lengths: Of its sequences.
        cost: The model and the hardware.
    """
    forward = _pass_s("forward", cost.comm.forward(level, ring_degree), level, ring_degree, lengths, cost)
    backward = _pass_s("backward", cost.comm.backward(level, ring_degree), level, ring_degree, lengths, cost)
    return 2 * forward + backward


def _pass_s(
    direction: Direction,
    exchanges: Sequence[LinkTime],
    level: int,
    ring_degree: int,
    lengths: Sequence[int],
    cost: CostModel,
) -> float:
    """Exchanges inside a member come before and after; around the ring, a block is computed while one is passed on."""
    tokens, squares = sum(lengths), float(sum(cost.compute.squares(n) for n in lengths))
    heads = float(cost.head_fractions(level, ring_degree).max()) * cost.shape.num_heads
    attention = float(
        cost.compute.attention_s(direction, heads, tokens, squares, max(lengths), ring_degree=ring_degree)
    )
    seconds = [link.seconds(tokens) for link in exchanges]
    inside = 0.0
    if cost.tree.degree(level) > ring_degree:
        inside, seconds = seconds[0] + seconds[-1], seconds[1:-1]
    blocks = [attention / ring_degree] * ring_degree
    if direction == "backward" and ring_degree == 2:  # the last block's gradients go home after it
        seconds.insert(1, 0.0)
    return inside + sum(map(max, zip_longest(seconds, blocks, fillvalue=0.0)))
