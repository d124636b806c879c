"""Nested groups by search: any sequence on any group of the tree, several levels at once on the same ranks.

1. *Targets.* How long may each microbatch last? If nothing is lost, the batch lasts as long as all work at each
   sequence's cheapest degree that keeps within the targets, spread over all ranks. So targets decide degrees, and
   degrees the least total. All microbatches get one target, but the first may last longer or shorter by some
   difference: that of the longest sequences at each of their degrees, and a few between.
2. *Packing.* For each difference, the least total that `pack_within` can keep is found by bisection, if it beats what
   another difference gave.
3. *Finalists.* The best of each number of microbatches is finished (what recomputation keeps) and judged by the ground,
   leaves first, its gathers where it is fastest.
4. *Refinement*, unless a plan takes hardly longer than its gathers, which no placement changes. Every finalist is also
   tried with rings and hybrids, and in slices of heads; so are packings of further guesses, most of which weigh room
   against time, since ranks with equal tokens keep more and end in the head together. Of the best few the short
   sequences are dealt anew by what the ground says of each rank (`balance`), with the exchanges that nothing hides
   counted whole, in part or not at all; the best of those in turn gets its gathers placed and is balanced again, and is
   tried root first. All of it by rough verdicts: what comes out counts if it is faster when judged in full.
5. *Others.* So are the plans of every single level, BASP and greedy disjoint groups, but for those that provably end
   later: it is never slower than any of them as Ulysses in one piece.

The idea of planning nested groups for every batch is that of Wang et al., arXiv:2609.22755. Ours differs in the search,
in hard memory limits, in recomputation chosen with the placement, and in trees that are not powers of two. Price: about
a millisecond for a packing of 512 sequences on 64 ranks, a dozen of them for a batch; 10 to 30 ms for each of up to 62
plans of refinement on 64 ranks, in one microbatch, fewer where the step that is planned is short.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.plan import Plan
from nestsp.planners.balance import balance
from nestsp.planners.baselines import (
    BaspGroups,
    BatchAdaptive,
    DisjointGroups,
    Judged,
    judge_best,
    longest_first,
    refusal,
    static_degrees,
)
from nestsp.planners.ground import Ground, Prices, Verdict
from nestsp.planners.levels import Packing, pack_within

__all__ = ["NestedGroups"]

Floats = npt.NDArray[np.float64]
Tried = tuple[Plan, Verdict]

# How many of the longest sequences' own times may be the first microbatch's target, and how much longer or shorter than
# the others it may last beside those, as parts of the mean.
_LONGEST = 2
_DIFFERENCES = (-0.3, -0.15, 0.15, 0.3, 0.5, 0.75, 1.0)
# A target that is not kept may be so much larger the next time, and the total is found to this fraction.
_WIDER = (1.02, 1.08, 1.3, 2.0, 5.0)
_PRECISION = 1.5e-3
# Sequences placed by all packings of one guess and number of microbatches, and how many packings there are at least.
_PLACED = 24_000
_PACKINGS = 3
# Numbers of microbatches that are tried, unless one is estimated so much slower; and how many packings are judged, at
# most, times ranks, and at least.
_NUMBERS = 3
_HOPELESS = 1.05
_FINALISTS = 4
_JUDGED = 2_048
_LEAST_FINALISTS = 2
# A plan whose slowest ranks work for less of its time is not refined, if it takes hardly longer than its gathers.
_MOST = 0.85
_LONGER = 1.1
# Plans that are tried in refinement: times ranks squared, at most, and at least; half of them may be of other kinds or
# from further guesses, each of which gives so many. Trying one takes about so many seconds a microbatch, and more for
# each rank; all of it takes at most this part of the step that is planned. So many of the best plans are balanced,
# and the best of all in so many more rounds while it gains.
_TRIES = 1_000_000
_MOST_TRIES = 62
_LEAST_TRIES = 3
_A_GUESS = 2
_TRY_S = 5e-3
_TRY_S_A_RANK = 3.5e-4
_PART = 0.4
_STARTED = 3
_ROUNDS = 2
_GAIN = 1e-3
# Which part of themselves the exchanges that nothing hides and the head count when short sequences are dealt anew.
_PARTS = ((1.0, 0.0), (1.0, 0.5), (0.6, 0.5), (0.0, 0.0))


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
        most = max(_LEAST_FINALISTS, min(_FINALISTS, _JUDGED // ground.tree.num_ranks))
        finalists = [self._tried(plan) for plan in self._finalists(batch, ground.guesses, most)]
        best = self._refined(finalists, self._further(batch))
        below_s = math.inf if best is None else best[1].makespan_s
        lengths = np.array(batch.lengths, float)
        others = []
        for other in (BatchAdaptive(ground), BaspGroups(ground), DisjointGroups(ground)):
            for candidate in other.candidates(batch, below_s):
                others.append(dataclasses.replace(candidate, floor_s=ground.floor_s(candidate.packing, lengths)))
        judged = judge_best(ground, batch, others, below_s)
        if judged is not None:
            best = self._refined([(judged.plan, ground.evaluate(judged.plan))], ())
        if best is None:
            raise refusal(batch)
        return Judged(dataclasses.replace(best[0], planner="nsp"), best[1].makespan_s)

    def _tried(self, placed: Plan) -> Tried:
        """A placement finished, its gathers placed, with a rough verdict."""
        return self.ground.place_gathers(self.ground.finish(placed))

    def _finalists(self, batch: SequenceBatch, guesses: Sequence[Prices], most: int) -> list[Plan]:
        """The best packings of some guesses as plans, not finished."""
        finalists = []
        for packing in self.packings(batch, guesses, most):
            plan = _leaves_first(packing.plan(batch, "nsp"))
            beyond_heads = self.ground.tree.degree(min(packing.levels)) > self.ground.num_heads
            finalists.append(self.ground.as_any_kind(plan) if beyond_heads else plan)
        return finalists

    def _num_tries(self, plan: Plan, makespan_s: float) -> int:
        """How many plans may be tried to refine one that lasts so long."""
        num_ranks = self.ground.tree.num_ranks
        in_time = int(_PART * makespan_s / len(plan.microbatches) / (_TRY_S + _TRY_S_A_RANK * num_ranks))
        return max(_LEAST_TRIES, min(_MOST_TRIES, _TRIES // num_ranks**2, in_time))

    def _further(self, batch: SequenceBatch) -> Iterator[Plan]:
        """More finalists, of any kind, not finished; each guess is searched with when its first is asked for."""
        for guess in self.ground.more_guesses:
            yield from map(self.ground.as_any_kind, self._finalists(batch, (guess,), _A_GUESS))

    def _refined(self, tried: list[Tried], further: Iterable[Plan]) -> Tried | None:
        """The best of some plans after refinement, judged in full; None if none fits.

        Args:
            tried: The plans, with rough verdicts.
            further: Plans that are not finished, to be tried beside them.
        """
        fitting = sorted((each for each in tried if math.isfinite(each[1].makespan_s)), key=_makespan)
        if not fitting:
            return None
        plain = self.ground.judged(fitting[0][0])
        if not self._worth_refining(*plain):
            return plain
        num_tries = self._num_tries(plain[0], plain[1].makespan_s)
        tries = iter(range(num_tries))
        placed = [plan for plan, _ in fitting]
        others = itertools.chain(map(self.ground.as_any_kind, placed), further, map(self.ground.in_slices, placed))
        half = itertools.islice(tries, num_tries // 2)
        started = fitting + [self._tried(plan) for _, plan in zip(half, others, strict=False)]
        started = sorted(started, key=_makespan)[:_STARTED]
        plan, verdict = min((self._balanced(*each, tries) for each in started), key=_makespan)
        for _ in range(_ROUNDS):
            was_s = verdict.makespan_s
            plan, verdict = min((plan, verdict), self.ground.place_gathers(plan), key=_makespan)
            plan, verdict = self._balanced(plan, verdict, tries)
            if verdict.makespan_s > (1 - _GAIN) * was_s:
                break
        if plan.level_order[0] != 0:
            root_first = dataclasses.replace(plan, level_order=tuple(sorted(plan.level_order)))
            plan, verdict = min((plan, verdict), self.ground.place_gathers(root_first), key=_makespan)
        return min(plain, self.ground.judged(plan), key=_makespan)

    def _worth_refining(self, plan: Plan, verdict: Verdict) -> bool:
        """The slowest ranks' own work fills most of the time, or more than gathers do: these no placement changes."""
        gathers_s = len(plan.microbatches) * (self.ground.gathers_s + self.ground.fixed_s)
        own_s = float(verdict.own_s.max(axis=1).sum())
        return own_s > _MOST * verdict.makespan_s or verdict.makespan_s > _LONGER * gathers_s

    def _balanced(self, plan: Plan, verdict: Verdict, tries: Iterator[int]) -> Tried:
        """A plan with its short sequences dealt anew where that makes it faster."""
        for exposed_part, head_part in _PARTS:
            if next(tries, None) is None:
                break
            loads_s = verdict.layers_s + exposed_part * verdict.unhidden_s
            dealt = balance(plan, loads_s, self.ground, head_part)
            if dealt is not None:
                finished = self.ground.finish(dealt)
                plan, verdict = min((plan, verdict), (finished, self.ground.evaluate_roughly(finished)), key=_makespan)
        return plan, verdict

    def packings(self, batch: SequenceBatch, guesses: Sequence[Prices], most: int) -> list[Packing]:
        """The finalists of the search: those estimated fastest, of several guesses and numbers of microbatches.

        Args:
            batch: The sequences.
            guesses: What to search with.
            most: How many finalists there may be.
        """
        ground = self.ground
        if not batch.num_sequences or not guesses:
            return []
        searches = [_Search.of(ground, batch, guess) for guess in guesses]
        found: list[tuple[float, Packing]] = []
        least = ground.least_microbatches(batch)
        best_s, numbers = math.inf, 0
        for number in range(least, least + batch.num_sequences + 2):
            if number * (ground.gathers_s + ground.fixed_s) >= best_s:
                break
            here: list[tuple[float, Packing]] = []
            for search in searches:
                nothing_lost = search.least_s(math.inf) + number * ground.fixed_s
                if ground.layer_bytes or nothing_lost < best_s:
                    here += [(search.estimate_s(packing), packing) for packing in search.best(number)]
            found += here
            numbers += bool(found)
            this_s = min((seconds for seconds, _ in here), default=math.inf)
            if numbers == _NUMBERS or (found and this_s >= _HOPELESS * best_s):
                break
            best_s = min(best_s, this_s)
        best: list[Packing] = []
        for _, packing in sorted(found, key=_first):
            if len(best) < most and not any(packing.places == other.places for other in best):
                best.append(packing)
        return best


