"""The attention of one group, whichever its kind, as phases that end at each communication.

A group of u × r ranks is a ring of r members, each of which is u adjacent ranks. In one form:

1. inside each member, exchange tokens for heads;
2. pass keys and values round the ring, attending to each block, and merge the sinks of this rank's heads, if any;
3. inside each member, exchange back.

Ulysses alone is r = 1, in one piece or in slices of heads (`nestsp.attention.slices`), a ring alone is u = 1, one rank
has neither; what is not there yields nothing. All communications are collectives of the group itself, so no kind needs
process groups beyond those of the tree.

Source: hybrid of Ulysses and ring, USP (Fang & Zhao, arXiv:2405.07719). Ours differs in that heads need divide by
nothing, in the one communicator, and in the order of ranks: the exchange of heads, which moves more, is between
neighbours.
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from nestsp.attention.local import Kernel
from nestsp.attention.merge import merge_sinks, sink_gradients, wide
from nestsp.attention.ring import around_backward, around_forward
from nestsp.attention.slices import sliced_backward, sliced_forward
from nestsp.attention.ulysses import cut, heads_to_tokens, tokens_to_heads
from nestsp.attention.work import Attended, GroupWork, Kept, Saved
from nestsp.comm.exchange import Exchange

__all__ = ["backward_phases", "forward_phases"]


def forward_phases(
    work: GroupWork,
    kernel: Kernel,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept | None,
    sinks: Tensor | None = None,
) -> Generator[Exchange, None, Attended]:
    """Attention of one group, forward. Yields each communication once, while it is on the wire.

    Args:
        work: The group.
        kernel: The attention kernel.
        scale: Factor of the scores.
        q: [num_rows, N, H].
        k: [num_rows, K, H].
        v: [num_rows, K, H].
        kept: In a recompute, what the forward pass kept of this group, if anything.
        sinks: [N], scores of the attention sinks, if there are any.
    """
    if kept is not None:  # no communication and no kernel: backward starts from the token layout
        return Attended(kept.out, Saved(q, k, v, kept.out, kept.lse))
    if work.slices:
        return (yield from sliced_forward(work, kernel, scale, q, k, v, sinks))
    q_heads, k_heads, v_heads = yield from tokens_to_heads(work, (q,), (k, v))
    out_heads, lse = yield from around_forward(work, kernel, scale, q_heads, k_heads, v_heads)
    if sinks is not None:
        out_heads, lse = merge_sinks(out_heads, lse, sinks[cut(work.mine.query)])
    (out,) = yield from heads_to_tokens(work, (out_heads,), (), k.shape[1])
    if work.keep == "output":
        return Attended(out, Saved(q, k, v, out, lse))
    return Attended(out, Saved(q_heads, k_heads, v_heads, out_heads, lse))


def backward_phases(
    work: GroupWork,
    kernel: Kernel,
    scale: float,
    num_kv_heads: int,
    saved: Saved,
    dout: Tensor,
    sinks: Tensor | None = None,
) -> Generator[Exchange, None, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Attention of one group, backward. Yields each communication once, while it is on the wire.

    Args:
        work: The group.
        kernel: The attention kernel.
        scale: Factor of the scores.
        num_kv_heads: Key/value heads of the model.
        saved: What forward saved.
        dout: [num_rows, N, H], gradient of this rank's rows of the output.
        sinks: [N], as in forward.

    Returns:
        dq [num_rows, N, H], dk and dv [num_rows, K, H], and with sinks this rank's part of their gradient [N]: of its
        heads, over the tokens that it worked for.
    """
    if work.slices:
        return (yield from sliced_backward(work, kernel, scale, num_kv_heads, saved, dout, sinks))
    q, k, v, out, lse = saved
    if work.keep == "output":  # all of it is where the tokens are, and comes to the heads now
        arrived = yield from tokens_to_heads(work, (q, out, dout), (k, v))
        if work.ring is not None and len(work.heads) > 1:  # a kernel may want dense rows, and ask again for each block
            arrived = [x.contiguous() for x in arrived]
        q, out, dout, k, v = arrived
    else:
        (dout,) = yield from tokens_to_heads(work, (dout,), ())
    dsinks = None
    if sinks is not None:
        mine = cut(work.mine.query)
        dsinks = wide(sinks.new_zeros(sinks.shape))
        dsinks[mine] = sink_gradients(dout, out, lse, sinks[mine])
    dq, dk, dv = yield from around_backward(work, kernel, scale, dout, q, k, v, out, lse)
    dq, dk, dv = yield from heads_to_tokens(work, (dq,), (dk, dv), num_kv_heads)
    return dq, dk, dv, dsinks
