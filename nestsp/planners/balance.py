"""Balance by verdict: what a ground says each rank's own work takes decides where the short sequences go.

A packing knows prices; it does not know which exchange hides behind whose attention. A verdict does. So the sequences
that one rank holds alone are taken away, and dealt anew, longest first, to the rank that would end first; all others
stay where they are. Ranks meet in every layer, and the head comes between the two passes: balance in the layers is not
balance in the head, which counts for as much of itself as the caller says. Price: one heap operation a sequence, and a
verdict on the result.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

from nestsp.cluster import Group
from nestsp.plan import Microbatch, Placement, Plan
from nestsp.planners.ground import Ground

__all__ = ["balance"]

Floats = npt.NDArray[np.float64]


def balance(plan: Plan, own_s: Floats, ground: Ground, head_part: float = 0.0) -> Plan | None:
    """The same plan with the sequences of single ranks dealt anew, not finished; None if one finds no room.

    Args:
        plan: A finished plan.
        own_s: float64 [microbatches, ranks], what each rank's own work takes, from the ground's verdict on it: its
            computation, and as much of the exchanges that nothing hides as is to count.
        ground: What to plan on.
        head_part: Which part of the head's time counts.
    """
    lengths = np.array(plan.batch.lengths, float)
    sizes, seconds, head_s = ground.bytes(lengths), ground.guesses[0].seconds(lengths)[-1], head_part * ground.head_s
    microbatches = []
    for number, microbatch in enumerate(plan.microbatches):
        each_s = seconds + (head_s - microbatch.num_kept_layers * ground.layer_s) * lengths
        loads_s = own_s[number] + head_s * np.array(plan.rank_tokens(number), float)
        dealt = _deal(microbatch, loads_s, each_s, sizes, ground)
        if dealt is None:
            return None
        microbatches.append(dealt)
    return dataclasses.replace(plan, microbatches=tuple(microbatches))


def _deal(microbatch: Microbatch, loads_s: Floats, each_s: Floats, sizes: Floats, ground: Ground) -> Microbatch | None:
    last = ground.tree.num_levels - 1
    loads, held = loads_s.copy(), np.zeros(len(loads_s))
    shared, alone = [], []
    for placement in microbatch.placements:
        group, members = placement.group, list(placement.sequences)
        if group.degree == 1:
            loads[group.first_rank] -= each_s[members].sum()
            alone += members
        else:
            held[group.first_rank : group.ranks.stop] += sizes[group.level, members].sum()
            shared.append(dataclasses.replace(placement, keep="none"))
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    dealt: dict[int, list[int]] = {}
    for i in sorted(alone, key=lambda i: (-each_s[i], i)):
        full = []
        while heap and held[heap[0][1]] + sizes[last, i] > ground.free_bytes:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + each_s[i], rank))
        held[rank] += sizes[last, i]
        dealt.setdefault(rank, []).append(i)
        for entry in full:
            heapq.heappush(heap, entry)
    local = (Placement(Group(last, rank, 1), tuple(members)) for rank, members in sorted(dealt.items()))
    return Microbatch((*shared, *local))
