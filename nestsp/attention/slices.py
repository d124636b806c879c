"""Ulysses in slices of heads: while a rank attends to one slice, the next is on its way to it.

A group without company on its ranks has nothing else to hide its exchanges behind. With S slices of each rank's query
heads, in S + 2 communications:

1. number 0 brings slice 0, and with it the keys and values of all slices;
2. each further one, up to S - 1, brings a slice while the one before is attended to, and takes home what the slice
   before that one gave;
3. numbers S and S + 1 take the last two home. Backward, the last one also carries the gradients of keys and values, to
   which all slices add.

So of all that travels only the first slice and the last are waited for. The bytes are those of one piece
(`nestsp.attention.ulysses`); the price is S - 1 more calls of the kernel, as many latencies, and copies where the heads
are: in a communication that goes both ways (numbers 2 to S - 1), of the slice that comes and of the one that leaves;
and of what is saved of all slices, to be one tensor each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, attend, attend_backward
from nestsp.attention.merge import merge_sinks, sink_gradients, wide
from nestsp.attention.ulysses import Cargo, apart, cut, from_heads, start, sum_heads, to_heads
from nestsp.attention.work import Attended, GroupWork, Saved, meanwhile
from nestsp.comm.exchange import Exchange
from nestsp.shape import HeadShare

__all__ = ["sliced_backward", "sliced_forward"]


def sliced_forward(
    work: GroupWork, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Generator[Exchange, None, Attended]:
    """Attention of a Ulysses group, forward. Yields each communication once, while it is on the wire.

    Args:
        work: The group.
        kernel: The attention kernel.
        scale: Factor of the scores.
        q: [num_rows, N, H].
        k: [num_rows, K, H].
        v: [num_rows, K, H].
        sinks: [N], scores of the attention sinks, if there are any.

    Returns:
        out [num_rows, N, H], and what backward needs.
    """
    home = torch.empty_like(q, memory_format=torch.contiguous_format)
    kv_heads: list[Tensor] = []
    done: list[tuple[Tensor, Tensor, Tensor]] = []  # q, out and log-sum-exp of each slice

    def bring(number: int) -> Cargo:
        return to_heads(work, _shares(work, number), (q,), (k, v) if number == 0 else ())

    def work_on(number: int, stream: Tensor) -> None:
        mine = work.slices[number][work.place]
        q_part, *keys_and_values = apart(stream, _shares(work, number)[work.place], 1, 2 if number == 0 else 0)
        kv_heads.extend(keys_and_values)
        keys, values = (_of(x, work.mine.kv, mine.kv) for x in kv_heads)
        out, lse = attend(kernel, q_part, keys, values, work.mask, scale, mine.kv_of_query)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks[cut(mine.query)])
        done.append((q_part, out, lse))

    def send(number: int) -> Cargo:
        return from_heads(work, _shares(work, number), (done[number][1],), ())

    def unload(number: int, arrived: Sequence[Tensor]) -> None:
        for member, part in zip(work.slices[number], arrived, strict=True):
            home[:, cut(member.query)] = part

    yield from _pipeline(work, bring, work_on, send, unload)
    lse = torch.cat([of_slice[2] for of_slice in done])
    if work.keep == "output":
        return Attended(home, Saved(q, k, v, home, lse))
    q_heads, out_heads = (torch.cat([of_slice[which] for of_slice in done], 1) for which in (0, 1))
    k_heads, v_heads = (x.contiguous() for x in kv_heads)  # a view would keep the first slice's queries, too
    return Attended(home, Saved(q_heads, k_heads, v_heads, out_heads, lse))


def sliced_backward(
    work: GroupWork,
    kernel: Kernel,
    scale: float,
    num_kv_heads: int,
    saved: Saved,
    dout: Tensor,
    sinks: Tensor | None,
) -> Generator[Exchange, None, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Attention of a Ulysses group, backward; see `nestsp.attention.hybrid.backward_phases`."""
    q, k, v, out, lse = saved
    at_home = work.keep == "output"  # all but log-sum-exp is where the tokens are
    dq = torch.empty_like(dout, memory_format=torch.contiguous_format)
    dkv: list[Tensor] = []
    kv_heads: list[Tensor] = [] if at_home else [k, v]
    kv_grads: list[Tensor] = []  # of all slices so far
    q_grads: list[Tensor] = []
    dsinks = None if sinks is None else wide(sinks.new_zeros(sinks.shape))

    def bring(number: int) -> Cargo:
        if not at_home:
            return to_heads(work, _shares(work, number), (dout,), ())
        return to_heads(work, _shares(work, number), (q, out, dout), (k, v) if number == 0 else ())

    def work_on(number: int, stream: Tensor) -> None:
        mine = work.slices[number][work.place]
        if at_home:
            arrived = apart(stream, _shares(work, number)[work.place], 3, 2 if number == 0 else 0)
            q_part, out_part, dout_part, *keys_and_values = arrived
            kv_heads.extend(keys_and_values)
        else:
            dout_part = stream
            q_part, out_part = (_of(x, work.mine.query, mine.query) for x in (q, out))
        lse_part = lse[_rows(work.mine.query, mine.query)]
        if not kv_grads:
            kv_grads.extend(wide(torch.zeros_like(x)) for x in kv_heads)
        if dsinks is not None and sinks is not None:
            dsinks[cut(mine.query)] = sink_gradients(dout_part, out_part, lse_part, sinks[cut(mine.query)])
        keys, values = (_of(x, work.mine.kv, mine.kv) for x in kv_heads)
        q_grad, *grads = attend_backward(
            kernel, dout_part, q_part, keys, values, out_part, lse_part, work.mask, scale, mine.kv_of_query
        )
        q_grads.append(q_grad)
        for total, grad in zip(kv_grads, grads, strict=True):
            total[:, _rows(work.mine.kv, mine.kv)] += grad

    def send(number: int) -> Cargo:
        last = number == len(work.slices) - 1
        grads = [grad.to(dout.dtype) for grad in kv_grads] if last else []
        return from_heads(work, _shares(work, number), (q_grads[number],), grads)

    def unload(number: int, arrived: Sequence[Tensor]) -> None:
        num_tensors = 3 if number == len(work.slices) - 1 else 1
        for member, part in zip(work.slices[number], arrived[::num_tensors], strict=True):
            dq[:, cut(member.query)] = part
        dkv.extend(sum_heads(work, arrived[which::num_tensors], num_kv_heads) for which in range(1, num_tensors))

    yield from _pipeline(work, bring, work_on, send, unload)
    dk, dv = dkv
    return dq, dk, dv, dsinks


