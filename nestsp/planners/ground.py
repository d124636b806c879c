"""What a planner plans on: prices for its search, and a judge for its finalists.

Search needs thousands of answers a second, so it uses a closed form. A sequence of ``s`` tokens on a group of some
level adds ``(linear_s + exchange_s) × s + square_s × s²`` seconds and ``bytes_per_token × s`` bytes to each of the
group's ranks; what a rank works for adds up over the groups on its path; a microbatch lasts ``fixed_s`` and as long as
its slowest rank. Finished plans are compared by `Ground.evaluate`, which sees everything.

`cost_ground` is the ground of a cost model: it judges by simulation. A ground may also come from elsewhere, as that of
FlexSP's published model does in the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree, ring_degrees
from nestsp.cost.bound import check_fits
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.plan import GatherTurns, Plan
from nestsp.planners.kinds import with_kinds
from nestsp.planners.levels import Packing
from nestsp.planners.recompute import spend_memory
from nestsp.schedule import make_schedule
from nestsp.simulate import Timeline, place_gathers, simulate

__all__ = ["Ground", "Prices", "Verdict", "cost_ground", "gather_choices"]

# Layers of a kind that are walked where a rough verdict is enough: after these most clocks have their pace.
_ROUGH_LAYERS = 12
# Choices times ranks that are walked side by side, as long as calls of numpy cost more than their numbers; and how many
# choices there are at least.
_SIDE_BY_SIDE = 512
_LEAST_CHOICES = 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds for each level: a guess at what a finished plan will spare and hide, or what it cannot.

    Attributes:
        linear_s: Per token, what is counted of the exchanges included.
        square_s: Per squared token.
        squares: Lengths squared, less what a sliding window cuts off.
        inside: Sequences that fit into a group inside a host go to no group that crosses hosts.
        room_s: Seconds that a byte counts for when the next group is chosen: above 0, long sequences, which take more
            time for each byte, go where there is more time than room, so that ranks end with more equal tokens.
        most_part: What part of a microbatch's time one sequence may take of its ranks, unless these are all.
        num_whole: So many of the longest sequences go to all ranks.
        wide_part: What part of all ranks those sequences get at least that fit into no group inside a host.
    """

    linear_s: tuple[float, ...]
    square_s: tuple[float, ...]
    squares: Callable[[Floats], Floats]
    inside: bool = False
    room_s: float = 0.0
    most_part: float = 1.0
    num_whole: int = 0
    wide_part: float = 0.0

    def seconds(self, lengths: Floats) -> Floats:
        """float64 [levels, sequences], what each sequence adds to each rank of a group of each level."""
        linear, square = np.array(self.linear_s)[:, None], np.array(self.square_s)[:, None]
        seconds: Floats = linear * lengths + square * self.squares(lengths)
        return seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a ground says of a finished plan.

    Attributes:
        makespan_s: Seconds; infinite if it does not fit into memory.
        layers_s: float64 [microbatches, ranks], what each rank's own computation takes, head and loss left out.
        unhidden_s: float64 [microbatches, ranks], what its groups' exchanges add, as far as nothing hides them.
        is_rough: It comes from a few layers, and may say a percent too little.
    """

    makespan_s: float
    layers_s: Floats
    unhidden_s: Floats
    is_rough: bool = False

    @property
    def own_s(self) -> Floats:
        """float64 [microbatches, ranks], what each rank's own work takes, whatever others do meanwhile."""
        return self.layers_s + self.unhidden_s


