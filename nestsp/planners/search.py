"""Nested groups by search: any sequence on any group of the tree, several levels at once on the same ranks.

1. *Levels.* A sequence goes to the smallest degree at which it takes no longer than a threshold times the mean work of
   a rank; a dozen thresholds, exchanges counted in full or in part, and a few numbers of microbatches are packed
   (`pack_levels`) and compared by the closed form.
2. *Local search.* From the best of each number of microbatches, sequences of the slowest ranks move to where the sum of
   the slowest ranks falls, at any level and in any microbatch.
3. *Finalists.* Each is finished (what recomputation keeps) and judged by the ground, as are the plans of every single
   level, BASP and greedy disjoint groups: so it is never slower than those. For the winner a few level orders are
   judged too.

The idea of planning nested groups for every batch is that of Wang et al., arXiv:2609.22755. Ours differs in the search,
in hard memory limits, in recomputation chosen with the placement, and in trees that are not powers of two.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.plan import Plan
from nestsp.planners.baselines import (
    BaspGroups,
    BatchAdaptive,
    Candidate,
    DisjointGroups,
    Judged,
    join_packings,
    judge_best,
    judged_or_refused,
    longest_first,
    smallest_degrees,
    static_degrees,
)
from nestsp.planners.ground import Ground
from nestsp.planners.levels import Packing, pack_levels, pack_target

__all__ = ["NestedGroups"]

Floats = npt.NDArray[np.float64]

_THRESHOLDS = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.1, 1.4)
# A sequence that keeps no threshold may take so many times its least time, on fewer ranks.
_NEARLY = (1.0, 1.05)
# Times the mean work of a rank, exchanges included, at each sequence's cheapest degree.
_TARGETS = (1.01, 1.03, 1.06, 1.1, 1.14, 1.18, 1.22, 1.27, 1.33, 1.4, 1.5, 1.7)
# Which part of the exchanges is taken to be in nobody's shadow.
_EXCHANGES = (1.0, 0.3)
# Moves of the local search, and how many of the slowest rank's largest sequences each considers.
_MOVES = 40
_MOVERS = 6
# Where memory is scarce, the first packing may use only so much of it, so that the next steps have room to move.
_MEMORY = (1.0, 0.95, 0.9, 0.85, 0.8)
# A move must make the sum of the slowest ranks smaller by this fraction.
_LEAST_GAIN = 2e-4
# How many packings of each number of microbatches and part of the exchanges are refined, and how many judged.
_FINALISTS = 3
# How often all microbatches are packed again by themselves.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class NestedGroups:
    """Places sequences on nested groups."""

    ground: Ground

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch.

        Raises:
            InfeasibleError: A sequence does not fit even on all ranks together.
        """
        return self.judge(batch).plan

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch; see `plan`."""
        ground = self.ground
        ground.check(batch)
        candidates = [Candidate("nsp", packing) for packing in self.packings(batch)]
        for other in (BatchAdaptive(ground), BaspGroups(ground), DisjointGroups(ground)):
            candidates += other.candidates(batch)
        best = judged_or_refused(judge_best(ground, batch, candidates), batch)
        reverse = dataclasses.replace(best.plan, level_order=tuple(reversed(best.plan.level_order)))
        best = min(best, Judged(reverse, ground.evaluate(reverse)), key=lambda j: j.makespan_s)
        return Judged(dataclasses.replace(best.plan, planner="nsp"), best.makespan_s)

    def packings(self, batch: SequenceBatch) -> list[Packing]:
        """The finalists of the search: the best packing for each number of microbatches and share of exchanges."""
        ground, tree = self.ground, self.ground.tree
        lengths = np.array(batch.lengths, float)
        order = longest_first(batch)
        degrees = np.array(static_degrees(tree), float)[:, None]
        num_bytes = ground.bytes(lengths)
        found: list[Packing] = []
        least = ground.least_microbatches(batch)
        numbers = 0
        for number in range(least, least + batch.num_sequences + 2):
            at_this_number = []
            for exchanges in _EXCHANGES:
                seconds = ground.seconds(lengths, exchanges=exchanges)
                mean = float((seconds * degrees).min(axis=0).sum()) / (tree.num_ranks * number)
                tight = (
                    batch.num_tokens * ground.bytes_per_token[-1] > 0.7 * number * tree.num_ranks * ground.free_bytes
                )
                refined = []
                for part_of_memory in _MEMORY if tight else _MEMORY[:1]:
                    limit = part_of_memory * ground.free_bytes
                    tried = _pack_all(ground, order, seconds, num_bytes, mean, number, limit)
                    for packing in sorted(tried, key=lambda p: p.slowest_s)[:_FINALISTS]:
                        refined.append(self._refine(packing, batch, seconds, num_bytes))
                at_this_number += sorted(refined, key=lambda p: p.slowest_s)[:_FINALISTS]
            found += at_this_number
            numbers += bool(at_this_number)
            if numbers == 2:
                break
        return found

    def _refine(self, packing: Packing, batch: SequenceBatch, seconds: Floats, num_bytes: Floats) -> Packing:
        """Move single sequences and pack microbatches again, as long as it helps."""
        free = self.ground.free_bytes
        packing = _improve(packing, seconds, num_bytes, free)
        for _ in range(_ROUNDS if len(packing.loads_s) > 1 else 0):
            before = packing.slowest_s
            packing = _repack(packing, self.ground, batch, seconds, num_bytes)
            packing = _improve(packing, seconds, num_bytes, free)
            if packing.slowest_s > before * (1 - 1e-4):
                break
        return packing


def _pack_all(
    ground: Ground,
    order: list[int],
    seconds: Floats,
    num_bytes: Floats,
    mean_s: float,
    num_microbatches: int,
    free: float,
) -> list[Packing]:
    """The packings of all thresholds and all targets."""
    tree = ground.tree
    prices = seconds.tolist(), num_bytes.tolist()
    found = []
    seen: set[tuple[int, ...]] = set()
    for threshold, nearly in itertools.product(_THRESHOLDS, _NEARLY):
        levels = smallest_degrees(seconds, num_bytes, threshold * mean_s, 0.9 * free, nearly=nearly)
        if tuple(levels) not in seen:
            seen.add(tuple(levels))
            found.append(pack_levels(tree, levels, order, *prices, free, num_microbatches))
            longer_s = _longer_s(ground, levels, order, seconds, num_microbatches)
            if longer_s > 0:
                found.append(pack_levels(tree, levels, order, *prices, free, num_microbatches, longer_s))
    for slack in _TARGETS:
        found.append(pack_target(tree, slack * mean_s, order, *prices, free, num_microbatches))
    return [packing for packing in found if packing is not None]


def _longer_s(ground: Ground, levels: list[int], order: list[int], seconds: Floats, num_microbatches: int) -> float:
    """How much longer the microbatch of the longest sequence lasts than the others, if it ends with that sequence."""
    if num_microbatches == 1 or not order:
        return 0.0
    chosen, index = np.array(levels)[order], np.array(order)
    each = seconds[chosen, index]
    total = float((each * np.array(static_degrees(ground.tree), float)[chosen]).sum()) / ground.tree.num_ranks
    longest = float(each.max())
    return longest - max(0.0, total - longest) / (num_microbatches - 1)


def _repack(packing: Packing, ground: Ground, batch: SequenceBatch, seconds: Floats, num_bytes: Floats) -> Packing:
    """Pack each microbatch again by itself: thresholds and targets then follow its own mean."""
    degrees = np.array(static_degrees(packing.tree), float)[:, None]
    cheapest = (seconds * degrees).min(axis=0) / packing.tree.num_ranks
    parts = []
    for number in range(len(packing.loads_s)):
        part = [i for i in longest_first(batch) if packing.microbatches[i] == number]
        old = dataclasses.replace(
            packing, loads_s=packing.loads_s[number : number + 1], held_bytes=packing.held_bytes[number : number + 1]
        )
        tried = (
            _pack_all(ground, part, seconds, num_bytes, float(cheapest[part].sum()), 1, ground.free_bytes)
            if part
            else []
        )
        parts.append((part, min([old, *tried], key=lambda p: p.slowest_s)))
    return join_packings(packing.tree, batch, parts)


def _improve(packing: Packing, seconds: Floats, num_bytes: Floats, free_bytes: float) -> Packing:
    """Move sequences away from the slowest ranks as long as the sum of the slowest ranks falls."""
    for _ in range(_MOVES):
        best: tuple[float, int, int, int, int] | None = None
        slowest = packing.loads_s.max(axis=1)
        now = float(slowest.sum())
        for microbatch in range(len(slowest)):
            rank = int(packing.loads_s[microbatch].argmax())
            for i in _movers(packing, microbatch, rank, seconds):
                move = _best_move(packing, i, seconds, num_bytes, free_bytes)
                if move is not None and move[0] < now * (1 - _LEAST_GAIN) and (best is None or move < best):
                    best = move
        if best is None:
            break
        _, i, microbatch, level, group = best
        _shift(packing, i, seconds, num_bytes, -1.0)
        packing.microbatches[i], packing.levels[i], packing.groups[i] = microbatch, level, group
        _shift(packing, i, seconds, num_bytes, 1.0)
    return packing


def _movers(packing: Packing, microbatch: int, rank: int, seconds: Floats) -> list[int]:
    """The sequences on a rank's path that add most to it, and the least one, which fits best into small gaps."""
    levels, groups = np.array(packing.levels), np.array(packing.groups)
    path = rank // np.array(static_degrees(packing.tree))
    here = np.flatnonzero((np.array(packing.microbatches) == microbatch) & (path[levels] == groups))
    order = here[np.argsort(-seconds[levels[here], here], kind="stable")]
    chosen: list[int] = order[: _MOVERS - 1].tolist() + order[_MOVERS - 1 :][-1:].tolist()
    return chosen


