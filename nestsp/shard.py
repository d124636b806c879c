"""Which tokens each rank holds.

A group's sequences are packed one after another into one stream, and the stream is cut into as many contiguous parts as
the group has ranks, whole tokens, sizes differing by at most one. A rank's tokens of a microbatch are its parts of the
streams of all groups on its path, root first. A part may be empty: the rank still works for the group's heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestsp.cluster import share, share_sizes
from nestsp.plan import Placement, Plan

__all__ = ["GroupShard", "Span", "Spans", "rank_spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``stop - 1`` of one sequence; never empty.

    Attributes:
        sequence: Position in the batch.
        start: First token, counted from the sequence's own start.
        stop: One past the last token.
    """

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the span."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class GroupShard:
    """One rank's part of one group's stream.

    Attributes:
        placement: The group and its sequences.
        lengths: Lengths of the group's sequences, in the order of the stream.
        member: The rank's place in the group, 0 to degree - 1.
        sizes: Tokens that each member holds.
        offset: Where this rank's part starts among all its tokens of the microbatch.
        spans: This rank's tokens, in the order of the stream; empty if it holds none.
    """

    placement: Placement
    lengths: tuple[int, ...]
    member: int
    sizes: tuple[int, ...]
    offset: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds."""
        return self.sizes[self.member]


@dataclass(frozen=True, slots=True)
class Spans:
    """All tokens of one rank in one microbatch: a shard of each used group on its path, root first."""

    shards: tuple[GroupShard, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank holds, filler excluded."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in the order in which the rank holds them."""
        return tuple(span for shard in self.shards for span in shard.spans)


def rank_spans(plan: Plan, rank: int) -> tuple[Spans, ...]:
    """The tokens of a rank, for each microbatch of a plan.

    Args:
        plan: A plan that passed `Plan.check`.
        rank: 0 to ``plan.tree.num_ranks - 1``.
    """
    result = []
    for microbatch in plan.microbatches:
        shards: list[GroupShard] = []
        offset = 0
        for placement in microbatch.on_rank(rank):
            shard = _group_shard(plan, placement, rank, offset)
            shards.append(shard)
            offset += shard.num_tokens
        result.append(Spans(tuple(shards)))
    return tuple(result)


def _group_shard(plan: Plan, placement: Placement, rank: int, offset: int) -> GroupShard:
    lengths = tuple(plan.batch.lengths[s] for s in placement.sequences)
    total, degree = sum(lengths), placement.group.degree
    member = rank - placement.group.first_rank
    mine = share(total, degree, member)
    spans = []
    sequence_start = 0
    for sequence, length in zip(placement.sequences, lengths, strict=True):
        start = max(mine.start, sequence_start)
        stop = min(mine.stop, sequence_start + length)
        if start < stop:
            spans.append(Span(sequence, start - sequence_start, stop - sequence_start))
        sequence_start += length
    return GroupShard(placement, lengths, member, share_sizes(total, degree), offset, tuple(spans))
