"""The packing of all cost-driven planners: which group takes each sequence, in which microbatch?

Either each sequence has its level (`pack_levels`), or it takes the smallest degree at which some group ends within a
target (`pack_target`). Levels are filled from the root down, longest sequence first, each on the group whose ranks have
the least work and that has room. While a level is filled, all ranks of one of its groups have the same work, since what
lies there came from groups at least as large: so a group is one number, and going a level down copies it to its
children. Price: one heap operation a sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import Plan

__all__ = ["Packing", "pack_levels", "pack_target"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Packing:
    """A placement while it is made: what each rank has in each microbatch.

    Attributes:
        tree: The groups.
        levels: For each sequence its level.
        microbatches: For each sequence its microbatch.
        groups: For each sequence the number of its group within the level.
        loads_s: float64 [microbatches, ranks], seconds.
        held_bytes: float64 [microbatches, ranks].
    """

    tree: GroupTree
    levels: list[int]
    microbatches: list[int]
    groups: list[int]
    loads_s: Floats
    held_bytes: Floats

    @property
    def slowest_s(self) -> float:
        """Sum over microbatches of the slowest rank."""
        return float(self.loads_s.max(axis=1).sum())

    def plan(self, batch: SequenceBatch, planner: str) -> Plan:
        """The placement as a plan, longest sequences first in each group; empty microbatches are left out."""
        placed: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(len(self.loads_s))]
        for i in sorted(range(batch.num_sequences), key=lambda i: (-batch.lengths[i], i)):
            placed[self.microbatches[i]].setdefault((self.levels[i], self.groups[i]), []).append(i)
        degrees = [self.tree.degree(level) for level in range(self.tree.num_levels)]
        used = [
            {
                Group(level, index * degrees[level], degrees[level]): members
                for (level, index), members in groups.items()
            }
            for groups in placed
            if groups
        ]
        return Plan.of_groups(self.tree, batch, used or [{}], planner)


def pack_levels(
    tree: GroupTree,
    levels: Sequence[int],
    order: Sequence[int],
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[Sequence[float]],
    free_bytes: float,
    num_microbatches: int,
    longer_s: float = 0.0,
) -> Packing | None:
    """Place each sequence on a group of its level, or None if it finds no room.

    Args:
        tree: The groups.
        levels: For each sequence its level.
        order: The sequences, longest first.
        seconds: [levels, sequences], what each adds to a rank of its group.
        num_bytes: The same in bytes.
        free_bytes: What a rank may hold in one microbatch.
        num_microbatches: How many there are.
        longer_s: How much longer the first of them may last than the others.
    """
    by_level: list[list[int]] = [[] for _ in range(tree.num_levels)]
    for i in order:
        by_level[levels[i]].append(i)
    microbatch_of, group_of = [0] * len(levels), [0] * len(levels)
    # One number for each group, microbatch after microbatch; the first starts below zero by what it may last longer.
    loads, held = [-longer_s] + [0.0] * (num_microbatches - 1), [0.0] * num_microbatches
    for level, members in enumerate(by_level):
        if level:
            fanout = tree.fanouts[level - 1]
            loads = [load for load in loads for _ in range(fanout)]
            held = [size for size in held for _ in range(fanout)]
        if not members:
            continue
        num_groups = len(loads) // num_microbatches
        heap = [(load, index) for index, load in enumerate(loads)]
        heapq.heapify(heap)
        adds, sizes = seconds[level], num_bytes[level]
        for i in members:
            full = []
            while heap and held[heap[0][1]] + sizes[i] > free_bytes:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            load, index = heap[0]
            loads[index] = load + adds[i]
            held[index] += sizes[i]
            heapq.heapreplace(heap, (loads[index], index))
            for entry in full:
                heapq.heappush(heap, entry)
            microbatch_of[i], group_of[i] = divmod(index, num_groups)
    shape = (num_microbatches, tree.num_ranks)
    loads_s = np.array(loads).reshape(shape)
    loads_s[0] += longer_s
    return Packing(tree, list(levels), microbatch_of, group_of, loads_s, np.array(held).reshape(shape))


def pack_target(
    tree: GroupTree,
    target_s: float,
    order: Sequence[int],
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[Sequence[float]],
    free_bytes: float,
    num_microbatches: int,
) -> Packing | None:
    """Place each sequence on a group of the smallest degree that ends within a target, or None if it finds no room.

    Degrees only fall along the order, as lengths do. Where no group ends within the target, the one of the degree
    reached that ends first takes the sequence. For the other arguments see `pack_levels`.
    """
    num_sequences, last = len(seconds[0]), tree.num_levels - 1
    levels, microbatch_of, group_of = [0] * num_sequences, [0] * num_sequences, [0] * num_sequences
    loads, held = [0.0] * num_microbatches, [0.0] * num_microbatches
    heap = [(0.0, index) for index in range(num_microbatches)]
    now, num_groups = 0, 1
    for i in order:
        full = []  # groups without room even at the largest degree that is still open
        while heap and held[heap[0][1]] + num_bytes[now][i] > free_bytes:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        chosen = now
        for level in range(last, now, -1):
            if load + seconds[level][i] <= target_s and held[index] + num_bytes[level][i] <= free_bytes:
                chosen = level
                break
        if chosen > now:
            fanout = tree.degree(now) // tree.degree(chosen)
            loads = [load for load in loads for _ in range(fanout)]
            held = [size for size in held for _ in range(fanout)]
            heap = [(load, index) for index, load in enumerate(loads)]
            heapq.heapify(heap)
            now, num_groups, full, index = chosen, num_groups * fanout, [], index * fanout
            while heap[0][1] != index:  # the first child of the group that has room
                full.append(heapq.heappop(heap))
        loads[index] = load + seconds[now][i]
        held[index] += num_bytes[now][i]
        heapq.heapreplace(heap, (loads[index], index))
        for entry in full:
            heapq.heappush(heap, entry)
        levels[i] = now
        microbatch_of[i], group_of[i] = divmod(index, num_groups)
    fanout = tree.degree(now)
    arrays = [np.repeat(np.array(each), fanout).reshape(num_microbatches, tree.num_ranks) for each in (loads, held)]
    return Packing(tree, levels, microbatch_of, group_of, arrays[0], arrays[1])
