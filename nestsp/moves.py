"""What the turns of a schedule cost: computation before and after each exchange, and how long that lasts.

Groups of one level that attend in the same way are one array each, so a turn costs a few array operations whatever the
number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
from nestsp.cost.model import CostModel
from nestsp.plan import Keep, Placement, Plan
from nestsp.schedule import Pass, Schedule, Turn, num_exchanges, turn_name

__all__ = ["Chain", "LevelSizes", "Move", "layer_moves"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# What a turn costs depends on: level, ring degree, slices, keep.
Chain = tuple[int, int, int, Keep]
# Output and its gradient, of which the backward pass of PyTorch's own kernel makes dense rows.
_DENSE = Payload(2, 0)
# Queries, output, keys and values of all slices, each of which becomes one tensor.
_SAVED = Payload(2, 2)


@dataclass(frozen=True, slots=True)
class Move:
    """One turn of some groups of one level; arrays hold all groups of the level.

    Attributes:
        number: Of the turn.
        groups: int64 [moving], the groups that take it, by their number within the level.
        chain: Names these groups within a layer's pass, so that a turn finds what the one before it issued.
        waits: The groups have an exchange in flight.
        before_s: float64 [groups, degree], computation before the exchange is issued; 0 for groups that do not move.
        after_s: The same after it, or None.
        exchange_s: float64 [groups], length of the exchange that it issues, or None; -inf for groups that do not move.
        network: The exchange crosses hosts.
    """

    name: str
    level: int
    number: int
    groups: Ints
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

    @property
    def computing_s(self) -> Floats:
        """float64 [ranks], all its computation."""
        both = self.before_s if self.after_s is None else self.before_s + self.after_s
        return both.ravel()

    def unhidden(self) -> Move:
        """The same with nothing computed while its exchange travels."""
        if self.after_s is None:
            return self
        return replace(self, before_s=self.before_s + self.after_s, after_s=None)


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """Sizes of the streams of all groups of each level, float64 [groups] each; zero where a group has none."""

    tokens: tuple[Floats, ...]
    squares: tuple[Floats, ...]
    longest: tuple[Floats, ...]

    @classmethod
    def of(cls, plan: Plan, number: int, cost: CostModel) -> LevelSizes:
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


def layer_moves(schedule: Schedule, number: int, which: Pass, sizes: LevelSizes, cost: CostModel) -> tuple[Move, ...]:
    """The turns of one layer and pass with their costs; groups that differ in kind or keep are apart."""
    turns_of: dict[Chain, _Turns] = {}
    moves: list[Move] = []
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

    def move(self, turn: Turn, chain: Chain, groups: Ints, sizes: LevelSizes) -> Move:
        """One turn of some groups.

        A ring's turns each see one block of keys: they pass it on, then compute with it. Backward, the turn of the last
        block passes on the gradients of the one before, if there is one between. A slice is attended to while the next
        is on the wire.
        """
        number, level, last = turn.number, turn.level, len(self.exchanges)
        inner = self.degree // self.ring_degree
        around = range(1, last) if inner > 1 else range(last + 1)  # the turns that compute, or pass on, around the ring
        tokens = sizes.tokens[level][groups]
        before, after = np.zeros((len(groups), self.degree)), None
        if self.num_slices > 1 and last:
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
        if last and inner > 1:
            at_tokens, at_heads = self._sliced_copies(number) if self.num_slices > 1 else self._copies(number)
            for payload in at_tokens:
                before = before + self._copy_s(tokens, payload, at_heads=False)
            for payload in at_heads:
                before = before + self._copy_s(tokens, payload, at_heads=True)
        exchange = self.exchanges[number] if number < last else None
        num_groups, exchange_s = len(sizes.tokens[level]), None
        if exchange is not None:
            exchange_s = _of_all(exchange.latency_s + exchange.s_per_token * tokens, groups, num_groups, -np.inf)
        return Move(
            name=turn_name(self.degree, self.which, number),
            level=level,
            number=number,
            groups=groups,
            chain=chain,
            waits=number > 0,
            before_s=_of_all(before, groups, num_groups, 0.0),
            after_s=None if after is None else _of_all(after, groups, num_groups, 0.0),
            exchange_s=exchange_s,
            network=exchange is not None and exchange.network,
        )

    def _copies(self, number: int) -> tuple[list[Payload], list[Payload]]:
        """What a turn copies where the tokens are, and where the heads are; see `nestsp.attention.ulysses`."""
        coming, leaving = self.payloads
        last, kept = len(self.exchanges), self.which is Pass.BACKWARD and self.keep == "output"
        at_tokens = [coming] * (number == 0) + [leaving] * (number == last)
        at_heads = [leaving] * (number == last - 1 and leaving.kv > 0)
        if kept and number == 1:
            at_heads.append(_DENSE if self.ring_degree == 1 else coming)
        return at_tokens, at_heads

    def _sliced_copies(self, number: int) -> tuple[list[Payload], list[Payload]]:
        """The same where heads are exchanged in slices; see `nestsp.attention.slices`."""
        came, gone = self._of_slices(number - 1)
        coming, leaving = self._of_slices(number)
        at_tokens, at_heads = [gone, coming], []
        if came.query and gone.query:
            at_heads.append(came)
        if leaving.query and (coming.query or leaving.kv):
            at_heads.append(leaving)
        if self.which is Pass.BACKWARD and came.query:  # of what is saved where the heads are, only dout comes dense
            at_heads.append(Payload((2 if self.keep == "output" else 1) / self.num_slices, 0))
        if self.which is not Pass.BACKWARD and self.keep == "none" and number == len(self.exchanges):
            at_heads.append(_SAVED)
        return at_tokens, at_heads

    def _of_slices(self, number: int) -> tuple[Payload, Payload]:
        coming, leaving = self.payloads
        last = self.num_slices - 1
        return (
            coming.slice(number, self.num_slices, kv_with=0),
            leaving.slice(number - 2, self.num_slices, kv_with=last),
        )

    def _attention_s(self, level: int, groups: Ints, sizes: LevelSizes) -> Floats:
        if self.which is Pass.RECOMPUTE and self.keep == "output":
            return np.zeros((len(groups), self.degree))
        direction: Direction = "backward" if self.which is Pass.BACKWARD else "forward"
        columns = (sizes.tokens[level], sizes.squares[level], sizes.longest[level])
        arrays = [column[groups][:, None] for column in columns]
        seconds: Floats = self.cost.compute.attention_s(direction, self.heads, *arrays, ring_degree=self.ring_degree)
        return seconds

    def _copy_s(self, tokens: Floats, payload: Payload, *, at_heads: bool) -> Floats:
        """Seconds of one copy of what an all-to-all carries; none if it carries nothing."""
        if payload.query == payload.kv == 0:
            return np.zeros((len(tokens), self.degree))
        at_tokens_s, at_heads_s = _copies_s(payload, self.degree, self.ring_degree, self.cost)
        per_token_s = at_heads_s if at_heads else np.full(self.degree, at_tokens_s)
        seconds: Floats = self.cost.profile.launch_s + tokens[:, None] * per_token_s
        return seconds


def _of_all(values: Floats, groups: Ints, num_groups: int, other: float) -> Floats:
    """The values of some groups of a level among those of all of them."""
    every = np.full((num_groups, *values.shape[1:]), other)
    every[groups] = values
    return every


def _copies_s(payload: Payload, degree: int, ring_degree: int, cost: CostModel) -> tuple[float, Floats]:
    """Seconds per token of the group's stream to copy what an all-to-all carries, at the tokens and at the heads."""
    shape, s_per_element = cost.shape, cost.comm.element_bytes * cost.compute.copy_s
    at_tokens = (payload.query * shape.query_width + payload.kv * shape.kv_width) / degree
    at_heads = np.tile(member_widths(shape, payload, degree // ring_degree), ring_degree) / ring_degree
    return at_tokens * s_per_element, at_heads * s_per_element