@dataclass(frozen=True, slots=True)
class _Search:
    """A batch with its prices by one guess.

    Attributes:
        guess: The guess.
        order: Positions, longest first.
        seconds: float64 [levels, sequences], what each adds to a rank of a group of each level.
        work: float64 [levels, sequences], the same of all ranks of the group, over all ranks; infinite where the
            sequence may not go.
        prices: Seconds and bytes as lists, these too infinite there.
        whole_s: float64 [levels, sequences], the ground's `whole` prices.
    """

    ground: Ground
    guess: Prices
    order: list[int]
    seconds: Floats
    work: Floats
    prices: tuple[list[list[float]], list[list[float]]]
    whole_s: Floats

    @classmethod
    def of(cls, ground: Ground, batch: SequenceBatch, guess: Prices) -> _Search:
        lengths = np.array(batch.lengths, float)
        seconds, num_bytes = guess.seconds(lengths), ground.bytes(lengths)
        if guess.inside:
            small = (num_bytes[ground.num_crossing :] <= ground.free_bytes).any(axis=0)
            num_bytes[: ground.num_crossing, small] = np.inf
        num_bytes[1:, longest_first(batch)[: guess.num_whole]] = np.inf
        for_no_host = ~(num_bytes[ground.num_crossing :] <= ground.free_bytes).any(axis=0)
        num_bytes[np.ix_(ground.degrees[:, 0] < guess.wide_part * ground.tree.num_ranks, for_no_host)] = np.inf
        degrees = np.array(static_degrees(ground.tree), float)[:, None]
        work = np.where(num_bytes <= ground.free_bytes, seconds * degrees / ground.tree.num_ranks, np.inf)
        prices = seconds.tolist(), num_bytes.tolist()
        return cls(ground, guess, longest_first(batch), seconds, work, prices, ground.whole.seconds(lengths))

    def least_s(self, most_s: float) -> float:
        """Sum of all microbatches if nothing is lost and no sequence lasts longer; infinite if one must."""
        within: Floats = np.where(self.seconds <= most_s, self.work, np.inf)
        return float(within.min(axis=0).sum())

    def estimate_s(self, packing: Packing) -> float:
        """Seconds of a finished plan of a packing, about, comparable with those of other guesses."""
        index = np.arange(len(packing.levels))
        levels, degrees = np.array(packing.levels), np.array(static_degrees(self.ground.tree), float)
        more = (self.whole_s - self.seconds)[levels, index] * degrees[levels]
        each = np.bincount(packing.microbatches, more, len(packing.loads_s)) / self.ground.tree.num_ranks
        return self.ground.estimate_s(packing.loads_s.max(axis=1) + each, packing.held_bytes)

    def best(self, num_microbatches: int) -> list[Packing]:
        """The packings with the least sum of slowest ranks: of equal targets, and if that is less, of others."""
        even = self.least_s(math.inf) / num_microbatches
        for _ in range(4):
            total = self.least_s(even)
            if math.isfinite(total):
                even = total / num_microbatches
            else:  # some sequence takes longer at any degree
                even = max(even, float(np.where(np.isfinite(self.work), self.seconds, np.inf).min(axis=0).max()))
        tries = iter(range(max(_PACKINGS, _PLACED // len(self.order))))
        equal = best = self._bisect(num_microbatches, even, 0.0, None, tries)
        for longer in self._differences(even) if num_microbatches > 1 else ():
            best = self._bisect(num_microbatches, even, longer, best, tries)
        return [packing for packing in (equal, best if best is not equal else None) if packing is not None]

    def _differences(self, even_s: float) -> list[float]:
        """By how much the first microbatch may last longer than the others."""
        columns = self.order[:_LONGEST]
        times = self.seconds[:, columns][np.isfinite(self.work[:, columns])]
        own = sorted({float(t) - even_s for t in times if even_s < t < 5 * even_s})
        return [*own, *(part * even_s for part in _DIFFERENCES)]

    def _bisect(
        self, num_microbatches: int, even_s: float, longer_s: float, best: Packing | None, tries: Iterator[int]
    ) -> Packing | None:
        """The packing with the least total of this difference, or the best so far if that is no worse."""
        low = max(self.least_s(even_s + max(longer_s, 0.0)), abs(longer_s))
        if not math.isfinite(low):
            low = num_microbatches * even_s + longer_s
        highs = [low * wider for wider in _WIDER]
        if best is not None:
            highs = [best.slowest_s * (1 - _PRECISION)]
            if highs[0] <= low or next(tries, None) is None:
                return best
        for high in highs:
            if best is None and longer_s and next(tries, None) is None:
                return None
            packing = self._pack(num_microbatches, high, longer_s)
            if packing is not None:
                break
            low = high
        else:
            return best
        while packing.slowest_s > low * (1 + _PRECISION) and next(tries, None) is not None:
            middle = math.sqrt(low * packing.slowest_s)
            closer = self._pack(num_microbatches, middle, longer_s)
            if closer is None:
                low = middle
            else:
                packing = closer
        return packing

    def _pack(self, num_microbatches: int, total_s: float, longer_s: float) -> Packing | None:
        others = (total_s - longer_s) / num_microbatches
        if min(others, others + longer_s) <= self.ground.gathers_s * (num_microbatches > 1):
            return None
        targets = [others + longer_s, *[others] * (num_microbatches - 1)]
        ground, seconds = self.ground, self.prices[0]
        num_bytes = self._bytes_within(self.guess.most_part * max(targets))
        return pack_within(ground.tree, targets, self.order, seconds, num_bytes, ground.free_bytes, self.guess.room_s)

    def _bytes_within(self, most_s: float) -> list[list[float]]:
        """The prices in bytes, infinite where a sequence would take longer of its ranks, unless these are all."""
        num_bytes = self.prices[1]
        if self.guess.most_part == 1.0:
            return num_bytes
        num_bytes = [num_bytes[0], *(row.copy() for row in num_bytes[1:])]
        for level, i in np.argwhere(self.seconds[1:] > most_s).tolist():
            num_bytes[level + 1][i] = math.inf
        return num_bytes


def _first(pair: tuple[float, Packing]) -> float:
    return pair[0]


def _makespan(pair: Tried) -> float:
    return pair[1].makespan_s


def _leaves_first(plan: Plan) -> Plan:
    """The smallest groups take their turns first, if some rank works for two: their exchanges are over sooner."""
    for microbatch in plan.microbatches:
        count = np.zeros(plan.tree.num_ranks, np.int64)
        for placement in microbatch.placements:
            count[placement.group.first_rank : placement.group.ranks.stop] += placement.group.degree > 1
        if count.max() > 1:
            return dataclasses.replace(plan, level_order=tuple(sorted(plan.level_order, reverse=True)))
    return plan
