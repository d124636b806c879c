"""Attention of sequences that lie packed one after another, by explicit forward and backward calls.

Two forms: *causal*, of whole sequences on themselves, in a sliding window or not, and *block*, where the queries of
each sequence see all of some other keys, of another number: what a ring's member does with the keys of another one. A
block's backward takes the output and log-sum-exp over *all* blocks, and gives this block's part of the gradients. Both
may cap their scores softly. Attention sinks are no matter of kernels: see `nestsp.attention.merge`.

Nothing here is differentiated by autograd: the groups' exchanges and kernels are interleaved in both directions, so
each kernel's backward is called when its group's turn comes. All kernels return the log-sum-exp that their backward
needs. No kernel ever sees an empty tensor (PyTorch's CPU flash kernel dies on one).

Letters: T tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nestsp.attention.merge import wide

__all__ = [
    "CpuFlash",
    "CudaFlash",
    "Kernel",
    "MathKernel",
    "PackedKernel",
    "Segments",
    "attend",
    "attend_backward",
    "attend_block",
    "attend_block_backward",
    "choose_kernel",
]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Sequences packed one after another.

    Attributes:
        lengths: Tokens of each, all at least 1.
        cu_seqlens: int32 [len(lengths) + 1], where each starts and the last ends, on the tensors' device.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        """Segments of some lengths."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts.to(device, non_blocking=True))

    def slices(self) -> list[slice]:
        """Where each sequence lies."""
        ends = list(accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


class Kernel(Protocol):
    """Attention of packed sequences; N is a multiple of K, equal query heads on each key/value head.

    S is the number of keys. In the causal form S = T and ``keys`` is ``queries``; in the block form both have as many
    segments, and the queries of each see all keys of the same number. No segment is empty.
    """

    name: str

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """The kernel for layers of another kind.

        Args:
            window: A causal query sees itself and the ``window - 1`` keys before it; None for all keys.
            softcap: Scores s become ``softcap · tanh(s / softcap)``; None leaves them.
        """
        ...

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal. Return (out [T, N, H], log-sum-exp [N, T] in float32 or float64)."""
        ...

    def backward(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        segments: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Causal. Return (dq [T, N, H], dk [T, K, H], dv [T, K, H])."""
        ...

    def forward_block(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, queries: Segments, keys: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Block. Return (out [T, N, H], log-sum-exp [N, T]) over these keys alone."""
        ...

    def backward_block(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Block, with out and log-sum-exp over all keys. Return (dq [T, N, H], dk [S, K, H], dv [S, K, H])."""
        ...


class PackedKernel:
    """The two forms of a kernel that has one implementation for both.

    Args:
        window: Of the causal form; None sees all keys.
        softcap: Of both forms; None leaves scores as they are.
    """

    name: str

    def __init__(self, window: int | None = None, softcap: float | None = None) -> None:
        self.window = window
        self.softcap = softcap

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return type(self)(window, softcap)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        return self._forward(q_TNH, k_TKH, v_TKH, segments, segments, True, scale)

    def backward(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        segments: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        return self._backward(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, segments, segments, True, scale)

    def forward_block(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, queries: Segments, keys: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        assert self.window is None, "a window knows no blocks: how far apart their tokens are is not told"
        return self._forward(q_TNH, k_SKH, v_SKH, queries, keys, False, scale)

    def backward_block(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        assert self.window is None, "a window knows no blocks: how far apart their tokens are is not told"
        return self._backward(dout_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_NT, queries, keys, False, scale)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class CpuFlash(PackedKernel):
    """PyTorch's flash kernel for CPUs, one call a sequence. float64, float32, bfloat16, float16.

    Its causal mask aligns the first query with the first key, so it is only asked for square blocks under a mask. It
    has no windows and no soft cap: where a window cuts anything off, and under a cap, `MathKernel` runs instead.
    """

    name = "flash (PyTorch, CPU)"

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return CpuFlash(window) if softcap is None else MathKernel(window, softcap)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if self.window is not None and max(queries.lengths) > self.window:
            return MathKernel(self.window)._forward(q, k, v, queries, keys, causal, scale)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for s, t in zip(queries.slices(), keys.slices(), strict=True):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[s]), _heads_first(k[t]), _heads_first(v[t]), 0.0, causal, scale=scale
            )
            out[s] = part[0].transpose(0, 1)
            lse[:, s] = part_lse[0]
        return out, lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.window is not None and max(queries.lengths) > self.window:
            return MathKernel(self.window)._backward(dout, q, k, v, out, lse_NT, queries, keys, causal, scale)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for s, t in zip(queries.slices(), keys.slices(), strict=True):
            dq_s, dk_t, dv_t = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout[s]),
                _heads_first(q[s]),
                _heads_first(k[t]),
                _heads_first(v[t]),
                _heads_first(out[s]),
                lse_NT[None, :, s],
                0.0,
                causal,
                scale=scale,
            )
            dq[s], dk[t], dv[t] = (part[0].transpose(0, 1) for part in (dq_s, dk_t, dv_t))
        return dq, dk, dv


class CudaFlash(PackedKernel):
    """The flash kernel that PyTorch ships for GPUs, one call for all sequences.

    bfloat16 and float16; head sizes that are multiples of 8, up to 256. It has windows, but no soft cap: `MathKernel`
    runs under one.
    """

    name = "flash (PyTorch, CUDA)"

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return CudaFlash(window) if softcap is None else MathKernel(window, softcap)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            queries.cu_seqlens,
            keys.cu_seqlens,
            max(queries.lengths),
            max(keys.lengths),
            0.0,
            causal,
            False,
            scale=scale,
            **self._window_sizes(),
        )
        return out, lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state is never read, but the operator wants one.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse_NT.contiguous(),
            queries.cu_seqlens,
            keys.cu_seqlens,
            max(queries.lengths),
            max(keys.lengths),
            0.0,
            causal,
            rng_state,
            unused,
            scale=scale,
            **self._window_sizes(),
        )
        return dq, dk, dv

    def _window_sizes(self) -> dict[str, int]:
        return {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}


