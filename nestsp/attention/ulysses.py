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
from typing import TypeVar

import torch
from torch import Tensor

from nestsp.attention.merge import wide
from nestsp.attention.work import GroupWork
from nestsp.comm.exchange import Exchange, start_exchange

__all__ = ["heads_to_tokens", "tokens_to_heads"]

T = TypeVar("T")


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
    assert work.link is not None
    size, mine = queries[0].shape[2], work.mine
    arriving = start_exchange(
        work.link,
        _inside(
            work, [[*(x[:, _cut(h.query)] for x in queries), *(x[:, _cut(h.kv)] for x in keys)] for h in work.heads]
        ),
        _inside(
            work,
            [[(t, len(mine.query), size)] * len(queries) + [(t, len(mine.kv), size)] * len(keys) for t in work.sizes],
        ),
    )
    yield arriving
    return [torch.cat(parts) for parts in zip(*_of_inside(work, arriving.finish()), strict=True)]


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
    assert work.link is not None
    size = queries[0].shape[2]
    leaving = start_exchange(
        work.link,
        _inside(work, list(zip(*(x.split(work.sizes) for x in (*queries, *keys)), strict=True))),
        _inside(
            work,
            [
                [(work.num_rows, len(h.query), size)] * len(queries) + [(work.num_rows, len(h.kv), size)] * len(keys)
                for h in work.heads
            ],
        ),
    )
    yield leaving
    tensors = list(zip(*_of_inside(work, leaving.finish()), strict=True))
    home = [torch.cat(parts, 1) for parts in tensors[: len(queries)]]
    return home + [_sum_heads(work, parts, num_kv_heads) for parts in tensors[len(queries) :]]


def _inside(work: GroupWork, parts: Sequence[Sequence[T]]) -> list[Sequence[T]]:
    """What is meant for the ranks inside, with nothing for all others of the group."""
    assert work.link is not None
    first = work.member - work.place
    return [*[()] * first, *parts, *[()] * (work.link.degree - first - len(parts))]


def _of_inside(work: GroupWork, parts: list[list[Tensor]]) -> list[list[Tensor]]:
    first = work.member - work.place
    return parts[first : first + len(work.heads)]


def _cut(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _sum_heads(work: GroupWork, parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
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
        total[:, _cut(heads.kv)] += part
    return total.to(first.dtype)
