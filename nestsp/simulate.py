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
from nestsp.cost.comm import (
    BACKWARD_IN,
    BACKWARD_IN_KEPT,
    BACKWARD_OUT,
    FORWARD_IN,
    FORWARD_OUT,
    LinkTime,
    Payload,
    member_widths,
)
from nestsp.cost.compute import Direction
from nestsp.cost.memory import RankTokens
from nestsp.cost.model import CostModel
from nestsp.cost.work import Work, sequence_work
from nestsp.plan import Keep, Placement, Plan
from nestsp.schedule import Pass, Schedule, Turn, num_exchanges, turn_name
from nestsp.shape import ModelShape

__all__ = [
    "Event",
    "Timeline",
    "imbalance",
    "plan_peak_bytes",
    "plan_work",
    "rank_tokens",
    "simulate",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# What a turn costs depends on: level, ring degree, slices, keep.
Chain = tuple[int, int, int, Keep]
Track = Literal["computation", "host links", "network"]

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
        layers_s: float64 [microbatches, ranks], what each rank's own layers take: computation, and the exchanges that
            nothing hides. Head, gathers and late peers are left out: so it tells who has too much.
        peak_bytes: float64 [ranks], the most memory in any microbatch.
        events: What happened, if it was recorded.
    """

    schedule: Schedule
    makespan_s: float
    microbatch_s: tuple[float, ...]
    computing_s: Floats
    exchanging_s: Floats
    waiting_s: Floats
    layers_s: Floats
    peak_bytes: Floats
    events: tuple[Event, ...] = ()

    @property
    def exposed(self) -> float:
        """Fraction of the makespan that ranks idle for communication, on average."""
        return float(self.exchanging_s.mean() / self.makespan_s)

    @property
    def imbalance(self) -> float:
        """Computation of the busiest rank over the mean, minus 1."""
        return float(self.computing_s.max() / self.computing_s.mean() - 1)


@dataclass(frozen=True, slots=True)
class _Move:
    """One turn of some groups of one level.

    Attributes:
        number: Of the turn.
        ranks: int64 [groups, degree].
        chain: Names these groups within a layer's pass, so that a turn finds what the one before it issued.
        waits: The groups have an exchange in flight.
        before_s: float64 [groups, degree], computation before the exchange is issued.
        after_s: The same after it.
        exchange_s: float64 [groups], length of the exchange that it issues, or None.
        network: The exchange crosses hosts.
    """

    name: str
    level: int
    number: int
    ranks: Ints
    chain: Chain
    waits: bool
    before_s: Floats
    after_s: Floats | None
    exchange_s: Floats | None
    network: bool

    @property
    def does_something(self) -> bool:
        """Not so where an output was kept: its group is not there in the recompute."""
        return self.waits or self.exchange_s is not None or bool(self.before_s.any())

    def unhidden(self) -> _Move:
        """The same with nothing computed while its exchange travels."""
        if self.after_s is None:
            return self
        return replace(self, before_s=self.before_s + self.after_s, after_s=None)


@dataclass(slots=True)
class _Clocks:
    """Times of all streams of all ranks, while they are walked."""

    now_s: Floats
    links_s: tuple[Floats, Floats]
    exposed_s: Floats
    computed_s: Floats
    own_s: Floats
    in_flight: dict[Chain, tuple[Floats, Floats]] = field(default_factory=dict)
    gather_s: tuple[float, float] = (0.0, 0.0)
    reduce_s: tuple[float, float] = (0.0, 0.0)
    events: list[Event] | None = None
    microbatch: int = 0
    layer: int = -1

    def compute(self, seconds: Floats, name: str) -> None:
        start = self.now_s
        self.now_s = start + seconds
        self.computed_s += seconds
        self.own_s += seconds
        if self.events is not None:
            self._record(name, "computation", np.arange(len(start)), start, self.now_s)

    def collective(
        self, seconds: float, network: bool, name: str, issued_s: Floats | None = None
    ) -> tuple[float, float]:
        """One communication of all ranks, each of which issues it now, or when it says; when the last has issued it,
        and when it is over.
        """
        if seconds == 0.0:
            return -np.inf, -np.inf
        ready = float((self.now_s if issued_s is None else issued_s).max())
        links = self.links_s[network]
        start = max(ready, float(links.max()))
        links[:] = start + seconds
        if self.events is not None:
            ranks = np.arange(len(links))
            self._record(name, _TRACKS[network], ranks, np.full(len(ranks), start), links.copy())
        return ready, start + seconds

    def wait(self, ready_end: tuple[float, float]) -> None:
        ready, end = ready_end
        self.exposed_s += np.maximum(0.0, end - np.maximum(self.now_s, ready))
        self.now_s = np.maximum(self.now_s, end)

    def move(self, move: _Move) -> Floats:
        """Take a turn; float64 [groups, degree], when each rank issues its exchange, if there is one."""
        ranks = move.ranks
        now = self.now_s[ranks]
        if move.waits:
            ready, end = self.in_flight[move.chain]
            exposed = np.maximum(0.0, end[:, None] - np.maximum(now, ready[:, None]))
            self.exposed_s[ranks] += exposed
            self.own_s[ranks] += exposed
            now = np.maximum(now, end[:, None])
        start = now
        now = now + move.before_s
        self.computed_s[ranks] += move.before_s
        self.own_s[ranks] += move.before_s
        if self.events is not None:
            self._record(move.name, "computation", ranks, start, now, move.level)
        if move.exchange_s is not None:
            links = self.links_s[move.network]
            ready = now.max(axis=1)
            begin = np.maximum(ready, links[ranks].max(axis=1))
            end = begin + move.exchange_s
            links[ranks] = end[:, None]
            self.in_flight[move.chain] = (ready, end)
            if self.events is not None:
                spread = np.ones(ranks.shape)
                begins, ends = begin[:, None] * spread, end[:, None] * spread
                self._record(move.name, _TRACKS[move.network], ranks, begins, ends, move.level)
        issued = now
        if move.after_s is not None:
            start = now
            now = now + move.after_s
            self.computed_s[ranks] += move.after_s
            self.own_s[ranks] += move.after_s
            if self.events is not None:
                self._record(move.name, "computation", ranks, start, now, move.level)
        self.now_s[ranks] = now
        return issued

    def state(self) -> Floats:
        """All times that decide what comes; what lies before a rank's own clock no longer does."""
        first = self.now_s.min()
        single = np.maximum(first, [*self.gather_s, *self.reduce_s])
        return np.concatenate([self.now_s, *(np.maximum(self.now_s, link) for link in self.links_s), single])

    def shift(self, seconds: Floats) -> None:
        """Let all times pass, in the order of `state`."""
        num_ranks = len(self.now_s)
        state = self.state() + seconds
        self.now_s = state[:num_ranks]
        self.links_s = (state[num_ranks : 2 * num_ranks].copy(), state[2 * num_ranks : 3 * num_ranks].copy())
        gather_ready, gather_end, reduce_ready, reduce_end = (float(t) for t in state[3 * num_ranks :])
        self.gather_s, self.reduce_s = (gather_ready, gather_end), (reduce_ready, reduce_end)

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
    assert schedule.plan.tree == cost.tree
    num_ranks = cost.tree.num_ranks
    now, host, network, exposed, computed, own = np.zeros((6, num_ranks))
    clocks = _Clocks(now, (host, network), exposed, computed, own, events=[] if record else None)
    microbatch_s: list[float] = []
    layers_s = np.zeros((len(schedule.plan.microbatches), num_ranks))
    tokens = [rank_tokens(schedule.plan, number, cost) for number in range(len(layers_s))]
    for number in range(len(layers_s)):
        clocks.microbatch = number
        started = float(clocks.now_s.max())
        clocks.own_s = layers_s[number]
        _walk_microbatch(schedule, number, tokens[number], cost, clocks)
        microbatch_s.append(float(clocks.now_s.max()) - started)
    clocks.own_s = own
    clocks.wait(clocks.collective(cost.comm.ring_latency_s, cost.comm.crosses_hosts, "gradient norm"))
    clocks.compute(np.full(num_ranks, cost.update_s), "update")
    makespan = float(clocks.now_s.max())
    waiting = np.maximum(0.0, makespan - clocks.computed_s - clocks.exposed_s)
    return Timeline(
        schedule=schedule,
        makespan_s=makespan,
        microbatch_s=tuple(microbatch_s),
        computing_s=clocks.computed_s,
        exchanging_s=clocks.exposed_s,
        waiting_s=waiting,
        layers_s=layers_s,
        peak_bytes=_peak_bytes(schedule.plan, tokens, cost),
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


def _walk_microbatch(schedule: Schedule, number: int, held: RankTokens, cost: CostModel, clocks: _Clocks) -> None:
    microbatch = schedule.plan.microbatches[number]
    num_layers, num_kept = cost.shape.num_layers, microbatch.num_kept_layers
    network = cost.comm.crosses_hosts
    # A rank without tokens runs one filler token.
    tokens = np.maximum(1.0, held.local)
    before_s, after_s = cost.compute.before_s * tokens, cost.compute.after_s * tokens
    sizes = _LevelSizes.of(schedule.plan, number, cost)
    moves = {which: _moves(schedule, number, which, sizes, cost) for which in Pass}

    num_ordered = schedule.plan.gathers.num_levels
    for which in (Pass.FORWARD, Pass.BACKWARD):
        if schedule.gather_turn(which):
            on_links = [move for move in moves[which] if move.exchange_s is not None and move.network == network]
            assert all(move.level < num_ordered for move in on_links), "the links' queue would be another on some ranks"

    def prefetch(name: str, issued_s: Floats | None = None) -> None:
        clocks.gather_s = clocks.collective(cost.layer_gather_s, network, name, issued_s)

    def begin(which: Pass, gather: str) -> tuple[str, Floats]:
        """A layer's begin: wait for its parameters; what is still to gather among the turns, and when each begins."""
        clocks.wait(clocks.gather_s)
        begun_s = clocks.now_s.copy()
        if gather and schedule.gather_turn(which) == 0:
            prefetch(gather)
            gather = ""
        return gather, begun_s

    def attention(which: Pass, gather: str, issued_s: Floats) -> None:
        for move in moves[which]:
            if gather and move.number >= schedule.gather_turn(which):
                prefetch(gather, issued_s)
                gather = ""
            moved_s = clocks.move(move)
            if gather and move.exchange_s is not None and move.level < num_ordered:
                issued_s[move.ranks] = moved_s
        if gather:
            prefetch(gather, issued_s)

    def forward(layer: int) -> None:
        gather = begin(Pass.FORWARD, "gather the next layer" if layer + 1 < num_layers else "")
        clocks.compute(before_s, "projections")
        attention(Pass.FORWARD, *gather)
        clocks.compute(after_s, "feed-forward")

    def backward(layer: int) -> None:
        gather = begin(Pass.BACKWARD, "gather the next layer, backward" if layer > 0 else "")
        if layer < num_layers - num_kept:
            clocks.compute(before_s, "projections, again")
            attention(Pass.RECOMPUTE, "", clocks.now_s)
            clocks.compute(after_s, "feed-forward, again")
        clocks.compute(2 * after_s, "feed-forward, backward")
        attention(Pass.BACKWARD, *gather)
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
    clocks.own_s -= cost.head_s * tokens
    last = num_layers - num_kept
    _repeat(clocks, backward, range(num_layers - 1, last - 1, -1))
    _repeat(clocks, backward, range(last - 1, -1, -1))
    clocks.layer = -1
    clocks.wait(clocks.reduce_s)
    clocks.wait(clocks.collective(cost.root_reduce_s, network, "reduce the root's gradients"))
    clocks.reduce_s = (0.0, 0.0)


def _repeat(clocks: _Clocks, walk: Callable[[int], None], layers: range) -> None:
    """Walk identical layers, up to the one from which on each only repeats the one before; pass over the rest."""
    # The last one is walked in any case: it gathers nothing ahead.
    position = 0
    while position < len(layers):
        clocks.layer = layers[position]
        state, sums = clocks.state(), np.array([clocks.exposed_s, clocks.computed_s, clocks.own_s])
        walk(layers[position])
        position += 1
        remaining = len(layers) - 1 - position
        if clocks.events is not None or remaining <= 0:
            continue
        moved = clocks.state() - state
        if moved.max() - moved.min() <= _SAME * moved.max():
            clocks.shift(moved * remaining)
            for total, before in zip((clocks.exposed_s, clocks.computed_s, clocks.own_s), sums, strict=True):
                total += (total - before) * remaining
            position += remaining


@dataclass(frozen=True, slots=True)
class _LevelSizes:
    """Sizes of the streams of all groups of each level, float64 [groups] each; zero where a group has none."""

    tokens: tuple[Floats, ...]
    squares: tuple[Floats, ...]
    longest: tuple[Floats, ...]

    @classmethod
    def of(cls, plan: Plan, number: int, cost: CostModel) -> _LevelSizes:
        tree, lengths = plan.tree, plan.batch.lengths
        arrays = [
            tuple(np.zeros(tree.num_ranks // tree.degree(level)) for level in range(tree.num_levels)) for _ in range(3)
        ]
        for placement in plan.microbatches[number].placements:
            group = placement.group
            index = group.first_rank // group.degree
            mine = [lengths[s] for s in placement.sequences]
            arrays[0][group.level][index] = sum(mine)
            arrays[1][group.level][index] = sum(cost.compute.squares(n) for n in mine)
            arrays[2][group.level][index] = max(mine)
        return cls(*arrays)


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


def _moves(schedule: Schedule, number: int, which: Pass, sizes: _LevelSizes, cost: CostModel) -> tuple[_Move, ...]:
    """The turns of one layer and pass with their costs; groups that differ in kind or keep are apart."""
    turns_of: dict[Chain, _Turns] = {}
    moves = []
    for step in schedule.steps(number, which):
        level, degree = step.turn.level, cost.tree.degree(step.turn.level)
        alike: dict[Chain, list[int]] = {}
        for placement in step.placements:
            chain: Chain = (level, placement.ring_degree, placement.num_slices, placement.keep)
            alike.setdefault(chain, []).append(placement.group.first_rank // degree)
            if chain not in turns_of:
                turns_of[chain] = _Turns.of(placement, which, cost)
        for chain, indices in alike.items():
            groups = np.array(indices, dtype=np.int64)
            move = turns_of[chain].move(step.turn, chain, groups, sizes)
            moves.append(move if schedule.streaming else move.unhidden())
    return tuple(move for move in moves if move.does_something)


@dataclass(frozen=True, slots=True)
class _Turns:
    """What the turns of one kind of group cost in one pass.

    Attributes:
        exchanges: The communications, in order.
        heads: float64 [degree], query heads of each member, in one slice.
        payloads: What the all-to-alls in and out carry.
    """

    which: Pass
    cost: CostModel
    degree: int
    ring_degree: int
    num_slices: int
    keep: Keep
    exchanges: tuple[LinkTime, ...]
    heads: Floats
    payloads: tuple[Payload, Payload]

    @classmethod
    def of(cls, placement: Placement, which: Pass, cost: CostModel) -> _Turns:
        group, ring, kept = placement.group, placement.ring_degree, placement.keep == "output"
        slices = placement.num_slices
        if which is Pass.BACKWARD:
            exchanges = cost.comm.backward(group.level, ring, slices, kept=kept)
            payloads = (BACKWARD_IN_KEPT if kept else BACKWARD_IN, BACKWARD_OUT)
        else:
            exchanges = cost.comm.forward(group.level, ring, slices) if num_exchanges(placement, which) else ()
            payloads = (FORWARD_IN, FORWARD_OUT)
        assert len(exchanges) == num_exchanges(placement, which)
        heads = cost.head_fractions(group.level, ring) * cost.shape.num_heads / slices
        return cls(which, cost, group.degree, ring, slices, placement.keep, exchanges, heads, payloads)

    def move(self, turn: Turn, chain: Chain, groups: Ints, sizes: _LevelSizes) -> _Move:
        """One turn of some groups.

        A ring's turns each see one block of keys: they pass it on, then compute with it. Backward, the turn of the last
        block passes on the gradients of the one before, if there is one between. An all-to-all is packed before it is
        issued, and unpacked in the turn that waited for it. A slice is attended to while the next is on the wire.
        """
        number, level, last = turn.number, turn.level, len(self.exchanges)
        inner = self.degree // self.ring_degree
        around = range(1, last) if inner > 1 else range(last + 1)  # the turns that compute, or pass on, around the ring
        tokens = sizes.tokens[level][groups]
        before, after = np.zeros((len(groups), self.degree)), None
        if self.num_slices > 1 and last:
            before = self._packed_s(tokens, number) + self._unpacked_s(tokens, number - 1)
            after = self._attention_s(level, groups, sizes) if 1 <= number <= self.num_slices else None
        elif number in around:
            attention = self._attention_s(level, groups, sizes)
            if self.ring_degree == 1:
                before = attention
            elif number - around.start < self.ring_degree:
                block = attention / self.ring_degree
                is_last = number - around.start == self.ring_degree - 1
                passes_on = not is_last or (self.which is Pass.BACKWARD and self.ring_degree > 2)
                before, after = (before, block) if passes_on else (block, None)
        if last and inner > 1 and self.num_slices == 1:
            if number < 2:
                before = before + self._copy_s(tokens, self.payloads[0], at_heads=number == 1)
            if number >= last - 1:
                before = before + self._copy_s(tokens, self.payloads[1], at_heads=number == last - 1)
        exchange = self.exchanges[number] if number < last else None
        return _Move(
            name=turn_name(self.degree, self.which, number),
            level=level,
            number=number,
            ranks=groups[:, None] * self.degree + np.arange(self.degree),
            chain=chain,
            waits=number > 0,
            before_s=before,
            after_s=after,
            exchange_s=None if exchange is None else exchange.latency_s + exchange.s_per_token * tokens,
            network=exchange is not None and exchange.network,
        )

    def _packed_s(self, tokens: Floats, number: int) -> Floats:
        """What it takes to pack one exchange of slices: one slice that is brought, one that goes home."""
        coming, leaving = self._of_slices(number)
        return self._copy_s(tokens, coming, at_heads=False) + self._copy_s(tokens, leaving, at_heads=True)

    def _unpacked_s(self, tokens: Floats, number: int) -> Floats:
        coming, leaving = self._of_slices(number)
        return self._copy_s(tokens, coming, at_heads=True) + self._copy_s(tokens, leaving, at_heads=False)

    def _of_slices(self, number: int) -> tuple[Payload, Payload]:
        coming, leaving = self.payloads
        last = self.num_slices - 1
        return (
            coming.slice(number, self.num_slices, kv_with=0),
            leaving.slice(number - 2, self.num_slices, kv_with=last),
        )

    def _attention_s(self, level: int, groups: Ints, sizes: _LevelSizes) -> Floats:
        if self.which is Pass.RECOMPUTE and self.keep == "output":
            return np.zeros((len(groups), self.degree))
        direction: Direction = "backward" if self.which is Pass.BACKWARD else "forward"
        columns = (sizes.tokens[level], sizes.squares[level], sizes.longest[level])
        arrays = [column[groups][:, None] for column in columns]
        seconds: Floats = self.cost.compute.attention_s(direction, self.heads, *arrays, ring_degree=self.ring_degree)
        return seconds

    def _copy_s(self, tokens: Floats, payload: Payload, *, at_heads: bool) -> Floats:
        """Seconds of packing or unpacking one all-to-all; none if it carries nothing."""
        if payload.query == payload.kv == 0:
            return np.zeros((len(tokens), self.degree))
        at_tokens_s, at_heads_s = _copies_s(payload, self.degree, self.ring_degree, self.cost)
        per_token_s = at_heads_s if at_heads else np.full(self.degree, at_tokens_s)
        seconds: Floats = self.cost.profile.launch_s + tokens[:, None] * per_token_s
        return seconds


def _copies_s(payload: Payload, degree: int, ring_degree: int, cost: CostModel) -> tuple[float, Floats]:
    """Seconds per token of the group's stream of packing or unpacking an all-to-all, at the tokens and at the heads."""
    shape, s_per_element = cost.shape, cost.comm.element_bytes * cost.compute.copy_s
    at_tokens = (payload.query * shape.query_width + payload.kv * shape.kv_width) / degree
    at_heads = np.tile(member_widths(shape, payload, degree // ring_degree), ring_degree) / ring_degree
    return at_tokens * s_per_element, at_heads * s_per_element


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
