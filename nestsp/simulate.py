"""What a plan will cost, before it runs: its Schedule walked for all ranks, each with one stream of computation and one
of each link class.

- A rank computes in the Schedule's order. A turn waits for the group's last exchange, computes, and issues the next.
- An exchange starts when the last member has issued it and the links of all members are free; each link class is one
  queue, in the order of issue, shared with the parameter gathers and gradient reductions.
- A layer's parameters are gathered while the layer before it runs, in the forward pass and again in the backward pass;
  its gradients are reduced while the next one runs, and only one reduction is in flight (as FSDP2 does). The gather
  stands among the exchanges where the plan says (see `nestsp.schedule`), and starts when the last rank has issued it.

All ranks of a level take a turn in one array operation. Layers are identical, so a pass is walked only until one layer
moves all clocks by one and the same time; from there on every further layer does the same, since clocks meet in maxima
and sums alone. Price at 64 ranks: a few milliseconds for each microbatch.

`plan_work` and `imbalance` count FLOPs alone, as a figure for a step that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from nestsp.cluster import share
from nestsp.cost.memory import RankTokens
from nestsp.cost.model import CostModel
from nestsp.cost.work import Work, sequence_work
from nestsp.moves import Chain, LevelSizes, Move, layer_moves
from nestsp.plan import GatherTurns, Keep, Plan
from nestsp.schedule import Pass, Schedule
from nestsp.shape import ModelShape

__all__ = [
    "Event",
    "Timeline",
    "imbalance",
    "place_gathers",
    "plan_peak_bytes",
    "plan_work",
    "rank_tokens",
    "simulate",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Track = Literal["computation", "host links", "network"]

_ALL = slice(None)

# A layer moves all clocks alike if they differ by no more than this fraction of its time.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Event:
    """The same thing on several ranks, each at its own time.

    Attributes:
        name: What it is.
        track: The stream it occupies.
        microbatch: Its microbatch.
        layer: Its layer, or -1 outside the layers.
        ranks: int64 [n], the ranks.
        starts_s: float64 [n], when each starts.
        ends_s: float64 [n], when each ends.
        level: The level of the groups it belongs to, or -1.
    """

    name: str
    track: Track
    microbatch: int
    layer: int
    ranks: Ints
    starts_s: Floats
    ends_s: Floats
    level: int = -1


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every rank does in one step. The three times of a rank add up to the makespan.

    Attributes:
        schedule: What was walked.
        makespan_s: Seconds until the last rank has updated its parameters.
        microbatch_s: Seconds of each microbatch.
        computing_s: float64 [ranks], its computation stream is busy.
        exchanging_s: float64 [ranks], it idles, every member has issued what it waits for, and the links are at it.
        waiting_s: float64 [ranks], it idles because a peer is late.
        layers_s: float64 [microbatches, ranks], computation of each rank's layers; the head is left out.
        unhidden_s: float64 [microbatches, ranks], the part of `exchanging_s` that it idles for its groups' exchanges.
        peak_bytes: float64 [ranks], the most memory in any microbatch.
        is_rough: Its times are carried on from the first layers, though ranks were still drifting apart there; or they
            were found beside others, and so may be rounded otherwise.
        events: What happened, if it was recorded.
    """

    schedule: Schedule
    makespan_s: float
    microbatch_s: tuple[float, ...]
    computing_s: Floats
    exchanging_s: Floats
    waiting_s: Floats
    layers_s: Floats
    unhidden_s: Floats
    peak_bytes: Floats
    is_rough: bool = False
    events: tuple[Event, ...] = ()

    @property
    def exposed(self) -> float:
        """Fraction of the makespan that ranks idle for communication, on average."""
        return float(self.exchanging_s.mean() / self.makespan_s)

    @property
    def imbalance(self) -> float:
        """Computation of the busiest rank over the mean, minus 1."""
        return float(self.computing_s.max() / self.computing_s.mean() - 1)


Flight = tuple[Floats, Floats]  # when the last member has issued a communication, and when it is over
Rows = slice | Ints  # some of the variants


