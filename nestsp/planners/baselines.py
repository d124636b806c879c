"""The planners that people compare with, on a ground's prices: static, batch-adaptive, BASP, greedy disjoint groups.

All place longest sequences first, try the least number of microbatches that memory admits and one more, since more
microbatches leave more memory to spend on what recomputation keeps, and take what the ground judges faster, with
parameter gathers where the plan is fastest.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
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
    "Candidate",
    "DisjointGroups",
    "Judged",
    "StaticDegree",
    "best_static_degree",
    "cut_by_tokens",
    "join_packings",
    "judge_best",
    "judged_or_refused",
    "longest_first",
    "refusal",
    "smallest_degrees",
    "static_degrees",
]

# Greedy disjoint groups: a sequence takes the smallest degree at which it takes no longer than such a part of the mean.
_THRESHOLDS = (0.3, 0.5, 0.7, 1.0, 1.4, 2.0)
# Sums of bytes are rounded.
_ROUNDING = 1e-9

Floats = npt.NDArray[np.float64]
Pack = Callable[[int], Packing | None]


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished plan and the ground's verdict on it."""

    plan: Plan
    makespan_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A packing that may become a plan.

    Attributes:
        planner: Who made it.
        packing: Sequences in groups.
        floor_s: No plan of this packing is judged faster.
    """

    planner: str
    packing: Packing
    floor_s: float = 0.0


def judge_best(
    ground: Ground, batch: SequenceBatch, candidates: Iterable[Candidate], below_s: float = math.inf
) -> Judged | None:
    """The fastest plan of some packings, if it is faster than that; those whose floor is above are not looked at."""
    best: Judged | None = None
    for candidate in sorted(candidates, key=lambda c: c.packing.slowest_s + ground.fixed_s * len(c.packing.loads_s)):
        if candidate.floor_s >= below_s:
            continue
        plan, verdict = ground.judged(ground.finish(candidate.packing.plan(batch, candidate.planner)))
        if verdict.makespan_s < below_s:
            best, below_s = Judged(plan, verdict.makespan_s), verdict.makespan_s
    return best


def settle(
    ground: Ground, batch: SequenceBatch, pack: Pack, planner: str, *, work_s: float, least: int, below_s: float
) -> list[Candidate]:
    """Packings into the least number of microbatches that works and into one more; none if nothing fits.

    Args:
        ground: What to plan on.
        batch: The sequences.
        pack: Packs them into a number of microbatches.
        planner: What to call the candidates.
        work_s: Rank-seconds of all sequences at least.
        least: Fewer microbatches do not work.
        below_s: Numbers that can give no faster plan are passed over.
    """
    least = max(least, ground.least_microbatches(batch))
    found: list[Candidate] = []
    for number in range(least, least + batch.num_sequences + 2):
        if number * (ground.gathers_s + ground.fixed_s) >= below_s:
            break
        if ground.mean_floor_s(work_s, batch.num_tokens, number) >= below_s:
            continue
        packing = pack(number)
        if packing is not None:
            floor = ground.fixed_s * len(packing.loads_s) + ground.least_part * packing.slowest_s
            found.append(Candidate(planner, packing, floor))
        if len(found) == 2 or (found and packing is None):
            break
    return found


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
        judged = judge_best(self.ground, batch, self.candidates(batch))
        if judged is None:
            longest = max(range(batch.num_sequences), key=batch.lengths.__getitem__)
            raise InfeasibleError(
                f"sequence {batch.ids[longest]} ({format_count(batch.lengths[longest])} tokens) does not fit on "
                f"{self.degree} ranks; raise planner.degree, or take a planner that chooses it"
            )
        return judged

    def candidates(self, batch: SequenceBatch, below_s: float = math.inf) -> list[Candidate]:
        """Its packings, but for those known to be no faster than that; none if a sequence does not fit."""
        ground = self.ground
        level = ground.tree.level_of_degree(self.degree)
        lengths = np.array(batch.lengths, float)
        num_bytes = ground.bytes(lengths)
        if batch.num_sequences and num_bytes[level].max() > ground.free_bytes:
            return []
        order, levels = longest_first(batch), [level] * batch.num_sequences
        seconds = ground.seconds(lengths)

        def pack(number: int) -> Packing | None:
            return pack_levels(ground.tree, levels, order, seconds, num_bytes, ground.free_bytes, number)

        room = num_groups(ground.tree, level) * ground.free_bytes
        least = math.ceil(float(num_bytes[level].sum()) / room * (1 - _ROUNDING))
        work_s = float(ground.work_s(lengths)[level].sum())
        return settle(ground, batch, pack, "static", work_s=work_s, least=least, below_s=below_s)


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
        return judged_or_refused(judge_best(self.ground, batch, self.candidates(batch)), batch)

    def candidates(self, batch: SequenceBatch, below_s: float = math.inf) -> list[Candidate]:
        """The packings of every degree; see `StaticDegree.candidates`."""
        planners = [StaticDegree(self.ground, degree) for degree in static_degrees(self.ground.tree)]
        found = [candidate for planner in planners for candidate in planner.candidates(batch, below_s)]
        return [dataclasses.replace(candidate, planner="batch-adaptive") for candidate in found]


def static_degrees(tree: GroupTree) -> tuple[int, ...]:
    """All degrees of a tree, largest first."""
    return tuple(tree.degree(level) for level in range(tree.num_levels))


def best_static_degree(
    ground: Ground, batches: Sequence[SequenceBatch], degrees: Sequence[int] | None = None
) -> int | None:
    """The one degree that is fastest over all batches and fits each, or None if none does.

    Args:
        ground: What to plan on.
        batches: The batches.
        degrees: Those to choose from; None for all of the tree.
    """
    totals: dict[int, float] = {}
    for degree in static_degrees(ground.tree) if degrees is None else degrees:
        try:
            planner = StaticDegree(ground, degree)
            totals[degree] = sum(planner.judge(batch).makespan_s for batch in batches)
        except InfeasibleError:
            continue
    return min(totals, key=lambda degree: (totals[degree], degree)) if totals else None


def judged_or_refused(judged: Judged | None, batch: SequenceBatch) -> Judged:
    """What was judged best.

    Raises:
        InfeasibleError: Nothing was.
    """
    if judged is None:
        raise refusal(batch)
    return judged


def refusal(batch: SequenceBatch) -> InfeasibleError:
    """What to raise if a batch passed the check, but no packing fits."""
    longest = max(range(batch.num_sequences), key=batch.lengths.__getitem__)
    return InfeasibleError(
        f"sequence {batch.ids[longest]} ({format_count(batch.lengths[longest])} tokens) leaves no room for "
        "what its attention exchanges; take more ranks, or drop the longest sequences"
    )


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
        return judged_or_refused(judge_best(self.ground, batch, self.candidates(batch)), batch)

    def candidates(self, batch: SequenceBatch, below_s: float = math.inf) -> list[Candidate]:
        """Its packings, but for those known to be no faster than that."""
        lengths = np.array(batch.lengths, float)
        prices = self.ground.seconds(lengths), self.ground.bytes(lengths)
        work_s = float(self.ground.work_s(lengths).min(axis=0).sum())

        def pack(number: int) -> Packing | None:
            return self._pack(batch, number, *prices)

        return settle(self.ground, batch, pack, "basp", work_s=work_s, least=1, below_s=below_s)

    def _pack(self, batch: SequenceBatch, num_microbatches: int, seconds: Floats, sizes: Floats) -> Packing | None:
        tree, free = self.ground.tree, self.ground.free_bytes
        packings = []
        for part in cut_by_tokens(batch, num_microbatches):
            enough = [level for level in range(tree.num_levels) if num_groups(tree, level) >= len(part)]
            wanted = enough[0] if enough else tree.num_levels - 1
            packing = None
            while packing is None and wanted >= 0:  # larger groups where memory asks for them
                packing = pack_levels(tree, [wanted] * batch.num_sequences, part, seconds, sizes, free, 1)
                wanted -= 1
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
        return judged_or_refused(judge_best(self.ground, batch, self.candidates(batch)), batch)

    def candidates(self, batch: SequenceBatch, below_s: float = math.inf) -> list[Candidate]:
        """Its packings, but for those known to be no faster than that."""
        lengths = np.array(batch.lengths, float)
        prices = self.ground.seconds(lengths), self.ground.bytes(lengths)
        work_s = float(self.ground.work_s(lengths).min(axis=0).sum())

        def pack(number: int) -> Packing | None:
            return self._pack(batch, number, *prices)

        return settle(self.ground, batch, pack, "disjoint", work_s=work_s, least=1, below_s=below_s)

    def _pack(self, batch: SequenceBatch, num_microbatches: int, seconds: Floats, sizes: Floats) -> Packing | None:
        packings = []
        for part in cut_by_tokens(batch, num_microbatches):
            packing = self.pack_part(part, seconds, sizes)
            if packing is None:
                return None
            packings.append((part, packing))
        return join_packings(self.ground.tree, batch, packings)

    def pack_part(self, part: list[int], seconds: Floats, sizes: Floats) -> Packing | None:
        """One microbatch of these sequences, longest first; None if it finds no room."""
        tree, free = self.ground.tree, self.ground.free_bytes
        degrees = np.array(static_degrees(tree), float)
        mean = float((seconds * degrees[:, None]).min(axis=0)[part].sum()) / tree.num_ranks
        best: Packing | None = None
        choices = (smallest_degrees(seconds, sizes, times * mean, 0.9 * free) for times in _THRESHOLDS)
        splits = [_split_ranks(tree, part, levels, seconds) for levels in choices]
        for split in sorted((split for split in splits if split is not None), key=lambda split: split.slowest_s):
            if best is not None and split.slowest_s >= best.slowest_s:
                break
            packing = _pack_disjoint(self.ground, split, seconds, sizes)
            if packing is not None and (best is None or packing.slowest_s < best.slowest_s):
                best = packing
        last = tree.num_levels - 1
        while best is None and last >= 0:  # too few ranks for several degrees: all on groups of one
            best = _pack_disjoint(
                self.ground, _Split({last: part}, {last: num_groups(tree, last)}, 0.0), seconds, sizes
            )
            last -= 1
        return best


def longest_first(batch: SequenceBatch) -> list[int]:
    """Batch positions by falling length; equal lengths stay in order."""
    order: list[int] = np.argsort(-np.array(batch.lengths, np.int64), kind="stable").tolist()
    return order


def num_groups(tree: GroupTree, level: int) -> int:
    """Groups of a level."""
    return tree.num_ranks // tree.degree(level)


def smallest_degrees(
    seconds: Floats, num_bytes: Floats, most_s: float, most_bytes: float, *, nearly: float = 1.05
) -> list[int]:
    """For each sequence the level with the fewest ranks on which it stays within time and memory.

    Where none does, the fewest with which it takes at most ``nearly`` times its least time; where none fits, the root.
    """
    fits = num_bytes <= most_bytes
    fastest = np.where(fits, seconds, np.inf).min(axis=0)
    within = fits & (seconds <= np.maximum(most_s, nearly * fastest))
    last = seconds.shape[0] - 1 - within[::-1].argmax(axis=0)
    levels: list[int] = np.where(within.any(axis=0), last, 0).tolist()
    return levels


def cut_by_tokens(batch: SequenceBatch, num_parts: int, first: float | None = None) -> list[list[int]]:
    """Runs of consecutive lengths, longest first, with about equal tokens; none is empty.

    Args:
        batch: The sequences.
        num_parts: How many runs.
        first: Which part of all tokens the first run has; by default as many as the others.
    """
    order = longest_first(batch)
    if not order:
        return []
    lengths = np.array([batch.lengths[i] for i in order])
    ends = np.cumsum(lengths)
    begins = (ends - lengths) / ends[-1]
    if first is not None and 0 < first < 1 and num_parts > 1:  # stretch the first run, and shrink the others
        equal = 1 / num_parts
        begins = np.where(begins < first, begins / first * equal, equal + (begins - first) / (1 - first) * (1 - equal))
    part_of = np.minimum((begins * num_parts).astype(int), num_parts - 1)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for i, part in zip(order, part_of.tolist(), strict=True):
        parts[part].append(i)
    return [part for part in parts if part]


def join_packings(tree: GroupTree, batch: SequenceBatch, packings: list[tuple[list[int], Packing]]) -> Packing:
    """One packing of several, each of one microbatch and its own sequences; of none, an empty microbatch."""
    if not packings:
        nothing = np.zeros((1, tree.num_ranks))
        packings = [([], Packing(tree, [], [], [], nothing, nothing))]
    levels, microbatches, groups = ([0] * batch.num_sequences for _ in range(3))
    for number, (part, packing) in enumerate(packings):
        for i in part:
            levels[i], microbatches[i], groups[i] = packing.levels[i], number, packing.groups[i]
    loads = np.concatenate([packing.loads_s for _, packing in packings])
    held = np.concatenate([packing.held_bytes for _, packing in packings])
    return Packing(tree, levels, microbatches, groups, loads, held)


@dataclass(frozen=True, slots=True)
class _Split:
    """Ranks dealt out to levels.

    Attributes:
        members: For each used level, root first, its sequences.
        counts: For each used level its groups.
        slowest_s: The slowest level takes so long at least, if its groups are even.
    """

    members: dict[int, list[int]]
    counts: dict[int, int]
    slowest_s: float


def _split_ranks(tree: GroupTree, part: list[int], levels: list[int], seconds: Floats) -> _Split | None:
    """Give each used level ranks by its work; ranks that are left go to the slowest. None if there are too few."""
    at = np.array(levels)[part]
    used = np.unique(at).tolist()
    members = {level: np.array(part)[at == level].tolist() for level in used}
    work = {lv: float(seconds[lv, members[lv]].sum()) * tree.degree(lv) for lv in used}
    total = sum(work.values())
    counts = {lv: max(1, int(work[lv] / total * tree.num_ranks / tree.degree(lv))) for lv in used}
    while sum(counts[lv] * tree.degree(lv) for lv in used) > tree.num_ranks:
        shrinkable = [lv for lv in used if counts[lv] > 1]
        if not shrinkable:
            return None
        counts[min(shrinkable, key=lambda lv: (work[lv] / (counts[lv] - 1) / tree.degree(lv), lv))] -= 1
    while True:
        left = tree.num_ranks - sum(counts[lv] * tree.degree(lv) for lv in used)
        growing = [lv for lv in used if tree.degree(lv) <= left]
        if not growing:
            break
        counts[max(growing, key=lambda lv: (work[lv] / counts[lv] / tree.degree(lv), -lv))] += 1
    return _Split(members, counts, max(work[lv] / counts[lv] / tree.degree(lv) for lv in used))


def _pack_disjoint(ground: Ground, split: _Split, seconds: Floats, num_bytes: Floats) -> Packing | None:
    """Lay the groups side by side in falling degree, so that each is aligned, and fill each level by itself."""
    tree, members, counts = ground.tree, split.members, split.counts
    levels = [0] * seconds.shape[1]
    for level, of in members.items():
        for i in of:
            levels[i] = level
    loads, held = np.zeros((1, tree.num_ranks)), np.zeros((1, tree.num_ranks))
    microbatches, groups = [0] * len(levels), [0] * len(levels)
    first = 0
    for level in members:
        degree = tree.degree(level)
        mine = list(range(first // degree, first // degree + counts[level]))
        load, size, heap = [0.0] * len(mine), [0.0] * len(mine), [(0.0, b) for b in range(len(mine))]
        adds, needs = seconds[level, members[level]].tolist(), num_bytes[level, members[level]].tolist()
        for i, add, need in zip(members[level], adds, needs, strict=True):
            full = []
            while heap and size[heap[0][1]] + need > ground.free_bytes:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            b = heap[0][1]
            load[b] += add
            size[b] += need
            heapq.heapreplace(heap, (load[b], b))
            for entry in full:
                heapq.heappush(heap, entry)
            groups[i] = mine[b]
        ranks = slice(mine[0] * degree, (mine[-1] + 1) * degree)
        loads[0, ranks], held[0, ranks] = np.repeat(load, degree), np.repeat(size, degree)
        first += counts[level] * degree
    return Packing(tree, levels, microbatches, groups, loads, held)
