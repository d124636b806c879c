"""Ring attention: queries stay, keys and values go round, and every member sees each block once.

Sequences are dealt in zigzag (`nestsp.shard.zigzag`): of each, member i holds two chunks, i and 2r - 1 - i. Causality
between whole blocks then needs no mask:

1. own block: causal, on the local stream;
2. keys of an earlier member: all queries see the first of its two chunks;
3. keys of a later member: the queries of the second chunk see both of its chunks.

So every block is half of a square, whoever computes it. Chunks may be of any length, also empty: rows of sequences
that have nothing on one side are left out, and a kernel sees what remains.

Both functions are generators that yield each pass once (`nestsp.comm.exchange.start_pass`), while it is on the wire and
a block is computed. Keys and values make r - 1 passes, backward again. Their gradients follow one pass behind, so
that a block need not be computed before it is passed on, and make one pass more to get home. Bytes of a layer and rank
of T tokens, K heads of H: forward (r - 1) 2TKH elements, backward the same and (r - 1) 2TKH of float32.

A member always passes on whole blocks, although those that come after the first half of the ring need only the first
chunk: in each pass some member needs all, and a pass lasts as long as its longest message.

Source: Ring Attention (Liu et al., arXiv:2310.01889), zigzag as in ring-flash-attention (Zhu Zilin). Ours differs in
messages and blocks of any size, in sums that stay in float32 from hop to hop, and in the explicit backward.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, Mask, Segments, attend, attend_backward
from nestsp.attention.merge import Rows, merge_into, wide
from nestsp.attention.work import Block, GroupWork, Ring, meanwhile
from nestsp.comm.exchange import Exchange, start_pass

__all__ = ["around_backward", "around_forward", "make_ring"]


def make_ring(edges: Sequence[Sequence[int]], place: int, device: torch.device) -> tuple[Ring, Segments]:
    """Lay out a ring.

    Args:
        edges: For each sequence, the edges of its 2r chunks; see `nestsp.shard.zigzag`.
        place: This rank's member of the ring.
        device: Where the tensors are.

    Returns:
        The ring, and the parts of the sequences that this member holds.
    """
    degree = len(edges[0]) // 2
    # Of each member and sequence: the rows of its two chunks in the member's stream.
    held = [_chunk_rows(edges, member) for member in range(degree)]
    mine = held[place]
    blocks: list[Block | None] = []
    for source, theirs in enumerate(held):
        if source == place:
            seen = []
        elif source < place:
            seen = [(range(a.start, b.stop), c) for (a, b), (c, _) in zip(mine, theirs, strict=True)]
        else:
            seen = [(b, range(c.start, d.stop)) for (_, b), (c, d) in zip(mine, theirs, strict=True)]
        blocks.append(_block([(queries, keys) for queries, keys in seen if queries and keys], device))
    lengths = (second.stop - first.start for first, second in mine)
    num_tokens = tuple(member[-1][1].stop for member in held)
    return Ring(place, num_tokens, tuple(blocks)), Segments.of(tuple(n for n in lengths if n), device)


def _chunk_rows(edges: Sequence[Sequence[int]], member: int) -> list[tuple[range, range]]:
    sizes = [e[c + 1] - e[c] for e in edges for c in (member, len(e) - 2 - member)]
    stops = list(accumulate(sizes))
    rows = [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return list(zip(rows[::2], rows[1::2], strict=True))


def _block(seen: Sequence[tuple[range, range]], device: torch.device) -> Block | None:
    """A block of (queries, keys) of some sequences, none of them empty."""
    if not seen:
        return None
    queries, keys = zip(*seen, strict=True)
    return Block(
        _rows(queries, device),
        _rows(keys, device),
        Mask.full(Segments.of(tuple(map(len, queries)), device), Segments.of(tuple(map(len, keys)), device)),
    )


def _rows(parts: Sequence[range], device: torch.device) -> Rows:
    if all(a.stop == b.start for a, b in pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(device, non_blocking=True)


def around_forward(
    work: GroupWork, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> Generator[Exchange, None, tuple[Tensor, Tensor]]:
    """Attention of the queries here over the keys of all members. Yields once for each pass.

    Args:
        work: The group; without a ring, this is its causal attention.
        kernel: The attention kernel.
        scale: Factor of the scores.
        q: [T, N, H], this rank's heads of the tokens that the ranks inside hold together.
        k: [T, K, H].
        v: [T, K, H].

    Returns:
        out [T, N, H] and log-sum-exp [N, T].
    """
    kv_of_query, ring = work.mine.kv_of_query, work.ring
    if ring is None:
        return attend(kernel, q, k, v, work.mask, scale, kv_of_query)
    sums: list[Tensor] = []  # out and log-sum-exp over the blocks seen so far

    def see_own(k: Tensor, v: Tensor) -> None:
        out, lse = attend(kernel, q, k, v, work.mask, scale, kv_of_query)
        sums.extend((wide(out), lse))

    def see(block: Block | None, k: Tensor, v: Tensor) -> None:
        if block is None or not kv_of_query:
            return
        rows, seen = block.queries, block.keys
        part, part_lse = attend(kernel, q[rows], k[seen], v[seen], block.mask, scale, kv_of_query)
        merge_into(sums[0], sums[1], rows, part, part_lse)

    arriving = meanwhile(work, partial(_pass_on, work, ring, 1, (), (k, v)), partial(see_own, k, v))
    for hop in range(1, ring.degree):
        yield arriving
        k, v = arriving.finish()
        compute = partial(see, ring.blocks[ring.place - hop], k, v)
        if hop < ring.degree - 1:
            arriving = meanwhile(work, partial(_pass_on, work, ring, hop + 1, (), (k, v)), compute)
        else:
            compute()
    total, lse = sums
    return total.to(q.dtype), lse


def around_backward(
    work: GroupWork,
    kernel: Kernel,
    scale: float,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Generator[Exchange, None, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of `around_forward`. Yields once for each pass.

    Returns:
        dq [T, N, H], dk and dv [T, K, H].
    """
    kv_of_query, ring, dtype = work.mine.kv_of_query, work.ring, q.dtype
    if ring is None:
        return attend_backward(kernel, dout, q, k, v, out, lse, work.mask, scale, kv_of_query)
    sums: list[Tensor] = []  # dq over the blocks seen so far; dk and dv of this member's keys

    def see_own(k: Tensor, v: Tensor) -> None:
        sums.extend(map(wide, attend_backward(kernel, dout, q, k, v, out, lse, work.mask, scale, kv_of_query)))

    def see(block: Block | None, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        if block is None or not kv_of_query:
            return
        rows, seen = block.queries, block.keys
        given = (dout[rows], q[rows], k[seen], v[seen], out[rows], lse[:, rows])
        parts = attend_backward(kernel, *given, block.mask, scale, kv_of_query)
        sums[0][rows] += parts[0]
        dk[seen] += parts[1]
        dv[seen] += parts[2]

    arriving = meanwhile(work, partial(_pass_on, work, ring, 1, (), (k, v)), partial(see_own, k, v))
    # What is known here of the gradients of the block that came last; they follow it in the next pass but one.
    following: tuple[Tensor, ...] = ()
    for hop in range(1, ring.degree):
        yield arriving
        *behind, k, v = arriving.finish()
        if behind:
            _add(following, behind)
        passed = following
        following = (wide(torch.zeros_like(k)), wide(torch.zeros_like(v)))
        compute = partial(see, ring.blocks[ring.place - hop], k, v, *following)
        leaving = (k, v) if hop < ring.degree - 1 else ()
        if passed or leaving:
            arriving = meanwhile(work, partial(_pass_on, work, ring, hop + 1, passed, leaving), compute)
        else:
            compute()
    dq, dk, dv = sums
    if ring.degree > 2:
        yield arriving
        _add(following, arriving.finish())
    arriving = _pass_on(work, ring, ring.degree + 1, following, ())
    yield arriving
    _add((dk, dv), arriving.finish())
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _pass_on(
    work: GroupWork, ring: Ring, hop: int, gradients: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Exchange:
    """Send a block's keys and values, and the gradients of the one before it, to the next member; begin to receive.

    Args:
        work: The group.
        ring: Its ring.
        hop: How many members the arriving keys and values have then passed.
        gradients: Of the block that has passed ``hop - 2`` members; may be none.
        keys: Keys and values of the block that has passed ``hop - 1`` members; may be none.
    """
    assert work.link is not None
    shapes = []
    for tensors, passed in ((gradients, hop - 1), (keys, hop)):
        num_tokens = ring.num_tokens[(ring.place - passed) % ring.degree]
        shapes += [(num_tokens, *tensor.shape[1:]) for tensor in tensors]
    return start_pass(work.link, _neighbour(work, 1), (*gradients, *keys), _neighbour(work, -1), shapes)


def _neighbour(work: GroupWork, step: int) -> int:
    """The rank of the group at this rank's place in the next (1) or last (-1) member of the ring."""
    assert work.link is not None
    return (work.member + step * len(work.heads)) % work.link.degree


def _add(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part