@dataclass(slots=True)
class _Clocks:
    """Times of all streams of all ranks, while they are walked: some variants of one plan side by side.

    A group that does not move has -inf where others have times, which no maximum sees.

    Attributes:
        now_s: float64 [variants, ranks], where each rank's computation is.
        links_s: The same of the two classes of links: until when their queues are full.
        exchanging_s: float64 [variants, ranks], so long each rank idled for its groups' exchanges.
        gathering_s: The same for gathers and reductions.
    """

    now_s: Floats
    links_s: tuple[Floats, Floats]
    exchanging_s: Floats
    gathering_s: Floats
    gather_s: Flight
    reduce_s: Flight
    most_layers: int
    in_flight: dict[Chain, Flight] = field(default_factory=dict)
    events: list[Event] | None = None
    microbatch: int = 0
    layer: int = -1
    is_rough: bool = False

    @classmethod
    def of(cls, num_variants: int, num_ranks: int, *, record: bool, most_layers: int) -> _Clocks:
        now, host, network, exchanging, gathering = np.zeros((5, num_variants, num_ranks))
        gather, reduce = np.zeros((2, 2, num_variants))
        return cls(
            now, (host, network), exchanging, gathering, (gather[0], gather[1]), (reduce[0], reduce[1]), most_layers,
            events=[] if record else None,
        )  # fmt: skip

    def compute(self, seconds: Floats, name: str) -> None:
        start = self.now_s
        self.now_s = start + seconds
        if self.events is not None:
            self._record(name, "computation", np.arange(len(seconds)), start[0], self.now_s[0])

    def collective(
        self, seconds: float, network: bool, name: str, issued_s: Floats | None = None, rows: Rows = _ALL
    ) -> Flight:
        """One communication of all ranks, issued now or when they say, in some of the variants."""
        ready: Floats = (self.now_s if issued_s is None else issued_s)[rows].max(axis=1)
        if seconds == 0.0:
            return np.full_like(ready, -np.inf), np.full_like(ready, -np.inf)
        links = self.links_s[network]
        start = np.maximum(ready, links[rows].max(axis=1))
        end = start + seconds
        links[rows] = end[:, None]
        if self.events is not None:
            ranks = np.arange(links.shape[1])
            self._record(name, _TRACKS[network], ranks, np.full(len(ranks), start[0]), links[0].copy())
        return ready, end

    def wait(self, flight: Flight) -> None:
        ready, end = (each[:, None] for each in flight)
        self.gathering_s += np.maximum(0.0, end - np.maximum(self.now_s, ready))
        self.now_s = np.maximum(self.now_s, end)

    def move(self, move: Move) -> Floats:
        """Take a turn; float64 [variants, ranks], when each rank issues its exchange, or -inf if it has none."""
        by_group = (len(self.now_s), *move.before_s.shape)
        now = self.now_s.reshape(by_group)
        if move.waits:
            ready, end = (each[:, :, None] for each in self.in_flight[move.chain])
            idle = self.exchanging_s.reshape(by_group)
            idle += np.maximum(0.0, end - np.maximum(now, ready))
            now = np.maximum(now, end)
        start, now = now, now + move.before_s
        if self.events is not None:
            self._record_turn(move, start, now)
        issued = now
        if move.exchange_s is not None:
            links = self.links_s[move.network].reshape(by_group)
            ready = now.max(axis=2)
            begin = np.maximum(ready, links.max(axis=2))
            end = begin + move.exchange_s
            np.maximum(links, end[:, :, None], out=links)
            self.in_flight[move.chain] = (ready, end)
            if self.events is not None:
                spread = np.ones(by_group)
                self._record_turn(move, begin[:, :, None] * spread, end[:, :, None] * spread, _TRACKS[move.network])
        if move.after_s is not None:
            start, now = now, now + move.after_s
            if self.events is not None:
                self._record_turn(move, start, now)
        self.now_s = now.reshape(self.now_s.shape)
        return issued

    def state(self) -> Floats:
        """All times that decide what comes; what lies before a rank's own clock no longer does.

        float64 [variants, times].
        """
        first = self.now_s.min(axis=1)
        single = [np.maximum(first, each)[:, None] for each in (*self.gather_s, *self.reduce_s)]
        return np.concatenate([self.now_s, *(np.maximum(self.now_s, link) for link in self.links_s), *single], axis=1)

    def shift(self, seconds: Floats) -> None:
        """Let all times pass, in the order of `state`."""
        num_ranks = self.now_s.shape[1]
        state = self.state() + seconds
        self.now_s, host, network = (state[:, at * num_ranks : (at + 1) * num_ranks].copy() for at in range(3))
        self.links_s = (host, network)
        gather_ready, gather_end, reduce_ready, reduce_end = state[:, 3 * num_ranks :].T.copy()
        self.gather_s, self.reduce_s = (gather_ready, gather_end), (reduce_ready, reduce_end)

    def _record_turn(self, move: Move, starts_s: Floats, ends_s: Floats, track: Track = "computation") -> None:
        degree = starts_s.shape[2]
        ranks = move.groups[:, None] * degree + np.arange(degree)
        self._record(move.name, track, ranks, starts_s[0, move.groups], ends_s[0, move.groups], move.level)

    def _record(self, name: str, track: Track, ranks: Ints, starts_s: Floats, ends_s: Floats, level: int = -1) -> None:
        assert self.events is not None
        busy = (ends_s > starts_s).ravel()
        if busy.any():
            picked = (ranks.ravel()[busy], starts_s.ravel()[busy], ends_s.ravel()[busy])
            self.events.append(Event(name, track, self.microbatch, self.layer, *picked, level))


