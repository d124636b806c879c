"""The planners that people compare with, on the prices of a ground: static, batch-adaptive, BASP, greedy disjoint groups.

All place longest sequences first, try the least number of microbatches that memory admits and one more, since more
microbatches leave more memory to spend on what recomputation keeps, and take what the ground judges faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners.ground import Ground
from nestsp.planners.levels import Packing, pack_levels
from nestsp.units import format_count

__all__ = [
    "BaspGroups",
    "BatchAdaptive",
    "DisjointGroups",
    "Judged",
    "StaticDegree",
    "best_static_degree",
    "join_packings",
    "settle",
]

Floats = npt.NDArray[np.float64]
Pack = Callable[[int], Packing | None]


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished plan and the ground's verdict on it."""

    plan: Plan
    makespan_s: float


def settle(ground: Ground, batch: SequenceBatch, pack: Pack, planner: str) -> Judged | None:
    """The better of a packing into the least number of microbatches and of one into one more; None if nothing fits."""
    least = ground.least_microbatches(batch)
    best: Judged | None = None
    for number in range(least, least + batch.num_sequences + 2):
        packing = pack(number)
        if packing is None:
            if best is None:
                continue
            break
        plan = ground.finish(packing.plan(batch, planner))
        judged = Judged(plan, ground.evaluate(plan))
        if best is not None:
            return min(best, judged, key=lambda j: j.makespan_s)
        best = judged
    return best


@dataclass(frozen=True, slots=True)
class StaticDegree:
    """All sequences of all batches on groups of one degree."""

    ground: Ground
    degree: int

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit on a group of this degree.
        """
        return self.judge(batch).plan

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch; see `plan`."""
        self.ground.check(batch)
        level = self.ground.tree.level_of_degree(self.degree)
        judged = settle(self.ground, batch, lambda number: _pack_level(self.ground, batch, level, number), "static")
        if judged is None:
            longest = max(range(batch.num_sequences), key=batch.lengths.__getitem__)
            raise InfeasibleError(
                f"sequence {batch.ids[longest]} ({format_count(batch.lengths[longest])} tokens) does not fit on "
                f"{self.degree} ranks; raise planner.degree, or take a planner that chooses it"
            )
        return judged


@dataclass(frozen=True, slots=True)
class BatchAdaptive:
    """The best static degree for each batch."""

    ground: Ground

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit even on all ranks together.
        """
        return self.judge(batch).plan

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch; see `plan`."""
        self.ground.check(batch)
        judged = []
        for degree in static_degrees(self.ground.tree):
            try:
                judged.append(StaticDegree(self.ground, degree).judge(batch))
            except InfeasibleError:
                continue
        return min(judged, key=lambda j: j.makespan_s)


def static_degrees(tree: GroupTree) -> tuple[int, ...]:
    """All degrees of a tree, largest first."""
    return tuple(tree.degree(level) for level in range(tree.num_levels))


def best_static_degree(ground: Ground, batches: list[SequenceBatch]) -> int | None:
    """The one degree that is fastest over all batches and fits each, or None if none does."""
    totals: dict[int, float] = {}
    for degree in static_degrees(ground.tree):
        try:
            planner = StaticDegree(ground, degree)
            totals[degree] = sum(planner.judge(batch).makespan_s for batch in batches)
        except InfeasibleError:
            continue
    return min(totals, key=lambda degree: (totals[degree], degree)) if totals else None


