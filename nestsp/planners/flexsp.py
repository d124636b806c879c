"""FlexSP: disjoint groups of several degrees in each microbatch, by mixed-integer programming.

The method of Wang et al., arXiv:2412.01523, with their names for the steps:

1. *Blaster.* The batch, longest first, is cut into M microbatches of consecutive lengths, with about equal tokens or a
   longer or shorter first one; M is searched from the least that memory admits upward, while the total falls.
2. *Bucketing.* The sequences of a microbatch fall into at most 16 buckets of consecutive lengths, by dynamic
   programming so that rounding each length up to its bucket's longest adds as few tokens as possible.
3. *Programme.* Minimise the time of the slowest group: which groups of which degree exist, and how many sequences of
   each bucket each has, within memory and the number of ranks.
4. *Adjustment.* Groups get the real sequences of their buckets.

How ours differs: time limits are a limit on nodes, so a plan does not depend on the machine; groups of one degree are
ordered, which removes most symmetry; the solver starts from the greedy plan of `DisjointGroups`, below which it never
falls; and each group's real sequences are exchanged for what balances better at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.plan import Plan
from nestsp.planners.baselines import (
    Candidate,
    DisjointGroups,
    Judged,
    cut_by_tokens,
    join_packings,
    judge_best,
    judged_or_refused,
    static_degrees,
)
from nestsp.planners.ground import Ground
from nestsp.planners.levels import Packing

__all__ = ["FlexSPGroups", "bucket_lengths"]

Floats = npt.NDArray[np.float64]

_NUM_BUCKETS = 16
# Parts of all tokens that the first microbatch may have, beside equal ones and the longest sequence alone: these two
# are solved, and the greedily best one of all.
_FIRST_PARTS = (0.2, 0.3, 0.4, 0.6, 0.7)


@dataclass(frozen=True, slots=True)
class FlexSPGroups:
    """Disjoint groups by mixed-integer programme.

    Attributes:
        ground: What to plan on.
        max_nodes: Nodes that the solver may look at for each programme.
        max_more: How many more microbatches than the least are tried.
    """

    ground: Ground
    max_nodes: int = 50
    max_more: int = 2

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

    def candidates(self, batch: SequenceBatch) -> list[Candidate]:
        """A packing for each number of microbatches that was tried, and the greedy ones."""
        ground = self.ground
        lengths = np.array(batch.lengths, float)
        seconds, sizes = ground.seconds(lengths), ground.bytes(lengths)
        greedy = DisjointGroups(ground)
        found = greedy.candidates(batch)
        least = ground.least_microbatches(batch)
        alone = max(batch.lengths, default=0) / max(1, batch.num_tokens)
        best = np.inf
        for number in range(least, least + self.max_more + 1):
            cuts, chosen = [], []
            for first in (None, alone, *_FIRST_PARTS) if number > 1 else (None,):
                parts = cut_by_tokens(batch, number, first)
                packed = [greedy.pack_part(part, seconds, sizes) for part in parts]
                tried = [(part, packing) for part, packing in zip(parts, packed, strict=True) if packing is not None]
                if len(tried) == len(parts):
                    cuts.append(tried)
                    chosen += [tried] if first in (None, alone) else []
            if not cuts:
                continue
            total = np.inf
            greedily_best = min(cuts, key=_slowest_s)
            chosen += [greedily_best] if all(cut is not greedily_best for cut in chosen) else []
            for starts in chosen:
                solved = [(part, self._solve(batch, part, start, seconds, sizes)) for part, start in starts]
                total = min(total, _slowest_s(solved) + ground.fixed_s * len(solved))
                found.append(Candidate("flexsp", join_packings(ground.tree, batch, solved)))
            if total >= best:
                break
            best = total
        return found

    def _solve(self, batch: SequenceBatch, part: list[int], start: Packing, seconds: Floats, sizes: Floats) -> Packing:
        from nestsp.planners.programme import solve_programme  # imports the solver: 0.1 s, and needed here alone

        ground, tree = self.ground, self.ground.tree
        buckets = bucket_lengths([batch.lengths[i] for i in part], _NUM_BUCKETS)
        members: list[list[int]] = []
        at = 0
        for count in buckets:
            members.append(part[at : at + count])
            at += count
        longest = np.array([batch.lengths[of[0]] for of in members], float)
        degrees = static_degrees(tree)
        levels = np.repeat(np.arange(tree.num_levels), [tree.num_ranks // degree for degree in degrees])

        chosen = solve_programme(
            ground.seconds(longest)[:, :],
            ground.bytes(longest),
            np.array([len(of) for of in members]),
            levels,
            np.array(degrees),
            ground.free_bytes,
            start.slowest_s,
            self.max_nodes,
        )
        if chosen is None:
            return start
        packing = _adjust(ground, part, members, chosen, levels, seconds, sizes)
        return packing if packing is not None and packing.slowest_s < start.slowest_s else start


def _slowest_s(parts: list[tuple[list[int], Packing]]) -> float:
    return sum(packing.slowest_s for _, packing in parts)


def bucket_lengths(lengths: list[int], num_buckets: int) -> list[int]:
    """How many sequences each bucket has, of lengths that fall.

    Rounding every length up to the longest of its bucket adds as few tokens as any such cut can.

    >>> bucket_lengths([100, 99, 10, 9, 9], 2)
    [2, 3]
    """
    distinct, counts = np.unique(-np.array(lengths), return_counts=True)
    values = -distinct
    num, used = len(values), min(num_buckets, len(values))
    heads = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    # cost[j]: least tokens added by the first j distinct lengths; a bucket i..j-1 adds values[i]·n - tokens
    cost = np.full(num + 1, np.inf)
    cost[0] = 0
    choices = []
    for _ in range(used):
        following, choice = np.full(num + 1, np.inf), np.zeros(num + 1, np.int64)
        for j in range(1, num + 1):
            added = cost[:j] + values[:j] * (heads[j] - heads[:j]) - (tokens[j] - tokens[:j])
            choice[j] = int(added.argmin())
            following[j] = added[choice[j]]
        cost = following
        choices.append(choice)
    ends = [num]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    edges = sorted(set(ends))
    return [int(heads[stop] - heads[begin]) for begin, stop in pairwise(edges)]


def _adjust(
    ground: Ground,
    part: list[int],
    members: list[list[int]],
    chosen: npt.NDArray[np.int64],
    levels: npt.NDArray[np.int64],
    seconds: Floats,
    sizes: Floats,
) -> Packing | None:
    """Lay the groups side by side, largest first; deal out each bucket's sequences, longest to the least loaded."""
    tree = ground.tree
    used = [p for p in range(len(levels)) if chosen[p].any()]
    first, place = 0, {}
    for p in used:  # falling degree, so that each is aligned
        degree = tree.degree(int(levels[p]))
        place[p] = first // degree
        first += degree
    if first > tree.num_ranks:
        return None
    load, held = dict.fromkeys(used, 0.0), dict.fromkeys(used, 0.0)
    level_of, microbatches, group_of = [0] * seconds.shape[1], [0] * seconds.shape[1], [0] * seconds.shape[1]
    for q, of in enumerate(members):
        room = {p: int(chosen[p, q]) for p in used if chosen[p, q]}
        for i in of:
            p = min(room, key=lambda p: (load[p], p))
            level = int(levels[p])
            load[p] += float(seconds[level, i])
            held[p] += float(sizes[level, i])
            level_of[i], group_of[i] = level, place[p]
            room[p] -= 1
            if not room[p]:
                del room[p]
    if any(size > ground.free_bytes for size in held.values()):
        return None
    loads, bytes_held = np.zeros((1, tree.num_ranks)), np.zeros((1, tree.num_ranks))
    for p in used:
        degree = tree.degree(int(levels[p]))
        ranks = slice(place[p] * degree, (place[p] + 1) * degree)
        loads[0, ranks], bytes_held[0, ranks] = load[p], held[p]
    assert part
    return Packing(tree, level_of, microbatches, group_of, loads, bytes_held)
