"""Ulysses: ranks exchange tokens for heads, and back.

Each rank holds a contiguous part of a packed stream, with all heads; after the exchange it holds the whole stream with
its share of the heads. One all-to-all carries all tensors. Parts need not be equal and heads need not divide by ranks
(then some ranks have one more, or none). With fewer key/value heads than ranks, those are sent to every rank whose
queries need them, and their gradients are summed at home.

To the heads goes one piece [tokens, heads of all tensors, H] for each rank: of a token, the heads of all tensors lie
side by side. Tokens of one rank follow those of another, so what arrives is the stream itself, and each tensor a view
of it with a stride between its rows. Back go pieces of each tensor, and one tensor alone from where it lies. So
elements are copied where the tokens are, before they leave and when they are back; where the heads are, nothing is
but the gradients of q, k and v, to leave together.

Both functions are generators that yield the exchange once, while it is on the wire; where there is nobody to exchange
with they do nothing and do not yield. Exchanges of a layer and group, per token of width q + 2 kv: forward q + 2 kv in,
q out; backward q in, q + 2 kv out. With ``keep == "output"`` backward brings 3 q + 2 kv in, and the recompute nothing.

Source: DeepSpeed Ulysses (Jacobs et al., arXiv:2309.14509). Ours differs in the uneven splits, in the compact keys and
values, in the views, and in that its backward is called explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from nestsp.attention.merge import wide
from nestsp.attention.work import GroupWork
from nestsp.comm.exchange import Exchange, Shape, pieces, start_exchange
from nestsp.shape import HeadShare

__all__ = [
    "Cargo",
    "apart",
    "cut",
    "from_heads",
    "heads_to_tokens",
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
        The same, each [sum(sizes), this rank's heads, H]; views of one buffer.
    """
    if len(work.heads) == 1:
        return [*queries, *keys]
    arriving = start(work, to_heads(work, work.heads, queries, keys))
    yield arriving
    (stream,) = arriving.finish()
    return apart(stream, work.mine, len(queries), len(keys))


def heads_to_tokens(
    work: GroupWork, queries: Sequence[Tensor], keys: Sequence[Tensor], num_kv_heads: int
) -> Generator[Exchange, None, list[Tensor]]:
    """Bring tensors back to the ranks that hold their tokens; what several ranks have of one key/value head is summed.

    Args:
        work: The group.
        queries: Each [sum(sizes), this rank's query heads, H]. One alone leaves from where it lies: nobody may write to
            it meanwhile.
        keys: Each [sum(sizes), this rank's key/value heads, H]; gradients.
        num_kv_heads: K.

    Returns:
        The same, each [num_rows, N or K, H].
    """
    if len(work.heads) == 1:
        return [*queries, *keys]
    leaving = start(work, from_heads(work, work.heads, queries, keys))
    yield leaving
    came, num_tensors = leaving.finish(), len(queries) + len(keys)
    of_each = [came[which::num_tensors] for which in range(num_tensors)]
    home = [torch.cat(parts, 1) for parts in of_each[: len(queries)]]
    return home + [sum_heads(work, parts, num_kv_heads) for parts in of_each[len(queries) :]]


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """What one communication carries one way among the ranks inside, in pieces [tokens, heads, H].

    Attributes:
        leaving: For each of them, the pieces for it; of each, the tensors whose heads lie side by side in it.
        coming: For each of them, the shapes of the pieces that it sends here.
        sent: All pieces that leave, one after another, if they lie so already.
        stream: The shape of all pieces that come, if one after another they are one tensor.
    """

    leaving: Sequence[Sequence[Sequence[Tensor]]]
    coming: Sequence[Sequence[Shape]]
    sent: Tensor | None = None
    stream: Shape | None = None


def to_heads(work: GroupWork, heads: Sequence[HeadShare], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Cargo:
    """From the ranks that hold tokens to those that work for heads; see `tokens_to_heads`."""
    num_heads, size = sum(_head_counts(heads[work.place], len(queries), len(keys))), queries[0].shape[2]
    return Cargo(
        [[[*(x[:, cut(h.query)] for x in queries), *(x[:, cut(h.kv)] for x in keys)]] for h in heads],
        [[(num_tokens, num_heads, size)] for num_tokens in work.sizes],
        stream=(sum(work.sizes), num_heads, size),
    )


def from_heads(work: GroupWork, heads: Sequence[HeadShare], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Cargo:
    """From the ranks that work for heads to those that hold their tokens; see `heads_to_tokens`."""
    tensors, size = (*queries, *keys), queries[0].shape[2]
    return Cargo(
        [[[part] for part in parts] for parts in zip(*(x.split(work.sizes) for x in tensors), strict=True)],
        [[(work.num_rows, count, size) for count in _head_counts(h, len(queries), len(keys))] for h in heads],
        sent=tensors[0].contiguous() if len(tensors) == 1 else None,
    )


def start(work: GroupWork, *cargos: Cargo) -> Exchange:
    """Send all of it in one communication, and begin to receive.

    What comes, if it is not a cargo's one stream, is for each rank inside its pieces of each cargo.
    """
    assert work.link is not None
    leaving = [list(chain(*of_rank)) for of_rank in zip(*(cargo.leaving for cargo in cargos), strict=True)]
    coming = [list(chain(*of_rank)) for of_rank in zip(*(cargo.coming for cargo in cargos), strict=True)]
    sent, stream = (cargos[0].sent, cargos[0].stream) if len(cargos) == 1 else (None, None)
    return start_exchange(
        work.link,
        _side_by_side(list(chain(*leaving))) if sent is None else sent.view(-1),
        _of_group(work, [sum(x.numel() for parts in of_rank for x in parts) for of_rank in leaving]),
        _of_group(work, [sum(map(math.prod, of_rank)) for of_rank in coming]),
        list(chain(*coming)) if stream is None else [stream],
    )


def _side_by_side(leaving: Sequence[Sequence[Tensor]]) -> Tensor:
    """Pieces, one after another in a buffer; of each, the tensors whose heads lie side by side in it."""
    widths = [[x.shape[1] for x in parts] for parts in leaving]
    shapes = [(len(parts[0]), sum(each), parts[0].shape[2]) for parts, each in zip(leaving, widths, strict=True)]
    buffer = leaving[0][0].new_empty(sum(map(math.prod, shapes)))
    laid_out = pieces(buffer, shapes)
    places = [place for piece, each in zip(laid_out, widths, strict=True) for place in piece.split(each, 1)]
    torch._foreach_copy_(places, list(chain(*leaving)))  # one call: a large group's exchange has hundreds
    return buffer


def _of_group(work: GroupWork, inside: Sequence[int]) -> list[int]:
    """A count for each rank of the group, from those of the ranks inside: nothing is for the others."""
    assert work.link is not None
    first = work.member - work.place
    return [0] * first + [*inside] + [0] * (work.link.degree - first - len(inside))


def apart(piece: Tensor, share: HeadShare, num_queries: int, num_keys: int) -> list[Tensor]:
    """The tensors that lie side by side in a piece, or in a stream of them: views."""
    return list(piece.split(_head_counts(share, num_queries, num_keys), 1))


def _head_counts(share: HeadShare, num_queries: int, num_keys: int) -> list[int]:
    return [len(share.query)] * num_queries + [len(share.kv)] * num_keys


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
