"""Which tokens each rank holds.

A group's sequences are packed one after another into one stream, and the stream is cut into as many contiguous parts as
the group has ranks, whole tokens, sizes differing by at most one. A rank's tokens of a microbatch are its parts of the
streams of all groups on its path, root first. A part may be empty: the rank still works for the group's heads.

Where a group's attention is a ring of r members, each sequence is first dealt to them in zigzag: it is cut in 2r
chunks, and member i holds chunks i and 2r - 1 - i, so that all members do equal work under the causal mask. Each
member's own stream is then cut over its ranks as above. The sizes are those of a group without a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nestsp.cluster import share_sizes
from nestsp.plan import Placement, Plan

__all__ = ["GroupShard", "Span", "Spans", "rank_spans", "zigzag"]


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
        chunk_edges: For each sequence, where its 2 × ring degree chunks start, and the last ends; see `zigzag`.
        member: The rank's place in the group, 0 to degree - 1.
        sizes: Tokens that each member holds.
        offset: Where this rank's part starts among all its tokens of the microbatch.
        spans: This rank's tokens, in the order of the stream; empty if it holds none.
    """

    placement: Placement
    lengths: tuple[int, ...]
    chunk_edges: tuple[tuple[int, ...], ...]
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


def zigzag(lengths: Sequence[int], ring_degree: int) -> tuple[tuple[int, ...], ...]:
    """Cut each sequence in the chunks of a ring; member i gets chunks i and 2r - 1 - i.

    Chunks of one sequence differ by at most one token. The tokens left over by equal chunks go to one member after the
    other, from sequence to sequence, so that members together hold what `share_sizes` says.

    Source: the zigzag of Llama 3's context parallelism and of ring-flash-attention. Ours differs in that a length need
    not divide: nothing is padded.

    Returns:
        For each sequence, the 2r + 1 edges of its chunks.

    >>> zigzag([8, 3, 1], 2)
    ((0, 2, 4, 6, 8), (0, 1, 2, 2, 3), (0, 0, 1, 1, 1))
    """
    num_chunks = 2 * ring_degree
    totals = share_sizes(sum(lengths), ring_degree)
    members = sorted(range(ring_degree), key=lambda member: -totals[member])
    turn = 0
    edges = []
    for length in lengths:
        least, left_over = divmod(length, num_chunks)
        sizes = [least] * num_chunks
        for extra in range(left_over):
            member = members[(turn + extra) % ring_degree]
            sizes[member if extra < ring_degree else num_chunks - 1 - member] += 1
        turn += left_over
        edges.append((0, *accumulate(sizes)))
    return tuple(edges)


def _group_shard(plan: Plan, placement: Placement, rank: int, offset: int) -> GroupShard:
    lengths = tuple(plan.batch.lengths[s] for s in placement.sequences)
    degree, ring = placement.group.degree, placement.ring_degree
    edges = zigzag(lengths, ring)
    member = rank - placement.group.first_rank
    sizes = share_sizes(sum(lengths), degree)
    place = member // (degree // ring)
    first = sum(sizes[place * (degree // ring) : member])
    mine = range(first, first + sizes[member])
    spans: list[Span] = []
    piece_start = 0
    for sequence, chunks in zip(placement.sequences, edges, strict=True):
        for chunk in (place, 2 * ring - 1 - place):
            begin, end = chunks[chunk], chunks[chunk + 1]
            start = begin + max(mine.start - piece_start, 0)
            stop = begin + min(mine.stop - piece_start, end - begin)
            piece_start += end - begin
            if start >= stop:
                continue
            if spans and (spans[-1].sequence, spans[-1].stop) == (sequence, start):  # the two middle chunks touch
                spans[-1] = Span(sequence, spans[-1].start, stop)
            else:
                spans.append(Span(sequence, start, stop))
    return GroupShard(placement, lengths, edges, member, sizes, offset, tuple(spans))
