"""A lower bound on the makespan of any plan for a batch, by one cost model; and the ideal, which is no bound on plans.

It bounds plans of every kind of group: Ulysses in one piece or in slices of heads, rings, hybrids. With M microbatches,
whatever the placement:

- a rank computes, on average over ranks, at least the whole batch's work over the ranks, at the best point of the
  kernel's surface: every kernel is full, launches are free, nothing is copied;
- a sequence that one rank, or one host, has no room for, or that alone would last longer there than the bound, is split
  among more: its copies by heads need memory, and its exchanges take their time on the links of all members, which
  carry one thing at a time;
- in each layer a rank has no exchange in flight while it computes the linear part; so its attention lasts at least as
  long as its exchanges on one class of links;
- what M microbatches have of memory bounds what can be kept of all layers, and so what must be computed again: a
  fractional knapsack of seconds saved for bytes kept;
- in the forward pass of each microbatch all layers are gathered one after another, in the backward pass gathered again
  and reduced, on the links that exchanges between hosts also take; at its start every rank idles until the root and the
  first layer are gathered, at its end until the last layer and the root are reduced;
- no microbatch is shorter than its gathers and reductions, so one of M lasts no longer than what the others leave, and
  all gathers and reductions leave the links of a group's members so much time for the exchanges of a sequence: one for
  which either is too short on some group must go to another;
- the rank with most of the longest sequence has at least that share of it, and in each layer its attention lasts as
  long as the sequence's own exchanges if they can hide each other, else as long as both, at the degree and as the kind
  where this is least among those it fits on.

The bound is the least over all M that memory admits. The ideal has no communication, perfect balance, and keeps
everything: the gap between the two is what memory and communication cost at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import ring_degrees
from nestsp.cost.compute import Direction
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.units import format_bytes, format_count

__all__ = ["Bound", "check_fits", "lower_bound"]

Floats = npt.NDArray[np.float64]

# The bound is searched for in steps of this factor, then by halvings of the one that it lies in.
_WIDER = 1.05
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Bound:
    """What no plan can undercut.

    Attributes:
        makespan_s: No plan is estimated faster.
        ideal_s: The same without communication, with perfect balance and without recomputation.
        num_microbatches: The number of microbatches that the bound has.
    """

    makespan_s: float
    ideal_s: float
    num_microbatches: int

    def gap(self, makespan_s: float) -> float:
        """How far a makespan is above the bound, as a fraction of the bound."""
        return makespan_s / self.makespan_s - 1


def check_fits(names: Sequence[int], lengths: Sequence[int], cost: CostModel) -> None:
    """Prove that every sequence fits into memory when it alone is split over all ranks.

    Raises:
        InfeasibleError: The model alone does not fit, or the longest sequence does not.
    """
    memory, limit, ranks = cost.memory, cost.memory_per_rank_bytes, cost.tree.num_ranks
    if memory.fixed >= limit:
        raise InfeasibleError(
            f"the model needs {format_bytes(memory.fixed)} on each of {ranks} ranks before any token "
            f"({format_bytes(memory.states)} of them states), but a rank may use {format_bytes(limit)}; "
            "take more ranks or devices with more memory"
        )
    if memory.states + memory.update > limit:
        raise InfeasibleError(
            f"the model needs {format_bytes(memory.states + memory.update)} on each of {ranks} ranks while the "
            f"optimizer updates it ({format_bytes(memory.states)} of them states), but a rank may use "
            f"{format_bytes(limit)}; take more ranks or devices with more memory"
        )
    if not len(lengths):
        return
    longest = int(np.argmax(lengths))
    length = int(lengths[longest])
    free = limit - memory.fixed
    need = -(-length // ranks) * memory.least_bytes_per_token
    if need > free:
        enough = math.ceil(length * memory.least_bytes_per_token / free)
        raise InfeasibleError(
            f"sequence {names[longest]} ({format_count(length)} tokens) needs {format_bytes(need)} on each of {ranks} "
            f"ranks, but {format_bytes(free)} are free; take about {format_count(enough)} ranks, or drop what is "
            f"longer than {format_count(int(free / memory.least_bytes_per_token) * ranks)} tokens"
        )


def lower_bound(batch: SequenceBatch, cost: CostModel) -> Bound:
    """Bound the makespan of all plans for a batch.

    Raises:
        InfeasibleError: No plan fits.
    """
    check_fits(batch.ids, batch.lengths, cost)
    lengths = np.array(batch.lengths, float)
    work, places = _Work.of(lengths, cost), _Places.of(lengths, cost)
    low, number = _least(work, places, math.inf, cost)
    # What a plan needs at least falls with the time that it may take. So no plan is faster than where both are equal.
    high = low
    while (needed := _least(work, places, high, cost))[0] > high:
        low, number, high = high, needed[1], _WIDER * high
    for _ in range(_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        needed = _least(work, places, middle, cost)
        if needed[0] > middle:
            low, number = middle, needed[1]
        else:
            high = middle
    ideal = (sum(work.attention_s) + 3 * work.linear_s + work.head_s) / cost.tree.num_ranks + cost.update_s
    return Bound(low, ideal, number)


def _least(work: _Work, places: _Places, most_s: float, cost: CostModel) -> tuple[float, int]:
    """The least makespan of plans that take no longer than a time, over all numbers of microbatches; and that number.

    Infinite if there is no such plan.
    """
    num_ranks, layers, memory = cost.tree.num_ranks, cost.shape.num_layers, cost.memory
    free = num_ranks * (cost.memory_per_rank_bytes - memory.fixed)
    split = places.within(most_s, math.inf)
    if split is None:
        return math.inf, 1
    split_bytes, whole_bytes = (memory.attention_bytes_per_token(split=split) for split in (True, False))
    needed = split.num_tokens * split_bytes + (work.num_tokens - split.num_tokens) * whole_bytes
    needed = max(needed, work.num_tokens * memory.least_bytes_per_token)
    least = max(1, math.ceil(needed / free))
    idle = cost.root_gather_s + cost.layer_gather_s, cost.layer_reduce_s + cost.root_reduce_s
    gathered = cost.root_gather_s + layers * cost.layer_gather_s
    reduced = layers * (cost.layer_gather_s + cost.layer_reduce_s) + cost.root_reduce_s
    after = cost.update_s + cost.comm.ring_latency_s
    with_gathers = 1 if cost.comm.crosses_hosts else 0  # the class of links that they take
    shortest = max(gathered + reduced, sum(idle))  # of all microbatches
    best = (math.inf, least)
    for number in range(least, least + max(1, work.num_sequences)):
        again = work.recomputed_s(number * free)
        others = (number - 1) * shortest
        split = places.within(most_s - after - others - sum(idle), most_s - after - number * (gathered + reduced))
        if split is None:
            break  # nor with more of them
        total = 0.0
        for links, waits, computes, attention, exchanges in (
            (gathered, idle[0], work.linear_s, work.attention_s[0], split.forward_s),
            (reduced, idle[1], 2 * work.linear_s + work.head_s + again, work.attention_s[1], split.backward_s),
        ):
            busy = (computes + max(attention, *exchanges)) / num_ranks
            total += max(number * links + exchanges[with_gathers] / num_ranks, number * waits + busy)
        longest = others + sum(idle) + split.longest_s
        best = min(best, (max(total, longest) + after, number))
        if again == 0.0 or number * (gathered + reduced) > best[0]:
            break  # further microbatches only cost
    return best


@dataclass(frozen=True, slots=True)
class _Work:
    """Rank-seconds of a batch at the best point of the surface.

    Attributes:
        attention_s: Of attention in the forward and in the backward pass.
        linear_s: Of the forward pass without attention; the backward pass has it twice.
        head_s: Of the head, in both passes.
        num_tokens: Of the batch.
        num_sequences: The same.
        input_bytes: What recomputation and the backward pass of one layer need whatever is kept.
        densities: float64 [n], falling: seconds that can be saved for each further byte kept ...
        capacities: float64 [n], ... up to so many bytes.
    """

    attention_s: tuple[float, float]
    linear_s: float
    head_s: float
    num_tokens: int
    num_sequences: int
    input_bytes: float
    densities: Floats
    capacities: Floats

    @classmethod
    def of(cls, lengths: Floats, cost: CostModel) -> _Work:
        compute, memory, layers, heads = cost.compute, cost.memory, cost.shape.num_layers, cost.shape.num_heads
        forward = layers * compute.best_attention_s("forward", heads, lengths, compute.squares(lengths))
        backward = layers * compute.best_attention_s("backward", heads, lengths, compute.squares(lengths))
        linear = layers * compute.linear_s * lengths
        head = cost.head_s * lengths
        # Per sequence, the most seconds saved for the bytes kept: of nothing, of the output, of whole layers.
        output = layers * memory.kept_output * lengths
        whole = layers * (memory.layer_local - memory.layer_input) * lengths
        at_once = (forward + linear) / whole
        first, second = forward / output, linear / np.maximum(whole - output, 1e-300)
        convex = (first >= second) & (whole > output)
        densities = np.concatenate([np.where(convex, first, at_once), np.where(convex, second, 0.0)])
        capacities = np.concatenate([np.where(convex, output, whole), np.where(convex, whole - output, 0.0)])
        order = np.argsort(-densities, kind="stable")
        return cls(
            attention_s=(float(forward.sum()), float(backward.sum())),
            linear_s=float(linear.sum()),
            head_s=float(head.sum()),
            num_tokens=int(lengths.sum()),
            num_sequences=len(lengths),
            input_bytes=float((layers * memory.layer_input + memory.gradients) * lengths.sum()),
            densities=densities[order],
            capacities=capacities[order],
        )

    def recomputed_s(self, free_bytes: float) -> float:
        """Rank-seconds that must be computed again if all microbatches together have so many bytes."""
        ends = np.cumsum(self.capacities)
        kept = np.clip(free_bytes - self.input_bytes - (ends - self.capacities), 0.0, self.capacities)
        saved = float((self.densities * kept).sum())
        every = float((self.densities * self.capacities).sum())
        return max(0.0, every - saved) if saved < every * (1 - 1e-12) else 0.0


@dataclass(frozen=True, slots=True)
class _Split:
    """What sequences cost at least that must be split, since one rank, or one host, is too small or too slow for them.

    Attributes:
        num_tokens: Of all that must be split.
        forward_s: Rank-seconds of exchanges in the forward pass, inside hosts and across them.
        backward_s: The same of the backward pass.
        longest_s: Of the fullest rank of the group of the sequence that lasts longest.
    """

    num_tokens: float
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]
    longest_s: float


@dataclass(frozen=True, slots=True)
class _Places:
    """Every sequence on a group of every level, float64 [levels, sequences] each.

    Attributes:
        lengths: float64 [sequences].
        fits: Whether the fullest rank has room; all are taken to, where none has.
        alone_s: Seconds of the fullest rank, of this sequence alone, as whatever kind of group. In each layer its
            exchange in, attention and exchange out follow one another, whatever other groups do meanwhile; in slices or
            round a ring they may hide each other.
        exchange_s: Rank-seconds of its exchanges, as the kind with the least; by pass, then inside and across hosts.
        links_s: Seconds that they take of each member's links, of the class that gathers take.
    """

    lengths: Floats
    fits: npt.NDArray[np.bool_]
    alone_s: Floats
    exchange_s: tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
    links_s: Floats

    @classmethod
    def of(cls, lengths: Floats, cost: CostModel) -> _Places:
        tree, compute, comm, memory = cost.tree, cost.compute, cost.comm, cost.memory
        layers, free = cost.shape.num_layers, cost.memory_per_rank_bytes - cost.memory.fixed
        shape = (tree.num_levels, len(lengths))
        fits, alone_s = np.zeros(shape, bool), np.zeros(shape)
        exchange_s = ((np.zeros(shape), np.zeros(shape)), (np.zeros(shape), np.zeros(shape)))
        both: tuple[Direction, Direction] = ("forward", "backward")
        for level in range(tree.num_levels):
            degree = tree.degree(level)
            local = np.floor(lengths / degree)
            fits[level] = np.maximum(lengths - degree, 0.0) * memory.least_stream_bytes(degree) <= free
            alone_s[level] = local * (3 * layers * compute.linear_s + cost.head_s)
            for index, direction in enumerate(both):
                exchanges = comm.forward if direction == "forward" else comm.backward
                own = []
                sums: tuple[list[float], list[float]] = ([], [])
                for ring in ring_degrees(degree):
                    links = exchanges(level, ring)
                    for network in (False, True):
                        sums[network].append(sum(link.s_per_token for link in links if link.network == network))
                    heads = float(cost.head_fractions(level, ring).max()) * cost.shape.num_heads
                    attention = compute.best_attention_s(direction, heads / ring, lengths, compute.squares(lengths))
                    sent = sum(link.latency_s for link in links) + sum(link.s_per_token for link in links) * lengths
                    in_one_piece = ring == 1 and heads <= 1
                    own.append(attention + sent if in_one_piece else np.maximum(attention, sent))
                alone_s[level] += layers * np.minimum.reduce(own)
                for network in (False, True):
                    exchange_s[index][network][level] += degree * layers * min(sums[network]) * lengths
        fits |= ~fits.any(axis=0)
        degrees = np.array([[tree.degree(level)] for level in range(tree.num_levels)])
        links_s = sum(of[comm.crosses_hosts] for of in exchange_s) / degrees
        return cls(lengths, fits, alone_s, exchange_s, links_s)

    def within(self, most_s: float, most_links_s: float) -> _Split | None:
        """What must be split in a plan where no sequence takes longer; None if one does on every group.

        Args:
            most_s: Of the ranks of its group.
            most_links_s: Of their links, of the class that gathers take.
        """
        allowed = self.fits & (self.alone_s <= most_s) & (self.links_s <= most_links_s)
        if not allowed.any(axis=0).all():
            return None
        sums = [[float(np.where(allowed, s, np.inf).min(axis=0).sum()) for s in of] for of in self.exchange_s]
        return _Split(
            num_tokens=float(self.lengths[~allowed[-1]].sum()),
            forward_s=(sums[0][0], sums[0][1]),
            backward_s=(sums[1][0], sums[1][1]),
            longest_s=float(np.where(allowed, self.alone_s, np.inf).min(axis=0).max(initial=0.0)),
        )
