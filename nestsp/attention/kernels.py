"""The kernels that come with PyTorch: its flash kernels, and plain operators for what those lack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, Mask
from nestsp.attention.merge import wide

__all__ = ["CpuFlash", "CudaFlash", "MathKernel"]


@dataclass(frozen=True, slots=True)
class MathKernel:
    """Plain softmax in blocks of queries, any device and dtype: for what the flash kernels lack.

    Memory: one block's scores, block × S × N elements of float32 (float64 for float64), of which there are about four
    at a time. A block has at most `block` queries, fewer where that would be more than `block_elements`, at least one.
    With a window, S is at most ``block + window - 1``. Query heads of one key/value head are rows of one product, so
    that keys and values are never repeated.
    """

    name: ClassVar[str] = "math (PyTorch operators)"
    window: int | None = None
    softcap: float | None = None
    block: int = 512
    block_elements: int = 1 << 24

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return replace(self, window=window, softcap=softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        dtype = q.dtype
        q, k, v = (wide(x) for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for rows, seen in self._blocks(q.shape[1], mask):
            scores = self._hide(self._scores(q[rows], k[seen], scale), mask)
            part_lse = scores.logsumexp(-1)
            lse[:, rows] = part_lse
            out[rows] = _mix((scores - part_lse[..., None]).exp(), v[seen])
        return out.to(dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        mask: Mask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        dtype = q.dtype
        dout, q, k, v, out = (wide(x) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta_NT = (dout * out).sum(-1).T
        for rows, seen in self._blocks(q.shape[1], mask):
            scores = self._scores(q[rows], k[seen], scale)
            slope = None if self.softcap is None else 1 - (scores / self.softcap).square()
            weights = (self._hide(scores, mask) - lse_NT[:, rows, None]).exp()
            dscores = weights * (_products(dout[rows], v[seen]) - delta_NT[:, rows, None])
            if slope is not None:
                dscores *= slope
            dscores *= scale
            dq[rows] = _mix(dscores, k[seen])
            dk[seen] += _collect(dscores, q[rows], k.shape[1])
            dv[seen] += _collect(weights, dout[rows], k.shape[1])
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _blocks(self, num_heads: int, mask: Mask) -> Iterator[tuple[slice, slice]]:
        """(queries, the keys that they may see), block by block."""
        assert mask.is_causal or self.window is None
        for s, t in mask.blocks():
            most_seen = t.stop - t.start if self.window is None else min(t.stop - t.start, self.block + self.window)
            size = max(1, min(self.block, self.block_elements // (num_heads * most_seen)))
            for start in range(s.start, s.stop, size):
                stop = min(start + size, s.stop)
                first = t.start if self.window is None else max(t.start, start - self.window + 1)
                yield slice(start, stop), slice(first, stop) if mask.is_causal else t

    def _scores(self, q_QNH: Tensor, k_SKH: Tensor, scale: float) -> Tensor:
        """Scores [N, Q, S], capped but not masked."""
        scores = _products(q_QNH, k_SKH).mul_(scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def _hide(self, scores: Tensor, mask: Mask) -> Tensor:
        """Mask scores in place; under the causal mask, the last query sees the last key."""
        if not mask.is_causal:
            return scores
        last_seen = scores.shape[2] - scores.shape[1]  # by the first query
        all_of = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        hidden = all_of.triu(last_seen + 1)
        if self.window is not None:
            hidden |= all_of.tril(last_seen - self.window)
        return scores.masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class CpuFlash:
    """PyTorch's flash kernel for CPUs, one call a sequence. float64, float32, bfloat16, float16.

    Its causal mask aligns the first query with the first key, so it is only asked for square blocks under a mask. It
    has no windows and no soft cap: where a window cuts anything off, and under a cap, `MathKernel` runs instead.
    """

    name: ClassVar[str] = "flash (PyTorch, CPU)"
    window: int | None = None

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return CpuFlash(window) if softcap is None else MathKernel(window, softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        if self._cuts(mask):
            return MathKernel(self.window).forward(q, k, v, mask, scale)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for s, t in mask.blocks():
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[s]), _heads_first(k[t]), _heads_first(v[t]), 0.0, mask.is_causal, scale=scale
            )
            out[s] = part[0].transpose(0, 1)
            lse[:, s] = part_lse[0]
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        mask: Mask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        if self._cuts(mask):
            return MathKernel(self.window).backward(dout, q, k, v, out, lse_NT, mask, scale)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for s, t in mask.blocks():
            dq_s, dk_t, dv_t = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout[s]),
                _heads_first(q[s]),
                _heads_first(k[t]),
                _heads_first(v[t]),
                _heads_first(out[s]),
                lse_NT[None, :, s],
                0.0,
                mask.is_causal,
                scale=scale,
            )
            dq[s], dk[t], dv[t] = (part[0].transpose(0, 1) for part in (dq_s, dk_t, dv_t))
        return dq, dk, dv

    def _cuts(self, mask: Mask) -> bool:
        """Whether the window hides anything."""
        assert mask.is_causal or self.window is None
        return self.window is not None and max(mask.queries.lengths) > self.window


@dataclass(frozen=True, slots=True)
class CudaFlash:
    """The flash kernel that PyTorch ships for GPUs, one call for all sequences.

    bfloat16 and float16; head sizes that are multiples of 8, up to 256. It has windows, but no soft cap: `MathKernel`
    runs under one. Rows may have a stride; backward makes those of the output and its gradient dense, as the operator
    itself would.
    """

    name: ClassVar[str] = "flash (PyTorch, CUDA)"
    window: int | None = None

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return CudaFlash(window) if softcap is None else MathKernel(window, softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            0.0,
            mask.is_causal,
            False,
            scale=scale,
            **self._window_sizes(mask),
        )
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_NT: Tensor,
        mask: Mask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
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
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            0.0,
            mask.is_causal,
            rng_state,
            unused,
            scale=scale,
            **self._window_sizes(mask),
        )
        return dq, dk, dv

    def _window_sizes(self, mask: Mask) -> dict[str, int]:
        assert mask.is_causal or self.window is None
        return {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}


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


def _heads_first(x_TNH: Tensor) -> Tensor:
    # The CPU kernel takes any strides but the last: it would read heads as dense, whatever they are.
    dense = x_TNH if x_TNH.stride(-1) == 1 else x_TNH.contiguous()
    return dense.transpose(0, 1)[None]