def _pipeline(
    work: GroupWork,
    bring: Callable[[int], Cargo],
    work_on: Callable[[int, Tensor], None],
    send: Callable[[int], Cargo],
    unload: Callable[[int, Sequence[Tensor]], None],
) -> Generator[Exchange, None, None]:
    """Bring each slice, work on it while the next one is brought, and send what it gave in the communication after."""
    num_slices = len(work.slices)
    stream: Tensor | None = None  # of the slice that came last
    for number in range(num_slices + 2):
        leaving = [send(number - 2)] if number >= 2 else []
        coming = [bring(number)] if number < num_slices else []
        issue = partial(start, work, *leaving, *coming)
        exchange = issue() if stream is None else meanwhile(work, issue, partial(work_on, number - 1, stream))
        yield exchange
        arrived = exchange.finish()
        stream = None
        if leaving and coming:  # by turns, a piece of each; those of the slice that comes are not yet one stream
            arrived, pieces = arrived[::2], arrived[1::2]
            stream = torch.cat(pieces)
        elif coming:
            (stream,) = arrived
        if leaving:
            unload(number - 2, arrived)


def _shares(work: GroupWork, number: int) -> list[HeadShare]:
    """What the ranks inside work for in one slice, keys and values of all slices included."""
    return [replace(part, kv=whole.kv) for part, whole in zip(work.slices[number], work.heads, strict=True)]


def _rows(whole: range, part: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start) if part else slice(0)


def _of(x: Tensor, whole: range, part: range) -> Tensor:
    """Some heads of [T, heads, H]."""
    return x[:, _rows(whole, part)]
