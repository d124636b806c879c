"""Causal attention of whole sequences that lie packed one after another, by explicit forward and backward calls.

Nothing here is differentiated by autograd: the groups' exchanges and kernels are interleaved in both directions, so
each kernel's backward is called when its group's turn comes. All kernels return the log-sum-exp that their backward
needs. No kernel ever sees an empty tensor (PyTorch's CPU flash kernel dies on one).

Letters: T tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CpuFlash", "CudaFlash", "Kernel", "MathKernel", "Segments", "attend", "attend_backward", "choose_kernel"]


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
    """Causal attention of packed sequences; N is a multiple of K, equal query heads on each key/value head."""

    name: str

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out [T, N, H], log-sum-exp [N, T] in float32 or float64)."""
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
        """Return (dq [T, N, H], dk [T, K, H], dv [T, K, H])."""
        ...


class CpuFlash:
    """PyTorch's flash kernel for CPUs, one call a sequence. float64, float32, bfloat16, float16."""

    name = "flash (PyTorch, CPU)"

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        wide = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
        lse = torch.empty(q_TNH.shape[1], q_TNH.shape[0], dtype=wide)
        for s in segments.slices():
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q_TNH[s]), _heads_first(k_TKH[s]), _heads_first(v_TKH[s]), 0.0, True, scale=scale
            )
            out[s] = part[0].transpose(0, 1)
            lse[:, s] = part_lse[0]
        return out, lse

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
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q_TNH, k_TKH, v_TKH))
        for s in segments.slices():
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout_TNH[s]),
                _heads_first(q_TNH[s]),
                _heads_first(k_TKH[s]),
                _heads_first(v_TKH[s]),
                _heads_first(out_TNH[s]),
                lse_NT[None, :, s],
                0.0,
                True,
                scale=scale,
            )
            for whole, part in zip((dq, dk, dv), grads, strict=True):
                whole[s] = part[0].transpose(0, 1)
        return dq, dk, dv


class CudaFlash:
    """The flash kernel that PyTorch ships for GPUs, one call for all sequences.

    bfloat16 and float16; head sizes that are multiples of 8, up to 256.
    """

    name = "flash (PyTorch, CUDA)"

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        longest = max(segments.lengths)
        cu = segments.cu_seqlens
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q_TNH, k_TKH, v_TKH, cu, cu, longest, longest, 0.0, True, False, scale=scale
        )
        return out, lse

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
        longest = max(segments.lengths)
        cu = segments.cu_seqlens
        # Without dropout the random state is never read, but the operator wants one.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_TNH.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q_TNH.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout_TNH.contiguous(),
            q_TNH,
            k_TKH,
            v_TKH,
            out_TNH.contiguous(),
            lse_NT,
            cu,
            cu,
            longest,
            longest,
            0.0,
            True,
            rng_state,
            unused,
            scale=scale,
        )
        return dq, dk, dv


class MathKernel:
    """Plain softmax in blocks of queries, any device and dtype: for float32 and float64 on GPUs, where flash has none.

    Memory: one block's scores, ``block × T × N`` elements of float32 (float64 for float64).
    """

    name = "math (PyTorch operators)"
    block = 512

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        q, k, v = (_wide(x) for x in (q_TNH, k_TKH, v_TKH))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for s in segments.slices():
            for rows, seen in self._blocks(s):
                scores = self._scores(q[rows], k[seen], scale)
                part_lse = scores.logsumexp(-1)
                lse[:, rows] = part_lse
                out[rows] = self._mix((scores - part_lse[..., None]).exp(), v[seen])
        return out.to(q_TNH.dtype), lse

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
        dout, q, k, v, out = (_wide(x) for x in (dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta_NT = (dout * out).sum(-1).T
        per_kv = q.shape[1] // k.shape[1]
        for s in segments.slices():
            for rows, seen in self._blocks(s):
                weights = (self._scores(q[rows], k[seen], scale) - lse_NT[:, rows, None]).exp()
                dweights = torch.einsum("qnh,knh->nqk", dout[rows], v[seen].repeat_interleave(per_kv, 1))
                dscores = weights * (dweights - delta_NT[:, rows, None]) * scale
                dq[rows] = self._mix(dscores, k[seen])
                for grad, left, right in ((dk, dscores, q), (dv, weights, dout)):
                    full = torch.einsum("nqk,qnh->knh", left, right[rows])
                    grad[seen] += full.unflatten(1, (k.shape[1], per_kv)).sum(2)
        return dq.to(q_TNH.dtype), dk.to(k_TKH.dtype), dv.to(v_TKH.dtype)

    def _blocks(self, s: slice) -> list[tuple[slice, slice]]:
        """(queries, the keys that they may see) of one sequence, block by block."""
        starts = range(s.start, s.stop, self.block)
        stops = [min(start + self.block, s.stop) for start in starts]
        return [(slice(a, b), slice(s.start, b)) for a, b in zip(starts, stops, strict=True)]

    @staticmethod
    def _scores(q_QNH: Tensor, k_SKH: Tensor, scale: float) -> Tensor:
        """Masked scores [N, Q, S]; the last query sees the last key."""
        k = k_SKH.repeat_interleave(q_QNH.shape[1] // k_SKH.shape[1], 1)
        scores = torch.einsum("qnh,knh->nqk", q_QNH, k) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        return scores.masked_fill_(future.triu(scores.shape[2] - scores.shape[1] + 1), float("-inf"))

    @staticmethod
    def _mix(weights_NQS: Tensor, x_SKH: Tensor) -> Tensor:
        x = x_SKH.repeat_interleave(weights_NQS.shape[0] // x_SKH.shape[1], 1)
        return torch.einsum("nqk,knh->qnh", weights_NQS, x)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The fastest kernel that is right for this device, dtype and head size."""
    if device.type == "cpu":
        return CpuFlash()
    if dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256:
        return CudaFlash()
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
    """Attention of one member's heads; any mapping of query heads to key/value heads, also no head at all.

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
    if q_TNH.shape[1] == 0:
        return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(0, q_TNH.shape[0])
    if not _is_regular(kv_of_query, k_TKH.shape[1]):
        index = torch.tensor(kv_of_query, device=k_TKH.device)
        k_TKH, v_TKH = k_TKH.index_select(1, index), v_TKH.index_select(1, index)
    return kernel.forward(q_TNH, k_TKH, v_TKH, segments, scale)


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
    if q_TNH.shape[1] == 0:
        return torch.zeros_like(q_TNH), torch.zeros_like(k_TKH), torch.zeros_like(v_TKH)
    if _is_regular(kv_of_query, k_TKH.shape[1]):
        return kernel.backward(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, segments, scale)
    index = torch.tensor(kv_of_query, device=k_TKH.device)
    k_each, v_each = k_TKH.index_select(1, index), v_TKH.index_select(1, index)
    dq, dk_each, dv_each = kernel.backward(dout_TNH, q_TNH, k_each, v_each, out_TNH, lse_NT, segments, scale)
    # Several query heads may share a key/value head; their gradients are summed in a wide type.
    dk, dv = (
        _wide(each).new_zeros(x.shape).index_add_(1, index, _wide(each)).to(x.dtype)
        for each, x in ((dk_each, k_TKH), (dv_each, v_TKH))
    )
    return dq, dk, dv


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


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