_TRACKS: tuple[Track, Track] = ("host links", "network")


def simulate(schedule: Schedule, cost: CostModel, *, record: bool = False) -> Timeline:
    """Walk a plan's schedule for all ranks.

    Args:
        schedule: Of a plan that passed `Plan.check`, on the cost model's tree.
        cost: What everything costs.
        record: Also walk every layer, and return what happened as events.
    """
    return _simulate_best([schedule], cost, record=record)


def place_gathers(
    schedule: Schedule, cost: CostModel, choices: Sequence[GatherTurns], *, most_layers: int | None = None
) -> Timeline:
    """The timeline of the same plan that gathers parameters where it then ends first; its schedule says where.

    All choices are walked side by side, which takes little longer than to walk one.

    Args:
        schedule: See `simulate`.
        cost: What everything costs.
        choices: Where parameters may be gathered; the first of the best is taken.
        most_layers: So many layers of a kind are walked at most; None for as many as it takes.
    """
    schedules = [replace(schedule, plan=replace(schedule.plan, gathers=each)) for each in choices]
    return _simulate_best(schedules, cost, most_layers=most_layers)


def _simulate_best(
    schedules: Sequence[Schedule], cost: CostModel, *, record: bool = False, most_layers: int | None = None
) -> Timeline:
    """The timeline of the schedule that ends first; they differ in where they gather parameters alone."""
    plan = schedules[0].plan
    assert plan.tree == cost.tree
    num_ranks, num_microbatches = cost.tree.num_ranks, len(plan.microbatches)
    clocks = _Clocks.of(len(schedules), num_ranks, record=record, most_layers=most_layers or cost.shape.num_layers)
    ends_s = np.zeros((num_microbatches + 1, len(schedules)))
    layers_s = np.zeros((num_microbatches, num_ranks))
    unhidden_s = np.zeros((num_microbatches, len(schedules), num_ranks))
    tokens = [rank_tokens(plan, number, cost) for number in range(num_microbatches)]
    computing_s = np.full(num_ranks, cost.update_s)
    for number, held in enumerate(tokens):
        clocks.microbatch = number
        clocks.exchanging_s = unhidden_s[number]
        # A rank without tokens runs one filler token.
        local = np.maximum(1.0, held.local)
        layers_s[number] = _walk_microbatch(schedules, number, local, cost, clocks)
        computing_s += layers_s[number] + cost.head_s * local
        ends_s[number + 1] = clocks.now_s.max(axis=1)
    clocks.wait(clocks.collective(cost.comm.ring_latency_s, cost.comm.crosses_hosts, "gradient norm"))
    clocks.compute(np.full(num_ranks, cost.update_s), "update")
    makespans = clocks.now_s.max(axis=1)
    best = int(makespans.argmin())
    makespan = float(makespans[best])
    exchanging = clocks.gathering_s[best] + unhidden_s[:, best].sum(axis=0)
    return Timeline(
        schedule=schedules[best],
        makespan_s=makespan,
        microbatch_s=tuple(np.diff(ends_s[:, best]).tolist()),
        computing_s=computing_s,
        exchanging_s=exchanging,
        waiting_s=np.maximum(0.0, makespan - computing_s - exchanging),
        layers_s=layers_s,
        unhidden_s=unhidden_s[:, best],
        peak_bytes=_peak_bytes(plan, tokens, cost),
        is_rough=clocks.is_rough or len(schedules) > 1,
        events=tuple(clocks.events or ()),
    )


def plan_peak_bytes(plan: Plan, cost: CostModel) -> Floats:
    """The most memory that each rank needs in any microbatch, bytes."""
    return _peak_bytes(plan, [rank_tokens(plan, number, cost) for number in range(len(plan.microbatches))], cost)


def _peak_bytes(plan: Plan, tokens: Sequence[RankTokens], cost: CostModel) -> Floats:
    peak = np.zeros(plan.tree.num_ranks)
    for microbatch, held in zip(plan.microbatches, tokens, strict=True):
        peak = np.maximum(peak, cost.memory.peak_bytes(held, microbatch.num_kept_layers))
    return peak