class MathKernel(PackedKernel):
    """Plain softmax in blocks of queries, any device and dtype: for what the flash kernels lack.

    Memory: one block's scores, block × S × N elements of float32 (float64 for float64), of which there are about four
    at a time. A block has at most `block` queries, fewer where that would be more than `block_elements`, at least one.
    With a window, S is at most ``block + window - 1``. Query heads of one key/value head are rows of one product, so
    that keys and values are never repeated.
    """

    name = "math (PyTorch operators)"
    block = 512
    block_elements = 1 << 24

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k, v = (wide(x) for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for rows, seen in self._blocks(q.shape[1], queries, keys, causal):
            scores = self._hide(self._scores(q[rows], k[seen], scale), causal)
            part_lse = scores.logsumexp(-1)
            lse[:, rows] = part_lse
            out[rows] = _mix((scores - part_lse[..., None]).exp(), v[seen])
        return out.to(dtype), lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        queries: Segments,
        keys: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = q.dtype
        dout, q, k, v, out = (wide(x) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta_NT = (dout * out).sum(-1).T
        for rows, seen in self._blocks(q.shape[1], queries, keys, causal):
            scores = self._scores(q[rows], k[seen], scale)
            slope = None if self.softcap is None else 1 - (scores / self.softcap).square()
            weights = (self._hide(scores, causal) - lse_NT[:, rows, None]).exp()
            dscores = weights * (_products(dout[rows], v[seen]) - delta_NT[:, rows, None])
            if slope is not None:
                dscores *= slope
            dscores *= scale
            dq[rows] = _mix(dscores, k[seen])
            dk[seen] += _collect(dscores, q[rows], k.shape[1])
            dv[seen] += _collect(weights, dout[rows], k.shape[1])
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _blocks(self, num_heads: int, queries: Segments, keys: Segments, causal: bool) -> Iterator[tuple[slice, slice]]:
        """(queries, the keys that they may see), block by block."""
        for s, t in zip(queries.slices(), keys.slices(), strict=True):
            most_seen = t.stop - t.start if self.window is None else min(t.stop - t.start, self.block + self.window)
            size = max(1, min(self.block, self.block_elements // (num_heads * most_seen)))
            for start in range(s.start, s.stop, size):
                stop = min(start + size, s.stop)
                first = t.start if self.window is None else max(t.start, start - self.window + 1)
                yield slice(start, stop), slice(first, stop) if causal else t

    def _scores(self, q_QNH: Tensor, k_SKH: Tensor, scale: float) -> Tensor:
        """Scores [N, Q, S], capped but not masked."""
        scores = _products(q_QNH, k_SKH).mul_(scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def _hide(self, scores: Tensor, causal: bool) -> Tensor:
        """Mask scores in place; under the causal mask, the last query sees the last key."""
        if not causal:
            return scores
        last_seen = scores.shape[2] - scores.shape[1]  # by the first query
        all_of = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        hidden = all_of.triu(last_seen + 1)
        if self.window is not None:
            hidden |= all_of.tril(last_seen - self.window)
        return scores.masked_fill_(hidden, float("-inf"))


def _grouped(x_QNH: Tensor, num_kv: int) -> Tensor:
    """[K, N/K · Q, H]: the rows of all query heads of each key/value head."""
    return x_QNH.transpose(0, 1).reshape(num_kv, -1, x_QNH.shape[2])


def _products(x_QNH: Tensor, y_SKH: Tensor) -> Tensor:
    """Scalar products [N, Q, S] of queries (or gradients of outputs) with keys (or values)."""
    num_kv = y_SKH.shape[1]
    flat = torch.bmm(_grouped(x_QNH, num_kv), y_SKH.permute(1, 2, 0))
    return flat.view(x_QNH.shape[1], len(x_QNH), len(y_SKH))


def _mix(weights_NQS: Tensor, y_SKH: Tensor) -> Tensor:
    """[Q, N, H]: weighted sums over keys."""
    num_heads, num_queries, num_keys = weights_NQS.shape
    flat = torch.bmm(weights_NQS.reshape(y_SKH.shape[1], -1, num_keys), y_SKH.transpose(0, 1))
    return flat.view(num_heads, num_queries, -1).transpose(0, 1)


def _collect(weights_NQS: Tensor, x_QNH: Tensor, num_kv: int) -> Tensor:
    """[S, K, H]: weighted sums over queries, and over the query heads of each key/value head."""
    flat = weights_NQS.reshape(num_kv, -1, weights_NQS.shape[2])
    return torch.bmm(flat.transpose(1, 2), _grouped(x_QNH, num_kv)).transpose(0, 1)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, *, softcap: bool = False) -> Kernel:
    """The fastest kernel that is right for this device, dtype and head size, and has soft caps if they are needed."""
    from nestsp.attention.flash_attn import FlashAttn, has_flash_attn

    if device.type == "cpu":
        return MathKernel() if softcap else CpuFlash()
    if dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256:
        if not softcap:
            return CudaFlash()
        if has_flash_attn():
            return FlashAttn()
    return MathKernel()


def attend(
    kernel: Kernel,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    segments: Segments,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Causal attention of one member's heads; any mapping of query heads to key/value heads, also nothing at all.

    Args:
        kernel: The kernel.
        q_TNH: [T, N, H].
        k_TKH: [T, K, H].
        v_TKH: [T, K, H].
        segments: Their sequences, together T tokens.
        scale: Factor of the scores.
        kv_of_query: For each query head, its key/value head.

    Returns:
        out [T, N, H] and log-sum-exp [N, T].
    """
    if q_TNH.numel() == 0:
        return q_TNH.new_empty(q_TNH.shape), wide(q_TNH.new_empty(q_TNH.shape[1], q_TNH.shape[0]))
    k, v = _for_each_query(k_TKH, v_TKH, kv_of_query)
    return kernel.forward(q_TNH, k, v, segments, scale)


def attend_backward(
    kernel: Kernel,
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    segments: Segments,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` with respect to q, k and v, in their shapes."""
    if q_TNH.numel() == 0:
        return torch.zeros_like(q_TNH), torch.zeros_like(k_TKH), torch.zeros_like(v_TKH)
    k, v = _for_each_query(k_TKH, v_TKH, kv_of_query)
    dq, dk, dv = kernel.backward(dout_TNH, q_TNH, k, v, out_TNH, lse_NT, segments, scale)
    return dq, _sum_queries(dk, k_TKH, kv_of_query), _sum_queries(dv, v_TKH, kv_of_query)


def attend_block(
    kernel: Kernel,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's queries over all keys of the same number; as `attend`, with at least one head.

    Args:
        kernel: The kernel.
        q_TNH: [T, N, H].
        k_SKH: [S, K, H].
        v_SKH: [S, K, H].
        queries: Where each sequence's queries lie, together T.
        keys: Where its keys lie, together S.
        scale: Factor of the scores.
        kv_of_query: For each query head, its key/value head.

    Returns:
        out [T, N, H] and log-sum-exp [N, T], over these keys alone.
    """
    k, v = _for_each_query(k_SKH, v_SKH, kv_of_query)
    return kernel.forward_block(q_TNH, k, v, queries, keys, scale)


def attend_block_backward(
    kernel: Kernel,
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v, in their shapes.

    ``out_TNH`` and ``lse_NT`` are those over all blocks.
    """
    k, v = _for_each_query(k_SKH, v_SKH, kv_of_query)
    dq, dk, dv = kernel.backward_block(dout_TNH, q_TNH, k, v, out_TNH, lse_NT, queries, keys, scale)
    return dq, _sum_queries(dk, k_SKH, kv_of_query), _sum_queries(dv, v_SKH, kv_of_query)


def _for_each_query(k: Tensor, v: Tensor, kv_of_query: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values in a layout that kernels know: as they are, or one head for each query head."""
    if _is_regular(kv_of_query, k.shape[1]):
        return k, v
    index = torch.tensor(kv_of_query, device=k.device)
    return k.index_select(1, index), v.index_select(1, index)


def _sum_queries(grad: Tensor, like: Tensor, kv_of_query: tuple[int, ...]) -> Tensor:
    """The gradient of what `_for_each_query` was given; query heads that share a head are summed in a wide type."""
    if _is_regular(kv_of_query, like.shape[1]):
        return grad
    index = torch.tensor(kv_of_query, device=grad.device)
    return wide(grad).new_zeros(like.shape).index_add_(1, index, wide(grad)).to(like.dtype)


def _is_regular(kv_of_query: tuple[int, ...], num_kv: int) -> bool:
    """Whether kernels find the key/value head of each query head by division alone."""
    num_query = len(kv_of_query)
    if num_query % num_kv:
        return False
    return kv_of_query == tuple(head // (num_query // num_kv) for head in range(num_query))


def _heads_first(x_TNH: Tensor) -> Tensor:
    # The CPU kernel takes any strides but the last: it would read heads as dense, whatever they are.
    dense = x_TNH if x_TNH.stride(-1) == 1 else x_TNH.contiguous()
    return dense.transpose(0, 1)[None]
