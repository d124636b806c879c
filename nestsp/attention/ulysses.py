"""Ulysses: ranks exchange tokens for heads, and back.

Each rank holds a contiguous part of a packed stream, with all heads; after the exchange it holds the whole stream with
its share of the heads. One all-to-all carries all tensors. Parts need not be equal and heads need not divide by ranks
(then some ranks have one more, or none). With fewer key/value heads than ranks, those are sent to every rank whose
queries need them, and their gradients are summed at home.

Both functions are generators that yield the exchange once, while it is on the wire; where there is nobody to exchange
with they do nothing and do not yield. Exchanges of a layer and group, per token of width q + 2 kv: forward q + 2 kv in,
q out; backward q in, q + 2 kv out. With ``keep == "output"`` backward brings 3 q + 2 kv in, and the recompute nothing.

Source: DeepSpeed Ulysses (Jacobs et al., arXiv:2309.14509). Ours differs in the uneven splits, in the compact keys and
values, and in that its backward is called explicitly.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestsp.attention.merge import wide
from nestsp.attention.work import GroupWork
from nestsp.comm.exchange import Exchange, Shape, start_exchange
from nestsp.shape import HeadShare

__all__ = [
    "Cargo",
    "cut",
    "from_heads",
    "heads_to_tokens",
    "received",
    "start",
    "sum_heads",
    "to_heads",
    "tokens_to_heads",
]


def tokens_to_heads(
    work: GroupWork, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Generator[Exchange, None, list[Tensor]]:
    """Bring tensors to the ranks that work for their heads.

    Args:
        work: The group.
        queries: Each [num_rows, N, H].
        keys: Each [num_rows, K, H].

    Returns:
        The same, each [sum(sizes), this rank's heads, H].
    """
    if len(work.heads) == 1:
        return [*queries, *keys]
    arriving = start(work, to_heads(work, work.heads, queries, keys))
    yield arriving
    return [torch.cat(parts) for parts in zip(*received(work, arriving), strict=True)]


def heads_to_tokens(
    work: GroupWork, queries: Sequence[Tensor], keys: Sequence[Tensor], num_kv_heads: int
) -> Generator[Exchange, None, list[Tensor]]:
    """Bring tensors back to the ranks that hold their tokens; what several ranks have of one key/value head is summed.

    Args:
        work: The group.
        queries: Each [sum(sizes), this rank's query heads, H].
        keys: Each [sum(sizes), this rank's key/value heads, H]; gradients.
        num_kv_heads: K.

    Returns:
        The same, each [num_rows, N or K, H].
    """
    if len(work.heads) == 1:
        return [*queries, *keys]
    leaving = start(work, from_heads(work, work.heads, queries, keys))
    yield leaving
    tensors = list(zip(*received(work, leaving), strict=True))
    home = [torch.cat(parts, 1) for parts in tensors[: len(queries)]]
    return home + [sum_heads(work, parts, num_kv_heads) for parts in tensors[len(queries) :]]


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """What one communication carries among the ranks inside.

    Attributes:
        parts: For each of them, the tensors for it.
        shapes: For each of them, the shapes of what it sends here.
    """

    parts: Sequence[Sequence[Tensor]]
    shapes: Sequence[Sequence[Shape]]


def to_heads(work: GroupWork, heads: Sequence[HeadShare], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Cargo:
    """From the ranks that hold tokens to those that work for heads; see `tokens_to_heads`."""
    size, mine = queries[0].shape[2], heads[work.place]
    return Cargo(
        [[*(x[:, cut(h.query)] for x in queries), *(x[:, cut(h.kv)] for x in keys)] for h in heads],
        [[(t, len(mine.query), size)] * len(queries) + [(t, len(mine.kv), size)] * len(keys) for t in work.sizes],
    )


def from_heads(work: GroupWork, heads: Sequence[HeadShare], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Cargo:
    """From the ranks that work for heads to those that hold their tokens; see `heads_to_tokens`."""
    size, rows = queries[0].shape[2], work.num_rows
    return Cargo(
        [list(parts) for parts in zip(*(x.split(work.sizes) for x in (*queries, *keys)), strict=True)],
        [[(rows, len(h.query), size)] * len(queries) + [(rows, len(h.kv), size)] * len(keys) for h in heads],
    )


def start(work: GroupWork, *cargos: Cargo) -> Exchange:
    """Send all of it in one communication, and begin to receive."""
    assert work.link is not None
    ranks = range(work.link.degree)
    inside = [rank - (work.member - work.place) for rank in ranks]  # nothing is for the others of the group
    parts = [[x for c in cargos for x in c.parts[i]] if 0 <= i < len(work.heads) else [] for i in inside]
    shapes = [[x for c in cargos for x in c.shapes[i]] if 0 <= i < len(work.heads) else [] for i in inside]
    return start_exchange(work.link, parts, shapes)


def received(work: GroupWork, exchange: Exchange) -> list[list[Tensor]]:
    """For each rank inside, the tensors that it sent."""
    first = work.member - work.place
    return exchange.finish()[first : first + len(work.heads)]


def cut(heads: range) -> slice:
    """Some heads, as an index."""
    return slice(heads.start, heads.stop)


def sum_heads(work: GroupWork, parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """Key or value gradients of all heads; a head that several ranks worked for is summed in a wide type."""
    counts = [0] * num_kv_heads
    for heads in work.heads:
        for head in heads.kv:
            counts[head] += 1
    if max(counts) == 1:
        return torch.cat(list(parts), 1)
    first = parts[0]
    total = wide(first.new_zeros(first.shape[0], num_kv_heads, first.shape[2]))
    for heads, part in zip(work.heads, parts, strict=True):
        total[:, cut(heads.kv)] += part
    return total.to(first.dtype)
