"""The packing of all cost-driven planners: which group takes each sequence, in which microbatch?

Either each sequence has its level (`pack_levels`), or it takes the smallest degree at which some group ends within its
microbatch's target (`pack_within`). Levels are filled from the root down, longest sequence first, each on the group
whose ranks have the least work and that has room. While a level is filled, all ranks of one of its groups have the same
work, since what lies there came from groups at least as large: so a group is one number, and going a level down copies
it to its children. Price: one heap operation a sequence.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import Plan

__all__ = ["Packing", "pack_levels", "pack_within"]

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
    def places(self) -> tuple[list[int], list[int], list[int]]:
        """Level, microbatch and group of each sequence."""
        return self.levels, self.microbatches, self.groups

    @property
    def slowest_s(self) -> float:
        """Sum over microbatches of the slowest rank."""
        return float(self.loads_s.max(axis=1).sum())

    def plan(self, batch: SequenceBatch, planner: str) -> Plan:
        """The placement as a plan, longest sequences first in each group; empty microbatches are left out."""
        placed: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(len(self.loads_s))]
        for i in np.argsort(-np.array(batch.lengths, np.int64), kind="stable").tolist():
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
    seconds: Floats,
    num_bytes: Floats,
    free_bytes: float,
    num_microbatches: int,
    longer_s: float = 0.0,
) -> Packing | None:
    """Place each sequence on a group of its level, or None if it finds no room.

    Args:
        tree: The groups.
        levels: For each sequence its level.
        order: The sequences, longest first.
        seconds: float64 [levels, sequences], what each adds to a rank of its group.
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
            held = [here for here in held for _ in range(fanout)]
        if not members:
            continue
        num_groups = len(loads) // num_microbatches
        heap = [(load, index) for index, load in enumerate(loads)]
        heapq.heapify(heap)
        adds, sizes = seconds[level, members].tolist(), num_bytes[level, members].tolist()
        for i, add, size in zip(members, adds, sizes, strict=True):
            full = []
            while heap and held[heap[0][1]] + size > free_bytes:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            load, index = heap[0]
            loads[index] = load + add
            held[index] += size
            heapq.heapreplace(heap, (load + add, index))
            for entry in full:
                heapq.heappush(heap, entry)
            microbatch_of[i], group_of[i] = divmod(index, num_groups)
    shape = (num_microbatches, tree.num_ranks)
    loads_s = np.array(loads).reshape(shape)
    loads_s[0] += longer_s
    return Packing(tree, list(levels), microbatch_of, group_of, loads_s, np.array(held).reshape(shape))