@dataclass(frozen=True, slots=True)
class Ground:
    """Prices of a level's groups, and what judges a plan.

    Attributes:
        tree: The groups.
        linear_s: For each level, seconds per token, exchanges left out.
        square_s: For each level, seconds per squared token.
        squares: Lengths squared, less what a sliding window cuts off.
        exchange_s: For each level, seconds of exchanges per token.
        bytes_per_token: For each level, bytes on each rank of a group for each token of a sequence.
        free_bytes: What a rank may hold in one microbatch.
        fixed_s: Seconds of a microbatch beside its work.
        least_part: What part of the closed form a finished plan has at least, where no rank has two groups and so
            nothing hides an exchange.
        guesses: Prices to search with: what is kept and what is hidden is decided later.
        more_guesses: Further ones, for batches that are worth a longer search.
        whole: Prices if nothing is spared and nothing hidden; packings of several guesses are compared by them.
        floor: Prices that no finished plan undercuts where no rank has two groups, kept layers left out.
        head_s: Seconds per token of head and loss, on the rank that holds it.
        gathers_s: Of all gathers and reductions of a microbatch, what `fixed_s` has not; it lasts at least so long.
        layer_s: Seconds per token that each kept layer spares; zero where nothing can be kept.
        layer_bytes: Bytes per token that it costs.
        token_bytes: Bytes per token on the rank that holds it, whatever is kept.
        num_layers: How many could be kept.
        num_crossing: Levels whose groups cross hosts; those after them do not.
        check: Raises what tells a user why a batch does not fit at all.
        num_heads: A group of more ranks gains nothing unless it is of another kind.
        in_slices: The same placement, each group in the slices of heads that are fastest for it alone.
        as_any_kind: The same placement, each group of the kind, rings and hybrids among them, that is fastest for it.
        finish: Makes a placement a plan to be judged: what recomputation keeps is decided here.
        evaluate: Judges a finished plan.
        evaluate_roughly: The same in less time, from a few layers.
        place_gathers: The same plan with its gathers where it is fastest, roughly, and the rough verdict on it.
    """

    tree: GroupTree
    linear_s: tuple[float, ...]
    square_s: tuple[float, ...]
    squares: Callable[[Floats], Floats]
    exchange_s: tuple[float, ...]
    bytes_per_token: tuple[float, ...]
    free_bytes: float
    fixed_s: float
    least_part: float
    guesses: tuple[Prices, ...]
    more_guesses: tuple[Prices, ...]
    whole: Prices
    floor: Prices
    head_s: float
    gathers_s: float
    layer_s: float
    layer_bytes: float
    token_bytes: float
    num_layers: int
    num_crossing: int
    num_heads: int
    check: Callable[[SequenceBatch], None]
    in_slices: Callable[[Plan], Plan]
    as_any_kind: Callable[[Plan], Plan]
    finish: Callable[[Plan], Plan]
    evaluate: Callable[[Plan], Verdict]
    evaluate_roughly: Callable[[Plan], Verdict]
    place_gathers: Callable[[Plan], tuple[Plan, Verdict]]

    def judged(self, plan: Plan) -> tuple[Plan, Verdict]:
        """A finished plan with its gathers where they are best, and the verdict on it."""
        plan, verdict = self.place_gathers(plan)
        return plan, self.evaluate(plan) if verdict.is_rough else verdict

    def seconds(self, lengths: Floats) -> Floats:
        """float64 [levels, sequences], what each sequence adds to each rank of a group of each level."""
        linear = np.array(self.linear_s) + np.array(self.exchange_s)
        seconds: Floats = linear[:, None] * lengths + np.array(self.square_s)[:, None] * self.squares(lengths)
        return seconds

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """int64 [levels, 1], ranks of a group of each level."""
        return np.array([[self.tree.degree(level)] for level in range(self.tree.num_levels)], dtype=np.int64)

    def bytes(self, lengths: Floats) -> Floats:
        """float64 [levels, sequences]; a split sequence counts a token more for each rank, since parts are whole."""
        more = np.where(self.degrees > 1, self.degrees, 0)
        return np.array(self.bytes_per_token)[:, None] * (lengths + more)

    def kept_layers(self, tokens: Floats) -> Floats:
        """How many layers a rank with so many tokens has room for, at most."""
        if not self.layer_bytes:
            return np.zeros_like(tokens)
        room = self.free_bytes - self.token_bytes * tokens
        kept: Floats = np.clip(room / (np.maximum(tokens, 1.0) * self.layer_bytes), 0.0, float(self.num_layers))
        return kept

    def estimate_s(self, slowest_s: Floats, held_bytes: Floats) -> float:
        """Seconds of a finished plan, about: as many layers are kept as its fullest rank has room for.

        Args:
            slowest_s: float64 [microbatches], the slowest rank of each.
            held_bytes: float64 [microbatches, ranks].
        """
        tokens = held_bytes.max(axis=1) / self.bytes_per_token[-1]
        spared = self.kept_layers(tokens) * self.layer_s * tokens
        return float(np.maximum(slowest_s - spared, self.gathers_s).sum()) + self.fixed_s * len(slowest_s)

    def floor_s(self, packing: Packing, lengths: Floats) -> float:
        """Seconds that no finished plan of a packing undercuts, if no rank has two groups."""
        num_microbatches, num_ranks = len(packing.loads_s), self.tree.num_ranks
        seconds, levels = self.floor.seconds(lengths), np.array(packing.levels, dtype=np.int64)
        numbers, groups = (np.array(each, dtype=np.int64) for each in (packing.microbatches, packing.groups))
        busy, held = np.zeros((num_microbatches, num_ranks)), np.zeros((num_microbatches, num_ranks))
        for level in np.unique(levels).tolist():
            degree = self.tree.degree(level)
            here = np.flatnonzero(levels == level)
            places, size = numbers[here] * (num_ranks // degree) + groups[here], num_microbatches * num_ranks // degree
            for total, each in ((busy, seconds[level, here]), (held, lengths[here] / degree)):
                total += np.repeat(np.bincount(places, each, size), degree).reshape(total.shape)
        held = np.maximum(held - 1.0, 0.0)  # shares of a stream differ by one token
        kept = self.kept_layers(held.max(axis=1))[:, None]
        least: Floats = (busy - self.linear_s[-1] - kept * self.layer_s * held).max(axis=1, initial=0.0)
        lasts = float(np.maximum(least, self.gathers_s).sum())
        return lasts + self.fixed_s * num_microbatches

    def work_s(self, lengths: Floats) -> Floats:
        """float64 [levels, sequences], rank-seconds that each sequence takes at least, if no rank has two groups."""
        work: Floats = self.floor.seconds(lengths) * self.degrees
        return work

    def mean_floor_s(self, work_s: float, num_tokens: int, num_microbatches: int) -> float:
        """Seconds that no finished plan of so many rank-seconds undercuts, if no rank has two groups.

        The slowest rank of a microbatch is no faster than the mean; the fullest rank, on which it depends how much is
        kept, no emptier.
        """
        busy = work_s / self.tree.num_ranks / num_microbatches
        held = num_tokens / self.tree.num_ranks / num_microbatches
        kept = float(self.kept_layers(np.array(max(held - 1.0, 0.0))))
        least = busy - self.linear_s[-1] - kept * self.layer_s * held
        return num_microbatches * (max(least, self.gathers_s) + self.fixed_s)

    def least_microbatches(self, batch: SequenceBatch) -> int:
        """The least number of microbatches that memory admits."""
        per_token = min(price * self.tree.degree(level) for level, price in enumerate(self.bytes_per_token))
        return max(1, int(-(-batch.num_tokens * per_token // (self.free_bytes * self.tree.num_ranks))))


def cost_ground(cost: CostModel, *, streaming: bool = True, rings: bool = True) -> Ground:
    """The ground of a cost model, for plans in which every layer is recomputed.

    Args:
        cost: The model, cluster and hardware.
        streaming: Whether exchanges are hidden behind other groups' attention.
        rings: Whether groups may be rings and hybrids.

    Raises:
        InfeasibleError: The model itself does not fit.
    """
    check_fits((), (), cost)
    shape, compute, comm, memory, tree = cost.shape, cost.compute, cost.comm, cost.memory, cost.tree
    layers, heads = shape.num_layers, shape.num_heads
    unit = np.ones(1)
    forward = float(compute.best_attention_s("forward", heads, 0 * unit, unit)[0])
    backward = float(compute.best_attention_s("backward", heads, 0 * unit, unit)[0])
    forward_linear = float(compute.best_attention_s("forward", heads, unit, 0 * unit)[0])
    backward_linear = float(compute.best_attention_s("backward", heads, unit, 0 * unit)[0])
    rings = rings and not shape.window
    degrees = [tree.degree(level) for level in range(tree.num_levels)]
    shares = [float(cost.head_fractions(level).max()) for level in range(tree.num_levels)]
    # More ranks than heads gain nothing as Ulysses; search may count on a hybrid there.
    best_shares = [
        min(float(cost.head_fractions(level, ring).max()) / ring for ring in ring_degrees(degree))
        if rings and degree > heads
        else shares[level]
        for level, degree in enumerate(degrees)
    ]
    num_bytes = [memory.stream_bytes(degree) for degree in degrees]

    def exchanges(forwards: int, kept: bool) -> list[float]:
        links = [(*forwards * comm.forward(level), *comm.backward(level, kept=kept)) for level in range(len(degrees))]
        return [layers * sum(link.s_per_token for link in each) for each in links]

    def prices(
        forwards: int,
        *,
        head: bool,
        exposed: float,
        kept: bool = True,
        room: float = 0.0,
        shares: Sequence[float] = best_shares,
        **others: Any,
    ) -> Prices:
        """Of plans that run the attention of the forward pass so many times.

        Args:
            forwards: How often.
            head: Whether the head counts.
            exposed: What part of the exchanges nothing hides.
            kept: Whether attention's outputs are.
            room: The price of room, in the linear work of the tokens that would fill it.
            shares: What part of a sequence's attention the busiest rank of each level's groups has.
            others: See `Prices`.
        """
        per_token = 4 * layers * compute.linear_s + cost.head_s * head
        attention = layers * (forwards * forward_linear + backward_linear)
        exchange = exchanges(forwards, kept)
        return Prices(
            linear_s=tuple(
                per_token / degree + attention * share + exposed * exchange[level]
                for level, (degree, share) in enumerate(zip(degrees, shares, strict=True))
            ),
            square_s=tuple(layers * (forwards * forward + backward) * share for share in shares),
            squares=compute.squares,
            room_s=room * 4 * layers * compute.linear_s / num_bytes[-1],
            **others,
        )

    bare = prices(2, head=True, exposed=0.0, kept=False, shares=shares)
    linear, square, exchange = bare.linear_s, bare.square_s, exchanges(2, False)
    free = cost.memory_per_rank_bytes - memory.fixed
    # The loss slice is another moment, with fewer bytes per token but those of the slice.
    at_loss = (free - memory.loss_slice) / memory.loss_bytes_per_token()
    free = min(free, at_loss * num_bytes[-1])
    fixed = cost.root_gather_s + cost.layer_gather_s + cost.layer_reduce_s + cost.root_reduce_s
    if free <= 0:
        raise InfeasibleError("a slice of the loss does not fit into memory; make train.loss_slice_tokens smaller")
    return Ground(
        tree=tree,
        linear_s=linear,
        square_s=square,
        squares=compute.squares,
        exchange_s=tuple(exchange),
        bytes_per_token=tuple(num_bytes),
        free_bytes=free,
        fixed_s=fixed,
        least_part=min(
            (3 * layers * compute.linear_s + cost.head_s) / (4 * layers * compute.linear_s + cost.head_s),
            (forward + backward) / (2 * forward + backward),
            2 / 3,  # of the exchanges: those of the recompute can be spared
        ),
        guesses=(
            # Ranks with long sequences have less of the head, and wait for those with more: so it counts for none.
            prices(1, head=False, exposed=1.0),
            prices(1, head=False, exposed=0.6, inside=True),
            prices(2, head=True, exposed=0.3),
        ),
        more_guesses=(  # a batch's best plan came from any of these, most often from the first
            prices(1, head=False, exposed=0.2, room=2.0),
            prices(1, head=False, exposed=0.2, room=2.0, most_part=0.7),
            prices(1, head=False, exposed=0.2, room=3.0, most_part=0.7),
            prices(1, head=True, exposed=0.5, room=1.5),
            prices(1, head=False, exposed=0.2, most_part=0.7),
            prices(2, head=True, exposed=0.3, num_whole=1),
            prices(1, head=False, exposed=0.2, room=2.0, wide_part=0.25),
        ),
        whole=prices(2, head=True, exposed=1.0, kept=False),
        floor=prices(1, head=True, exposed=1.0, kept=False, shares=shares),
        head_s=cost.head_s,
        gathers_s=(2 * layers - 1) * cost.layer_gather_s + (layers - 1) * cost.layer_reduce_s,
        layer_s=compute.linear_s,
        layer_bytes=memory.layer_local - memory.layer_input,
        token_bytes=layers * memory.layer_input + memory.gradients,
        num_layers=layers,
        num_crossing=sum(any(link.network for link in comm.forward(level)) for level in range(tree.num_levels)),
        num_heads=heads,
        check=lambda batch: check_fits(batch.ids, batch.lengths, cost),
        in_slices=lambda plan: with_kinds(plan, cost, "ulysses"),
        as_any_kind=lambda plan: with_kinds(plan, cost, "auto" if rings else "ulysses"),
        finish=lambda plan: spend_memory(plan, cost),
        evaluate=lambda plan: _verdict(simulate(make_schedule(plan, streaming=streaming), cost), cost),
        evaluate_roughly=lambda plan: _glance(plan, (plan.gathers,), cost, streaming)[1],
        place_gathers=lambda plan: _glance(
            plan, gather_choices(plan, cost) if streaming else (GatherTurns(),), cost, streaming
        ),
    )


def _glance(plan: Plan, choices: Sequence[GatherTurns], cost: CostModel, streaming: bool) -> tuple[Plan, Verdict]:
    """The plan with the best of these gathers, and a rough verdict."""
    timeline = place_gathers(make_schedule(plan, streaming=streaming), cost, choices, most_layers=_ROUGH_LAYERS)
    return timeline.schedule.plan, _verdict(timeline, cost)


def _verdict(timeline: Timeline, cost: CostModel) -> Verdict:
    fits = timeline.peak_bytes.max() <= cost.memory_per_rank_bytes
    makespan_s = timeline.makespan_s if fits else math.inf
    return Verdict(makespan_s, timeline.layers_s, timeline.unhidden_s, timeline.is_rough)


def gather_choices(plan: Plan, cost: CostModel) -> tuple[GatherTurns, ...]:
    """Where a plan may gather parameters: where a layer begins, or after exchanges that take the same links.

    In the forward pass after the first ones or after all, in the backward pass after the first ones; in pairs of which
    each was best for some batch.
    """
    crossing = cost.comm.crosses_hosts
    shares = [any(link.network == crossing for link in cost.comm.forward(lv)) for lv in range(cost.tree.num_levels)]
    kinds = {(p.group.level, p.ring_degree, p.num_slices) for _, p in plan.placements() if shares[p.group.level]}
    links = [cost.comm.forward(*kind) for kind in kinds]
    last = max((n for each in links for n, link in enumerate(each, 1) if link.network == crossing), default=0)
    if not last:
        return (GatherTurns(),)
    pairs = dict.fromkeys(((0, 0), (1, 1), (last, 2), (0, 2), (2, 2), (1, 0), (last, 0), (last, 3)))
    most = max(_LEAST_CHOICES, _SIDE_BY_SIDE // cost.tree.num_ranks)
    return tuple(GatherTurns(*pair, sum(shares) if any(pair) else 0) for pair in islice(pairs, most))