@dataclass(frozen=True, slots=True)
class BaspGroups:
    """One level for each microbatch: as large as its number of sequences leaves disjoint groups for them.

    A microbatch of B equal sequences on N ranks runs B groups of N/B ranks (Ghimire & Calhoun, arXiv:2609.03151). Ours
    also takes unequal lengths, an N that B does not divide (the level with the fewest groups that are at least B) and
    more sequences than ranks (several on a rank). Microbatches are runs of consecutive lengths with about equal tokens.
    """

    ground: Ground

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit even on all ranks together.
        """
        return self.judge(batch).plan

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch; see `plan`."""
        self.ground.check(batch)
        judged = settle(self.ground, batch, lambda number: self._pack(batch, number), "basp")
        assert judged is not None, "every sequence alone on the root fits"
        return judged

    def _pack(self, batch: SequenceBatch, num_microbatches: int) -> Packing | None:
        tree = self.ground.tree
        packings = []
        for part in cut_by_tokens(batch, num_microbatches):
            wanted = next((lv for lv in range(tree.num_levels) if num_groups(tree, lv) >= len(part)), tree.num_levels - 1)
            packing = None
            for level in range(wanted, -1, -1):  # larger groups where memory asks for them
                packing = _pack_part(self.ground, batch, part, [level] * batch.num_sequences)
                if packing is not None:
                    break
            if packing is None:
                return None
            packings.append((part, packing))
        return join_packings(tree, batch, packings)


@dataclass(frozen=True, slots=True)
class DisjointGroups:
    """Groups of several degrees, no rank in two of them: FlexSP's plans by a greedy rule instead of a programme.

    In each microbatch, a run of consecutive lengths, a sequence goes to the smallest degree at which it takes no longer
    than a threshold; levels get ranks by their work, and ranks that are left go to the slowest level. The best of
    several thresholds counts.
    """

    ground: Ground

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit even on all ranks together.
        """
        return self.judge(batch).plan

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch; see `plan`."""
        self.ground.check(batch)
        judged = settle(self.ground, batch, lambda number: self._pack(batch, number), "disjoint")
        assert judged is not None, "every sequence alone on the root fits"
        return judged

    def _pack(self, batch: SequenceBatch, num_microbatches: int) -> Packing | None:
        packings = []
        for part in cut_by_tokens(batch, num_microbatches):
            packing = self._pack_part(batch, part)
            if packing is None:
                return None
            packings.append((part, packing))
        return join_packings(self.ground.tree, batch, packings)

    def _pack_part(self, batch: SequenceBatch, part: list[int]) -> Packing | None:
        ground, tree = self.ground, self.ground.tree
        lengths = np.array(batch.lengths, float)
        seconds, num_bytes = ground.seconds(lengths), ground.bytes(lengths)
        degrees = np.array(static_degrees(tree), float)
        mean = float((seconds * degrees[:, None]).min(axis=0)[part].sum()) / tree.num_ranks
        best: Packing | None = None
        for threshold in (0.3, 0.5, 0.7, 1.0, 1.4, 2.0):
            levels = smallest_degrees(seconds, num_bytes, threshold * mean, 0.9 * ground.free_bytes)
            packing = _pack_disjoint(ground, part, levels, seconds, num_bytes)
            if packing is not None and (best is None or packing.slowest_s < best.slowest_s):
                best = packing
        return best


def num_groups(tree: GroupTree, level: int) -> int:
    """Groups of a level."""
    return tree.num_ranks // tree.degree(level)


def smallest_degrees(seconds: Floats, num_bytes: Floats, most_s: float, most_bytes: float) -> list[int]:
    """For each sequence the level with the fewest ranks on which it stays within time and memory.

    Where none does, the one that fits and is fastest; where none fits, the root.
    """
    fits = num_bytes <= most_bytes
    within = fits & (seconds <= most_s)
    last = seconds.shape[0] - 1 - within[::-1].argmax(axis=0)
    fastest = np.where(fits, seconds, np.inf).argmin(axis=0)
    levels: list[int] = np.where(within.any(axis=0), last, fastest).tolist()
    return levels