def pack_within(
    tree: GroupTree,
    targets_s: Sequence[float],
    order: Sequence[int],
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[Sequence[float]],
    free_bytes: float,
    s_per_byte: float = 0.0,
) -> Packing | None:
    """Place each sequence on the smallest degree at which some group ends within its microbatch's target.

    Degrees only fall along the order, as lengths do, and the group with the most time left takes the sequence. What no
    group has time for then goes into the gaps that are left, on as few ranks as end within the target: a short sequence
    split over some ranks fills gaps that are shorter than itself. None if one finds no place within the targets.

    Args:
        tree: The groups.
        targets_s: For each microbatch how long its ranks may work.
        order: The sequences, longest first.
        seconds: [levels, sequences], what each adds to a rank of its group.
        num_bytes: The same in bytes; infinite where a sequence may not go.
        free_bytes: What a rank may hold in one microbatch.
        s_per_byte: Price of room in time: above 0, groups that have more time than room come first, so that the long
            sequences, which take more time for each byte, go there.
    """
    num_microbatches, num_sequences, last = len(targets_s), len(seconds[0]), tree.num_levels - 1
    degrees = [tree.degree(level) for level in range(tree.num_levels)]
    levels, microbatch_of, group_of = [0] * num_sequences, [0] * num_sequences, [0] * num_sequences
    # One number for each group, microbatch after microbatch: how far it is above its target.
    over, held = [-target for target in targets_s], [0.0] * num_microbatches
    heap = [(load, load, index) for index, load in enumerate(over)]
    heapq.heapify(heap)
    now, num_groups = 0, 1
    left: list[int] = []
    full: list[tuple[float, float, int]] = []  # groups without room for what came last, the emptiest first
    for i in order:
        adds, needs = seconds[now][i], num_bytes[now][i]
        while full and full[0][0] + needs <= free_bytes:
            size, load, index = heapq.heappop(full)
            heapq.heappush(heap, (load - s_per_byte * size, load, index))
        while heap and free_bytes < held[heap[0][2]] + needs < math.inf:
            _, load, index = heapq.heappop(heap)
            heapq.heappush(full, (held[index], load, index))
        if not heap:
            left.append(i)
            continue
        _, load, index = heap[0]
        chosen = now
        for level in range(last, now, -1):
            if load + seconds[level][i] <= 0.0 and held[index] + num_bytes[level][i] <= free_bytes:
                chosen = level
                break
        if chosen > now:
            fanout = degrees[now] // degrees[chosen]
            over = [load for load in over for _ in range(fanout)]
            held = [size for size in held for _ in range(fanout)]
            heap = [(load - s_per_byte * held[index], load, index) for index, load in enumerate(over)]
            heapq.heapify(heap)
            index *= fanout
            now, num_groups, full = chosen, num_groups * fanout, []
            adds, needs = seconds[now][i], num_bytes[now][i]
            while heap[0][2] != index:  # the first child of the group that has room
                _, load, other = heapq.heappop(heap)
                heapq.heappush(full, (held[other], load, other))
            load = heap[0][1]
        if load + adds > 0.0 or needs == math.inf:
            left.append(i)
            continue
        load += adds
        over[index] = load
        held[index] = size = held[index] + needs
        heapq.heapreplace(heap, (load - s_per_byte * size, load, index))
        levels[i] = now
        microbatch_of[i], group_of[i] = divmod(index, num_groups)
    if sum(over) * degrees[now] + sum(seconds[last][i] for i in left) > 0.0:
        return None
    arrays = [np.repeat(np.array(each), degrees[now]).reshape(num_microbatches, -1) for each in (over, held)]
    packing = Packing(tree, levels, microbatch_of, group_of, arrays[0], arrays[1])
    if not _fill_gaps(packing, left, seconds, num_bytes, free_bytes):
        return None
    packing.loads_s += np.array(targets_s)[:, None]
    return packing


def _fill_gaps(
    packing: Packing,
    left: list[int],
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[Sequence[float]],
    free_bytes: float,
) -> bool:
    """Place what is left on the fewest ranks that stay at or below zero; whether all found a place."""
    loads, sizes = packing.loads_s, packing.held_bytes
    degrees = [packing.tree.degree(level) for level in range(packing.tree.num_levels)]
    for i in left:
        for level in range(len(degrees) - 1, -1, -1):
            degree = degrees[level]
            ends, held = _slowest(loads, degree), _slowest(sizes, degree)
            at = int(ends.argmin())
            if held[at] + num_bytes[level][i] > free_bytes:
                ends = np.where(held + num_bytes[level][i] <= free_bytes, ends, np.inf)
                at = int(ends.argmin())
            if ends[at] + seconds[level][i] <= 0.0:
                break
        else:
            return False
        microbatch, group = divmod(at, loads.shape[1] // degree)
        ranks = slice(group * degree, (group + 1) * degree)
        loads[microbatch, ranks] += seconds[level][i]
        sizes[microbatch, ranks] += num_bytes[level][i]
        packing.levels[i], packing.microbatches[i], packing.groups[i] = level, microbatch, group
    return True


def _slowest(values: Floats, degree: int) -> Floats:
    """The largest value of each group's ranks, float64 [microbatches * groups]."""
    return values.ravel() if degree == 1 else values.reshape(-1, degree).max(axis=1)
