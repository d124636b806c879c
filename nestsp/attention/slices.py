"""Ulysses in slices of heads: while a rank attends to one slice, the next is on its way to it.

A group without company on its ranks has nothing else to hide its exchanges behind. With S slices of each rank's query
heads, in S + 2 communications:

1. number 0 brings slice 0, and with it the keys and values of all slices;
2. each further one, up to S - 1, brings a slice while the one before is attended to, and takes home what the slice
   before that one gave;
3. numbers S and S + 1 take the last two home. Backward, the last one also carries the gradients of keys and values, to
   which all slices add.

So of all that travels only the first slice and the last are waited for. The bytes are those of one piece
(`nestsp.attention.ulysses`); the price is S - 1 more calls of the kernel, and as many latencies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, attend, attend_backward
from nestsp.attention.merge import merge_sinks, sink_gradients, wide
from nestsp.attention.ulysses import Cargo, cut, from_heads, received, start, sum_heads, to_heads
from nestsp.attention.work import GroupWork, Saved, meanwhile
from nestsp.comm.exchange import Exchange
from nestsp.shape import HeadShare

__all__ = ["sliced_backward", "sliced_forward"]


def sliced_forward(
    work: GroupWork, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Generator[Exchange, None, tuple[Tensor, Saved]]:
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
        out [num_rows, N, H]; and q, k, v, out and log-sum-exp in head layout.
    """
    home = torch.empty_like(q, memory_format=torch.contiguous_format)
    kv_heads: list[Tensor] = []
    done: list[tuple[Tensor, Tensor, Tensor]] = []  # q, out and log-sum-exp of each slice

    def bring(number: int) -> Cargo:
        return to_heads(work, _shares(work, number), (q,), (k, v) if number == 0 else ())

    def work_on(number: int, arrived: list[Tensor]) -> None:
        kv_heads.extend(arrived[1:])
        mine = work.slices[number][work.place]
        keys, values = (_of(x, work.mine.kv, mine.kv) for x in kv_heads)
        out, lse = attend(kernel, arrived[0], keys, values, work.mask, scale, mine.kv_of_query)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks[cut(mine.query)])
        done.append((arrived[0], out, lse))

    def send(number: int) -> Cargo:
        return from_heads(work, _shares(work, number), (done[number][1],), ())

    def unload(number: int, arrived: list[list[Tensor]]) -> None:
        for member, (part,) in zip(work.slices[number], arrived, strict=True):
            home[:, cut(member.query)] = part

    yield from _pipeline(work, bring, work_on, send, unload)
    q_heads, out_heads = (torch.cat([of_slice[which] for of_slice in done], 1) for which in (0, 1))
    lse = torch.cat([of_slice[2] for of_slice in done])
    return home, Saved(q_heads, kv_heads[0], kv_heads[1], out_heads, lse)


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

    def work_on(number: int, arrived: list[Tensor]) -> None:
        mine = work.slices[number][work.place]
        if at_home:
            q_part, out_part, dout_part, *keys_and_values = arrived
            kv_heads.extend(keys_and_values)
        else:
            (dout_part,) = arrived
            q_part, out_part = (_of(x, work.mine.query, mine.query) for x in (q, out))
        lse_part = _of(lse.T, work.mine.query, mine.query).T
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

    def unload(number: int, arrived: list[list[Tensor]]) -> None:
        for member, (part, *_) in zip(work.slices[number], arrived, strict=True):
            dq[:, cut(member.query)] = part
        columns = list(zip(*arrived, strict=True))
        dkv.extend(sum_heads(work, column, num_kv_heads) for column in columns[1:])

    yield from _pipeline(work, bring, work_on, send, unload)
    dk, dv = dkv
    return dq, dk, dv, dsinks


def _pipeline(
    work: GroupWork,
    bring: Callable[[int], Cargo],
    work_on: Callable[[int, list[Tensor]], None],
    send: Callable[[int], Cargo],
    unload: Callable[[int, list[list[Tensor]]], None],
) -> Generator[Exchange, None, None]:
    """Bring each slice, work on it while the next one is brought, and send what it gave in the communication after."""
    num_slices = len(work.slices)
    arrived: list[Tensor] = []
    for number in range(num_slices + 2):
        leaving = [send(number - 2)] if number >= 2 else []
        coming = [bring(number)] if number < num_slices else []
        issue = partial(start, work, *leaving, *coming)
        exchange = meanwhile(work, issue, partial(work_on, number - 1, arrived)) if arrived else issue()
        yield exchange
        tensors = received(work, exchange)
        num_home = len(leaving[0].shapes[0]) if leaving else 0
        if leaving:
            unload(number - 2, [of_member[:num_home] for of_member in tensors])
        arrived = [torch.cat(parts) for parts in zip(*(of_member[num_home:] for of_member in tensors), strict=True)]


def _shares(work: GroupWork, number: int) -> list[HeadShare]:
    """What the ranks inside work for in one slice, keys and values of all slices included."""
    return [replace(part, kv=whole.kv) for part, whole in zip(work.slices[number], work.heads, strict=True)]


def _rows(whole: range, part: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start) if part else slice(0)


def _of(x: Tensor, whole: range, part: range) -> Tensor:
    """Some heads of [T, heads, ...], in a layout of their own: kernels are not asked whether they take another one."""
    return x[:, _rows(whole, part)].contiguous()