def cut_by_tokens(batch: SequenceBatch, num_parts: int) -> list[list[int]]:
    """Runs of consecutive lengths, longest first, with about equal tokens; none is empty."""
    order = sorted(range(batch.num_sequences), key=lambda i: (-batch.lengths[i], i))
    ends = np.cumsum([batch.lengths[i] for i in order])
    part_of = np.minimum((ends - np.array([batch.lengths[i] for i in order])) * num_parts // max(1, int(ends[-1])), num_parts - 1)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for i, part in zip(order, part_of.tolist(), strict=True):
        parts[part].append(i)
    return [part for part in parts if part]


def join_packings(tree: GroupTree, batch: SequenceBatch, packings: list[tuple[list[int], Packing]]) -> Packing:
    """One packing of several, each of one microbatch and its own sequences."""
    levels, microbatches, groups = ([0] * batch.num_sequences for _ in range(3))
    for number, (part, packing) in enumerate(packings):
        for i in part:
            levels[i], microbatches[i], groups[i] = packing.levels[i], number, packing.groups[i]
    loads = np.concatenate([packing.loads_s for _, packing in packings])
    held = np.concatenate([packing.held_bytes for _, packing in packings])
    return Packing(tree, levels, microbatches, groups, loads, held)


def _pack_level(ground: Ground, batch: SequenceBatch, level: int, num_microbatches: int) -> Packing | None:
    lengths = np.array(batch.lengths, float)
    if batch.num_sequences and ground.bytes(lengths)[level].max() > ground.free_bytes:
        return None
    order = sorted(range(batch.num_sequences), key=lambda i: (-batch.lengths[i], i))
    seconds, num_bytes = ground.seconds(lengths).tolist(), ground.bytes(lengths).tolist()
    levels = [level] * batch.num_sequences
    return pack_levels(ground.tree, levels, order, seconds, num_bytes, ground.free_bytes, num_microbatches)


def _pack_part(ground: Ground, batch: SequenceBatch, part: list[int], levels: list[int]) -> Packing | None:
    lengths = np.array(batch.lengths, float)
    seconds, num_bytes = ground.seconds(lengths).tolist(), ground.bytes(lengths).tolist()
    return pack_levels(ground.tree, levels, part, seconds, num_bytes, ground.free_bytes, 1)


def _pack_disjoint(
    ground: Ground, part: list[int], levels: list[int], seconds: Floats, num_bytes: Floats
) -> Packing | None:
    """Give each used level its ranks, in falling degree so that groups stay aligned, then fill each by itself."""
    tree = ground.tree
    used = sorted({levels[i] for i in part})
    work = {lv: sum(seconds[lv, i] for i in part if levels[i] == lv) * tree.degree(lv) for lv in used}
    total = sum(work.values())
    counts = {lv: max(1, int(work[lv] / total * tree.num_ranks / tree.degree(lv))) for lv in used}
    while sum(counts[lv] * tree.degree(lv) for lv in used) > tree.num_ranks:
        shrinkable = [lv for lv in used if counts[lv] > 1]
        if not shrinkable:
            return None
        counts[min(shrinkable, key=lambda lv: (work[lv] / (counts[lv] - 1) / tree.degree(lv), lv))] -= 1
    while True:  # ranks that are left go to the slowest level that can take a group of them
        left = tree.num_ranks - sum(counts[lv] * tree.degree(lv) for lv in used)
        growing = [lv for lv in used if tree.degree(lv) <= left]
        if not growing:
            break
        counts[max(growing, key=lambda lv: (work[lv] / counts[lv] / tree.degree(lv), -lv))] += 1
    loads, held = np.zeros((1, tree.num_ranks)), np.zeros((1, tree.num_ranks))
    microbatches, groups = [0] * len(levels), [0] * len(levels)
    first = 0
    for level in used:
        degree = tree.degree(level)
        mine = list(range(first // degree, first // degree + counts[level]))
        bins = [(0.0, 0.0)] * len(mine)
        for i in part:
            if levels[i] != level:
                continue
            room = [b for b in range(len(mine)) if bins[b][1] + num_bytes[level, i] <= ground.free_bytes]
            if not room:
                return None
            b = min(room, key=lambda index: bins[index])
            bins[b] = (bins[b][0] + float(seconds[level, i]), bins[b][1] + float(num_bytes[level, i]))
            groups[i] = mine[b]
        for b, group in enumerate(mine):
            loads[0, group * degree : (group + 1) * degree] += bins[b][0]
            held[0, group * degree : (group + 1) * degree] += bins[b][1]
        first += counts[level] * degree
    return Packing(tree, levels, microbatches, groups, loads, held)