def _walk_microbatch(
    schedules: Sequence[Schedule], number: int, tokens: Floats, cost: CostModel, clocks: _Clocks
) -> Floats:
    """Let the clocks pass a microbatch; float64 [ranks], the computation of its layers."""
    schedule, plan = schedules[0], schedules[0].plan
    num_layers, num_kept = cost.shape.num_layers, plan.microbatches[number].num_kept_layers
    network, num_ordered = cost.comm.crosses_hosts, max(each.plan.gathers.num_levels for each in schedules)
    before_s, after_s = cost.compute.before_s * tokens, cost.compute.after_s * tokens
    sizes = LevelSizes.of(plan, number, cost)
    moves = {which: layer_moves(schedule, number, which, sizes, cost) for which in Pass}
    turns = {which: _rows_by_turn(schedules, which) for which in (Pass.FORWARD, Pass.BACKWARD)}
    for which, rows_by_turn in turns.items():
        if max(rows_by_turn):
            on_links = [move for move in moves[which] if move.exchange_s is not None and move.network == network]
            assert all(move.level < num_ordered for move in on_links), "the links' queue would be another on some ranks"

    def prefetch(name: str, issued_s: Floats | None = None, rows: Rows = _ALL) -> None:
        for times, moment in zip(
            clocks.gather_s, clocks.collective(cost.layer_gather_s, network, name, issued_s, rows), strict=True
        ):
            times[rows] = moment

    def attention(which: Pass) -> None:
        for move in moves[which]:
            clocks.move(move)

    def attention_and_gather(which: Pass, gather: str, issued_s: Floats) -> None:
        """A pass, the gather in its place among the turns of each variant."""
        pending = [turn for turn in turns[which] if turn > 0]
        for move in moves[which]:
            while pending and move.number >= pending[0]:
                prefetch(gather, issued_s, turns[which][pending.pop(0)])
            moved_s = clocks.move(move)
            if pending and move.exchange_s is not None and move.level < num_ordered:
                here = issued_s.reshape(moved_s.shape)
                here[:, move.groups] = moved_s[:, move.groups]
        for turn in pending:
            prefetch(gather, issued_s, turns[which][turn])

    def begin(which: Pass, gather: str) -> Floats:
        """Wait for the layer's parameters; float64 [variants, ranks], when each rank begins it."""
        clocks.wait(clocks.gather_s)
        if gather and 0 in turns[which]:
            prefetch(gather, None, turns[which][0])
        begun_s: Floats = clocks.now_s.copy()
        return begun_s

    def forward(layer: int) -> None:
        gather = "gather the next layer" if layer + 1 < num_layers else ""
        begun_s = begin(Pass.FORWARD, gather)
        clocks.compute(before_s, "projections")
        if gather:
            attention_and_gather(Pass.FORWARD, gather, begun_s)
        else:
            attention(Pass.FORWARD)
        clocks.compute(after_s, "feed-forward")

    def backward(layer: int) -> None:
        gather = "gather the next layer, backward" if layer > 0 else ""
        begun_s = begin(Pass.BACKWARD, gather)
        if layer < num_layers - num_kept:
            clocks.compute(before_s, "projections, again")
            attention(Pass.RECOMPUTE)
            clocks.compute(after_s, "feed-forward, again")
        clocks.compute(2 * after_s, "feed-forward, backward")
        if gather:
            attention_and_gather(Pass.BACKWARD, gather, begun_s)
        else:
            attention(Pass.BACKWARD)
        clocks.compute(2 * before_s, "projections, backward")
        clocks.wait(clocks.reduce_s)
        clocks.reduce_s = clocks.collective(cost.layer_reduce_s, network, "reduce the layer's gradients")

    clocks.layer = -1
    root = clocks.collective(cost.root_gather_s, network, "gather the root")
    prefetch("gather the first layer")
    clocks.wait(root)
    _repeat(clocks, forward, range(num_layers))
    clocks.layer = -1
    prefetch("gather the last layer, backward")
    clocks.compute(cost.head_s * tokens, "head and loss")
    last = num_layers - num_kept
    _repeat(clocks, backward, range(num_layers - 1, last - 1, -1))
    _repeat(clocks, backward, range(last - 1, -1, -1))
    clocks.layer = -1
    clocks.wait(clocks.reduce_s)
    clocks.wait(clocks.collective(cost.root_reduce_s, network, "reduce the root's gradients"))
    clocks.reduce_s = (np.zeros(len(schedules)), np.zeros(len(schedules)))
    own: dict[Pass, Floats] = {
        which: np.sum([before_s + after_s, *(move.computing_s for move in moves[which])], axis=0) for which in Pass
    }
    both = own[Pass.FORWARD] + own[Pass.BACKWARD] + before_s + after_s
    layers_s: Floats = num_layers * both + last * own[Pass.RECOMPUTE]
    return layers_s


