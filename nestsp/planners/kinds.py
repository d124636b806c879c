"""How each group attends: Ulysses, in one piece or in slices of heads, a ring, or a hybrid, by the cost model's price.

Ulysses moves queries too, and each member then works for some heads: as slowly as the one with most of them, and with
no gain beyond one head a rank. In slices it hides most of its exchanges behind its own attention, for more calls of the
kernel. A ring moves keys and values alone, which is less where few query heads share many keys or the group is small;
it computes each block while the next one travels, but in shorter calls. A hybrid is a ring of Ulysses members.

1. *Alone.* Every used group gets the kind with which its own attention would last least if nothing else ran.
2. *Together.* What recomputation keeps is decided anew, and the whole plan is judged: other groups may hide what a kind
   would spare. The plan of Ulysses groups stays unless the other one is faster.

Planners place Ulysses groups in one piece; `nsp` chooses kinds itself as well. A plan is never slower for the choice.
Price: a simulation or two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from nestsp.cluster import ring_degrees
from nestsp.cost.comm import LinkTime
from nestsp.cost.compute import Direction
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.plan import AttentionKind, Placement, Plan

if TYPE_CHECKING:  # grounds offer kinds
    from nestsp.planners.baselines import Judged
    from nestsp.planners.ground import Ground

__all__ = ["Kind", "alone_s", "choose_kinds", "kinds_of", "with_kinds"]

# Numbers of slices that are tried: more only make the first and the last exchange shorter still.
_SLICES = (1, 2, 4)


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """How a group attends: members of its ring, and slices of heads."""

    ring_degree: int = 1
    num_slices: int = 1


def choose_kinds(judged: Judged, ground: Ground, cost: CostModel, wanted: AttentionKind) -> Judged:
    """The plan with the kinds that a run wants.

    Args:
        judged: A finished plan.
        ground: Finishes and judges plans.
        cost: What everything costs.
        wanted: ``auto`` for whatever is faster, else one for all groups; where a group has no such kind, Ulysses.

    Raises:
        InfeasibleError: The groups do not fit into memory as that kind.
    """
    placed = with_kinds(judged.plan, cost, wanted)
    if placed == judged.plan:
        return judged
    plan, verdict = ground.judged(ground.finish(placed))
    other = dataclasses.replace(judged, plan=plan, makespan_s=verdict.makespan_s)
    if wanted in ("auto", "ulysses"):
        return min(judged, other, key=lambda j: j.makespan_s)
    if math.isinf(other.makespan_s):
        raise InfeasibleError(
            f"planner.attention is {wanted}, but as such the batch's groups do not fit into memory; take auto, or more "
            "ranks"
        )
    return other


def with_kinds(plan: Plan, cost: CostModel, wanted: AttentionKind) -> Plan:
    """The same placement; each group has the kind with which it alone is fastest, of those that are wanted."""
    microbatches = tuple(
        dataclasses.replace(m, placements=tuple(_with_kind(plan, p, cost, wanted) for p in m.placements))
        for m in plan.microbatches
    )
    return dataclasses.replace(plan, microbatches=microbatches)


def _with_kind(plan: Plan, placement: Placement, cost: CostModel, wanted: AttentionKind) -> Placement:
    level, degree = placement.group.level, placement.group.degree
    lengths = [plan.batch.lengths[s] for s in placement.sequences]
    best, *others = kinds = kinds_of(degree, cost.shape.num_heads, wanted)
    if others:
        best = min(kinds, key=lambda kind: (alone_s(level, kind, lengths, cost), kind))
    return dataclasses.replace(placement, ring_degree=best.ring_degree, num_slices=best.num_slices)


def kinds_of(degree: int, num_heads: int, wanted: AttentionKind) -> list[Kind]:
    """The kinds that a group may have; Ulysses where it has none of those that are wanted.

    >>> [(kind.ring_degree, kind.num_slices) for kind in kinds_of(6, 12, "auto")]
    [(1, 1), (1, 2), (2, 1), (3, 1), (6, 1)]
    >>> [kind.ring_degree for kind in kinds_of(6, 12, "hybrid")], [kind.ring_degree for kind in kinds_of(6, 12, "ring")]
    ([2, 3], [6])
    >>> kinds_of(5, 20, "hybrid")
    [Kind(ring_degree=1, num_slices=1)]
    """
    most = -(-num_heads // degree) if degree > 1 else 1
    ulysses = [Kind(1, slices) for slices in _SLICES if slices <= most]
    rings = [Kind(ring) for ring in ring_degrees(degree)[1:]]
    of = {"auto": ulysses + rings, "ulysses": ulysses, "ring": rings[-1:], "hybrid": rings[:-1]}
    return of[wanted] or [Kind()]


def alone_s(level: int, kind: Kind, lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds that a layer's attention of one group lasts if nothing else runs: forward, again, and backward.

    Args:
        level: The group's level.
        kind: How it attends.
        lengths: Of its sequences.
        cost: The model and the hardware.
    """
    forward, backward = (
        exchanges(level, kind.ring_degree, kind.num_slices) for exchanges in (cost.comm.forward, cost.comm.backward)
    )
    return 2 * _pass_s("forward", forward, level, kind, lengths, cost) + _pass_s(
        "backward", backward, level, kind, lengths, cost
    )


def _pass_s(
    direction: Direction,
    exchanges: Sequence[LinkTime],
    level: int,
    kind: Kind,
    lengths: Sequence[int],
    cost: CostModel,
) -> float:
    """Exchanges inside a member come before and after; a block or a slice is computed while the next one travels."""
    ring, slices = kind.ring_degree, kind.num_slices
    tokens, squares = sum(lengths), float(sum(cost.compute.squares(n) for n in lengths))
    heads = float(cost.head_fractions(level, ring).max()) * cost.shape.num_heads / slices
    attention = float(cost.compute.attention_s(direction, heads, tokens, squares, max(lengths), ring_degree=ring))
    seconds = [link.seconds(tokens) for link in exchanges]
    if slices > 1:
        return seconds[0] + sum(max(second, attention) for second in seconds[1:-1]) + seconds[-1]
    inside = 0.0
    if cost.tree.degree(level) > ring:
        inside, seconds = seconds[0] + seconds[-1], seconds[1:-1]
    blocks = [attention / ring] * ring
    if direction == "backward" and ring == 2:  # the last block's gradients go home after it
        seconds.insert(1, 0.0)
    return inside + sum(map(max, zip_longest(seconds, blocks, fillvalue=0.0)))
