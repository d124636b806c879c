"""A lower bound on the makespan of any plan for a batch, by one cost model; and the ideal, which is no bound on plans.

With M microbatches, whatever the placement:

- a rank computes, on average over ranks, at least the whole batch's work over the ranks, at the best point of the
  kernel's surface: every kernel is full, launches are free, nothing is copied;
- what M microbatches have of memory bounds what can be kept of all layers, and so what must be computed again: a
  fractional knapsack of seconds saved for bytes kept;
- in the forward pass of each microbatch all layers are gathered one after another, in the backward pass gathered again
  and reduced; at its start every rank idles until the root and the first layer are gathered, at its end until the
  last layer and the root are reduced;
- the rank with the most heads of the longest sequence has at least that share of it, and in each layer waits for the
  sequence's own exchanges before and after its attention, at the degree where this is least.

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
from nestsp.cost.comm import LinkTime
from nestsp.cost.compute import Direction
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.units import format_bytes, format_count

__all__ = ["Bound", "check_fits", "lower_bound"]

Floats = npt.NDArray[np.float64]


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
    work = _Work.of(np.array(batch.lengths, float), cost)
    num_ranks, layers = cost.tree.num_ranks, cost.shape.num_layers
    free = num_ranks * (cost.memory_per_rank_bytes - cost.memory.fixed)
    least = max(1, math.ceil(batch.num_tokens * cost.memory.least_bytes_per_token / free))
    idle = cost.root_gather_s + cost.layer_gather_s, cost.layer_reduce_s + cost.root_reduce_s
    gathered = cost.root_gather_s + layers * cost.layer_gather_s
    reduced = layers * (cost.layer_gather_s + cost.layer_reduce_s) + cost.root_reduce_s
    after = cost.update_s + cost.comm.ring_latency_s
    best = (math.inf, least)
    for number in range(least, least + max(1, batch.num_sequences)):
        again = work.recomputed_s(number * free)
        forward = max(number * gathered, number * idle[0] + work.forward_s / num_ranks)
        backward = max(number * reduced, number * idle[1] + (work.backward_s + again) / num_ranks)
        longest = number * sum(idle) + work.longest_s
        best = min(best, (max(forward + backward, longest) + after, number))
        if again == 0.0:
            break  # further microbatches only cost
    ideal = (work.forward_s + work.backward_s) / num_ranks + cost.update_s
    return Bound(best[0], ideal, best[1])


@dataclass(frozen=True, slots=True)
class _Work:
    """Rank-seconds of a batch at the best point of the surface.

    Attributes:
        forward_s: Of the forward pass.
        backward_s: Of head and backward pass, without recomputation.
        longest_s: Of the fullest rank of the longest sequence's group, at its best degree.
        input_bytes: What recomputation and the backward pass of one layer need whatever is kept.
        densities: float64 [n], falling: seconds that can be saved for each further byte kept ...
        capacities: float64 [n], ... up to so many bytes.
    """

    forward_s: float
    backward_s: float
    longest_s: float
    input_bytes: float
    densities: Floats
    capacities: Floats

    @classmethod
    def of(cls, lengths: Floats, cost: CostModel) -> _Work:
        compute, memory, layers, heads = cost.compute, cost.memory, cost.shape.num_layers, cost.shape.num_heads
        forward = layers * compute.best_attention_s("forward", heads, lengths, lengths**2)
        backward = layers * compute.best_attention_s("backward", heads, lengths, lengths**2)
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
            forward_s=float((linear + forward).sum()),
            backward_s=float((2 * linear + backward + head).sum()),
            longest_s=_longest_s(lengths.max(initial=0.0), cost),
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


def _longest_s(length: float, cost: CostModel) -> float:
    """Seconds of the fullest member of a group that has this sequence alone, at the degree where they are least.

    In each layer the group's exchange in, attention and exchange out follow one another, whatever other groups do
    meanwhile. A ring's steps follow one another too, but hide behind its attention or hide it.
    """
    compute, tree, layers = cost.compute, cost.tree, cost.shape.num_layers
    best = math.inf
    for level in range(tree.num_levels):
        degree = tree.degree(level)
        linear = math.floor(length / degree) * (3 * layers * compute.linear_s + cost.head_s)
        for ring in (ring for ring in range(1, degree + 1) if degree % ring == 0):
            heads = cost.head_fractions(level, ring).max() * cost.shape.num_heads / ring
            chain = 0.0
            passes: tuple[tuple[Direction, tuple[LinkTime, ...]], ...] = (
                ("forward", cost.comm.forward(level, ring)),
                ("backward", cost.comm.backward(level, ring)),
            )
            for direction, links in passes:
                kernel = float(compute.best_attention_s(direction, heads, length, length**2))
                exchanges = sum(link.seconds(length) for link in links)
                chain += kernel + exchanges if ring == 1 else max(kernel, exchanges)
            best = min(best, layers * chain + linear)
    return best