def _rows_by_turn(schedules: Sequence[Schedule], which: Pass) -> dict[int, Rows]:
    """The schedules that gather parameters before turns of each number, ascending."""
    turns = [schedule.gather_turn(which) for schedule in schedules]
    if len(set(turns)) == 1:
        return {turns[0]: _ALL}
    return {turn: np.flatnonzero(np.array(turns) == turn) for turn in sorted(set(turns))}


def _repeat(clocks: _Clocks, walk: Callable[[int], None], layers: range) -> None:
    """Walk identical layers, up to the one from which on each only repeats the one before; pass over the rest.

    After the most layers that are to be walked, all clocks go on as they did in the last one, alike or not.
    """
    # The last one is walked in any case: it gathers nothing ahead.
    position, state = 0, clocks.state()
    while position < len(layers):
        clocks.layer = layers[position]
        sums = clocks.exchanging_s.copy(), clocks.gathering_s.copy()
        walk(layers[position])
        position += 1
        remaining = len(layers) - 1 - position
        if clocks.events is not None or remaining <= 0:
            continue
        was, state = state, clocks.state()
        moved = state - was
        most = moved.max(axis=1)
        alike = (most - moved.min(axis=1) <= _SAME * most).all()
        if alike or position >= clocks.most_layers:
            clocks.is_rough |= not alike
            clocks.shift(moved * remaining)
            for total, before in zip((clocks.exchanging_s, clocks.gathering_s), sums, strict=True):
                total += (total - before) * remaining
            position += remaining


def rank_tokens(plan: Plan, number: int, cost: CostModel) -> RankTokens:
    """What each rank holds in a microbatch."""
    tree = plan.tree
    local, kept, operands, in_flight = (np.zeros(tree.num_ranks) for _ in range(4))
    alike: dict[tuple[int, int, Keep], tuple[list[int], list[int]]] = {}
    for placement in plan.microbatches[number].placements:
        group = placement.group
        firsts, totals = alike.setdefault((group.level, placement.ring_degree, placement.keep), ([], []))
        firsts.append(group.first_rank)
        totals.append(plan.group_tokens(placement))
    for (level, ring_degree, keep), (firsts, totals) in alike.items():
        degree = tree.degree(level)
        ranks = np.array(firsts)[:, None] + np.arange(degree)
        tokens = np.array(totals, dtype=np.int64)[:, None]
        shares = np.diff(np.arange(degree + 1, dtype=np.int64) * tokens // degree, axis=1)
        local[ranks] += shares
        if keep == "output":
            kept[ranks] += shares
        operands[ranks] += cost.memory.operand_bytes(tokens, degree, ring_degree, kept=keep == "output")
        in_flight[ranks] += cost.memory.in_flight_bytes(tokens, degree, ring_degree, kept=keep == "output")
    return RankTokens(local, kept, operands, in_flight)


def plan_work(plan: Plan, shape: ModelShape) -> tuple[tuple[Work, ...], ...]:
    """Work of every rank (inner) in every microbatch (outer).

    A member of a group works for its share of the group's tokens and of the query heads; in a ring, whose members have
    all heads of an equal part of the attention, for its share inside the ring's member.
    """
    result = []
    for number, microbatch in enumerate(plan.microbatches):
        linear = [float(tokens * shape.linear_flops_per_token) for tokens in plan.rank_tokens(number)]
        attention = [0.0] * plan.tree.num_ranks
        for placement in microbatch.placements:
            inside = placement.group.degree // placement.ring_degree
            flops = sum(sequence_work(shape, plan.batch.lengths[s]).attention for s in placement.sequences)
            for member, rank in enumerate(placement.group.ranks):
                heads = len(share(shape.num_heads, inside, member % inside))
                attention[rank] += flops / placement.ring_degree * heads / shape.num_heads
        result.append(tuple(Work(a, b) for a, b in zip(linear, attention, strict=True)))
    return tuple(result)


def imbalance(work: Sequence[Sequence[Work]]) -> float:
    """Slowest rank over mean, minus 1, over all microbatches, by FLOPs; 0 is perfect."""
    slowest = sum(max(rank.total for rank in microbatch) for microbatch in work)
    mean = sum(sum(rank.total for rank in microbatch) / len(microbatch) for microbatch in work)
    return slowest / mean - 1 if mean else 0.0