def _best_move(
    packing: Packing, i: int, seconds: Floats, num_bytes: Floats, free_bytes: float
) -> tuple[float, int, int, int, int] | None:
    """The best other place of one sequence: the sum of the slowest ranks there, then where it is."""
    _shift(packing, i, seconds, num_bytes, -1.0)
    slowest = packing.loads_s.max(axis=1)
    total = float(slowest.sum())
    best: tuple[float, int, int, int, int] | None = None
    for level, degree in enumerate(static_degrees(packing.tree)):
        if num_bytes[level, i] > free_bytes:
            continue
        loads = packing.loads_s.reshape(len(slowest), -1, degree).max(axis=2) + seconds[level, i]
        held = packing.held_bytes.reshape(len(slowest), -1, degree).max(axis=2) + num_bytes[level, i]
        sums = total + np.maximum(0.0, loads - slowest[:, None])
        sums[held > free_bytes] = np.inf
        at = int((sums + 1e-9 * loads).argmin())
        microbatch, group = divmod(at, sums.shape[1])
        if np.isfinite(sums[microbatch, group]):
            move = (float(sums[microbatch, group]), i, microbatch, level, group)
            best = move if best is None or move < best else best
    _shift(packing, i, seconds, num_bytes, 1.0)
    return best


def _shift(packing: Packing, i: int, seconds: Floats, num_bytes: Floats, sign: float) -> None:
    level, group = packing.levels[i], packing.groups[i]
    degree = packing.tree.degree(level)
    ranks = slice(group * degree, (group + 1) * degree)
    packing.loads_s[packing.microbatches[i], ranks] += sign * seconds[level, i]
    packing.held_bytes[packing.microbatches[i], ranks] += sign * num_bytes[level, i]
