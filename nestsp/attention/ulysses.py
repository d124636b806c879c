"""Ulysses attention of one group: exchange tokens for heads, attend, exchange back.

Each member holds a contiguous part of the group's packed stream, with all heads; after the first exchange it holds the
whole stream with its share of the heads. One all-to-all carries queries, keys and values. Parts need not be equal and
heads need not divide by ranks (then some members have one more, or none). With fewer key/value heads than ranks, those
are sent to every member whose queries need them, and their gradients are summed at home.

Each phase function is a generator that yields once for each exchange, while it is on the wire. Exchanges of a layer and
group, per token of width q + 2 kv: forward q + 2 kv in, q out; backward q in, q + 2 kv out. With ``keep == "output"``
backward brings 3 q + 2 kv in, and the recompute nothing.

Source: DeepSpeed Ulysses (Jacobs et al., arXiv:2309.14509). Ours differs in the uneven splits, in the compact keys and
values, and in that its backward is called explicitly.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, Segments, attend, attend_backward
from nestsp.comm.exchange import start_exchange
from nestsp.comm.groups import Link
from nestsp.plan import Keep
from nestsp.shape import HeadShare

__all__ = ["GroupWork", "Kept", "Saved", "backward_phases", "forward_phases"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupWork:
    """One used group of a microbatch, as one of its members sees it.

    Attributes:
        level: Level of the group in its tree.
        link: Its process group; None for a group of one rank.
        member: This rank's place in the group.
        sizes: Tokens that each member holds; some may hold none.
        rows: Where this rank's tokens of the group lie among all its tokens.
        segments: The group's sequences; together ``sum(sizes)`` tokens.
        heads: The heads of each member.
        keep: What recomputation keeps: ``none``, or ``output``.
    """

    level: int
    link: Link | None
    member: int
    sizes: tuple[int, ...]
    rows: slice
    segments: Segments
    heads: tuple[HeadShare, ...]
    keep: Keep

    @property
    def mine(self) -> HeadShare:
        """The heads that this rank works for."""
        return self.heads[self.member]

    @property
    def num_rows(self) -> int:
        """Tokens of the group that this rank holds."""
        return self.sizes[self.member]


class Saved(NamedTuple):
    """What a group's backward pass needs.

    With ``keep == "none"`` these are in head layout (all tokens of the group, this member's heads); with ``"output"``
    q, k, v and out are in token layout (this member's tokens, all heads), log-sum-exp in head layout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kept(NamedTuple):
    """What a recompute finds of the forward pass: out in token layout, log-sum-exp in head layout."""

    out: Tensor
    lse: Tensor


class Attended(NamedTuple):
    """Result of a forward pass: this rank's rows of the output, and what backward needs."""

    out: Tensor
    saved: Saved


def forward_phases(
    work: GroupWork, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None
) -> Generator[None, None, Attended]:
    """Attention of one group, forward. Yields while an exchange is on the wire.

    Args:
        work: The group.
        kernel: The attention kernel.
        scale: Factor of the scores.
        q: [num_rows, N, H].
        k: [num_rows, K, H].
        v: [num_rows, K, H].
        kept: In a recompute, what the forward pass kept of this group, if anything.
    """
    if kept is not None:  # no exchange and no kernel: backward starts from the token layout
        return Attended(kept.out, Saved(q, k, v, kept.out, kept.lse))
    if work.link is None:
        out, lse = attend(kernel, q, k, v, work.segments, scale, work.mine.kv_of_query)
        return Attended(out, Saved(q, k, v, out, lse))

    size, mine = q.shape[2], work.mine
    num_query, num_kv = len(mine.query), len(mine.kv)
    arriving = start_exchange(
        work.link,
        [(q[:, _cut(h.query)], k[:, _cut(h.kv)], v[:, _cut(h.kv)]) for h in work.heads],
        [((t, num_query, size), (t, num_kv, size), (t, num_kv, size)) for t in work.sizes],
    )
    yield
    q_heads, k_heads, v_heads = (torch.cat(x) for x in zip(*arriving.finish(), strict=True))
    out_heads, lse = attend(kernel, q_heads, k_heads, v_heads, work.segments, scale, mine.kv_of_query)
    leaving = start_exchange(
        work.link,
        [(part,) for part in out_heads.split(work.sizes)],
        [((work.num_rows, len(h.query), size),) for h in work.heads],
    )
    yield
    out = torch.cat([part for (part,) in leaving.finish()], 1)
    if work.keep == "output":
        return Attended(out, Saved(q, k, v, out, lse))
    return Attended(out, Saved(q_heads, k_heads, v_heads, out_heads, lse))


def backward_phases(
    work: GroupWork, kernel: Kernel, scale: float, num_kv_heads: int, saved: Saved, dout: Tensor
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Attention of one group, backward. Yields while an exchange is on the wire.

    Args:
        work: The group.
        kernel: The attention kernel.
        scale: Factor of the scores.
        num_kv_heads: Key/value heads of the model.
        saved: What forward saved.
        dout: [num_rows, N, H], gradient of this rank's rows of the output.

    Returns:
        Gradients of q, k and v of this rank's rows.
    """
    q, k, v, out, lse = saved
    mine = work.mine
    if work.link is None:
        return attend_backward(kernel, dout, q, k, v, out, lse, work.segments, scale, mine.kv_of_query)

    size = dout.shape[2]
    num_query, num_kv = len(mine.query), len(mine.kv)
    if work.keep == "output":
        arriving = start_exchange(
            work.link,
            [
                (q[:, _cut(h.query)], k[:, _cut(h.kv)], v[:, _cut(h.kv)], out[:, _cut(h.query)], dout[:, _cut(h.query)])
                for h in work.heads
            ],
            [
                ((t, num_query, size), (t, num_kv, size), (t, num_kv, size), (t, num_query, size), (t, num_query, size))
                for t in work.sizes
            ],
        )
        yield
        q, k, v, out, dout_heads = (torch.cat(x) for x in zip(*arriving.finish(), strict=True))
    else:
        arriving = start_exchange(
            work.link,
            [(dout[:, _cut(h.query)],) for h in work.heads],
            [((t, num_query, size),) for t in work.sizes],
        )
        yield
        dout_heads = torch.cat([part for (part,) in arriving.finish()])
    dq, dk, dv = attend_backward(kernel, dout_heads, q, k, v, out, lse, work.segments, scale, mine.kv_of_query)
    leaving = start_exchange(
        work.link,
        list(zip(dq.split(work.sizes), dk.split(work.sizes), dv.split(work.sizes), strict=True)),
        [
            (
                (work.num_rows, len(h.query), size),
                (work.num_rows, len(h.kv), size),
                (work.num_rows, len(h.kv), size),
            )
            for h in work.heads
        ],
    )
    yield
    parts = leaving.finish()
    dq_home = torch.cat([part[0] for part in parts], 1)
    return (
        dq_home,
        _sum_heads(work, [p[1] for p in parts], num_kv_heads),
        _sum_heads(work, [p[2] for p in parts], num_kv_heads),
    )


def _cut(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _sum_heads(work: GroupWork, parts: list[Tensor], num_kv_heads: int) -> Tensor:
    """Key or value gradients of all heads; a head that several members worked for is summed in a wide type."""
    counts = [0] * num_kv_heads
    for heads in work.heads:
        for head in heads.kv:
            counts[head] += 1
    if max(counts) == 1:
        return torch.cat(parts, 1)
    first = parts[0]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = torch.zeros(first.shape[0], num_kv_heads, first.shape[2], dtype=wide, device=first.device)
    for heads, part in zip(work.heads, parts, strict=True):
        total[:, _cut(heads.kv)] += part
    return total.to(first.dtype)
