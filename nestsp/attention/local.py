"""Attention of sequences that lie packed one after another, by explicit forward and backward calls.

Two masks: *causal*, of whole sequences on themselves, and *full*, where the queries of each sequence see all of some
other keys, of another number: what a ring's member does with the keys of another one. The backward pass of such a block
takes the output and log-sum-exp over *all* blocks, and gives this block's part of the gradients. Attention sinks are no
matter of kernels: see `nestsp.attention.merge`.

Nothing here is differentiated by autograd: the groups' exchanges and kernels are interleaved in both directions, so
each kernel's backward is called when its group's turn comes. All kernels return the log-sum-exp that their backward
needs. No kernel ever sees an empty tensor (PyTorch's CPU flash kernel dies on one).

Letters: T tokens, S keys (T under the causal mask), N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nestsp.attention.merge import wide

__all__ = ["Kernel", "Mask", "Segments", "attend", "attend_backward"]


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


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Which keys the queries of packed sequences see: those of the same sequence, all of them or up to their own place.

    Attributes:
        queries: Where each sequence's queries lie.
        keys: Where its keys lie; as many sequences. Under the causal mask they lie where the queries do.
        is_causal: A query sees the keys up to its own.
    """

    queries: Segments
    keys: Segments
    is_causal: bool

    @classmethod
    def causal(cls, segments: Segments) -> Mask:
        """Each sequence on itself."""
        return cls(segments, segments, True)

    @classmethod
    def full(cls, queries: Segments, keys: Segments) -> Mask:
        """All keys of the same number."""
        return cls(queries, keys, False)

    def blocks(self) -> list[tuple[slice, slice]]:
        """For each sequence, where its queries lie and where its keys."""
        return list(zip(self.queries.slices(), self.keys.slices(), strict=True))


class Kernel(Protocol):
    """Attention of packed sequences; N is a multiple of K, equal query heads on each key/value head. None is empty."""

    @property
    def name(self) -> str:
        """What a run's banner calls it."""
        ...

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """The kernel for layers of another kind.

        Args:
            window: A causal query sees itself and the ``window - 1`` keys before it; None for all keys. A full mask
                has no window: how far apart its queries and keys are is not told.
            softcap: Scores s become ``softcap · tanh(s / softcap)``; None leaves them.
        """
        ...

    def forward(self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out [T, N, H], log-sum-exp [N, T] in float32 or float64), over these keys alone."""
        ...

    def backward(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        mask: Mask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq [T, N, H], dk [S, K, H], dv [S, K, H]), with out and log-sum-exp over all keys of the queries."""
        ...


def attend(
    kernel: Kernel,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    mask: Mask,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Attention of one member's heads; any mapping of query heads to key/value heads, also nothing at all.

    Args:
        kernel: The kernel.
        q_TNH: [T, N, H].
        k_SKH: [S, K, H].
        v_SKH: [S, K, H].
        mask: Which keys they see.
        scale: Factor of the scores.
        kv_of_query: For each query head, its key/value head.

    Returns:
        out [T, N, H] and log-sum-exp [N, T], over these keys alone.
    """
    if q_TNH.numel() == 0:
        return q_TNH.new_empty(q_TNH.shape), wide(q_TNH.new_empty(q_TNH.shape[1], q_TNH.shape[0]))
    k, v = _for_each_query(k_SKH, v_SKH, kv_of_query)
    return kernel.forward(q_TNH, k, v, mask, scale)


def attend_backward(
    kernel: Kernel,
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    mask: Mask,
    scale: float,
    kv_of_query: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' part of the gradients of q, k and v, in their shapes; out and log-sum-exp are those over all keys."""
    if q_TNH.numel() == 0:
        return torch.zeros_like(q_TNH), torch.zeros_like(k_SKH), torch.zeros_like(v_SKH)
    k, v = _for_each_query(k_SKH, v_SKH, kv_of_query)
    dq, dk, dv = kernel.backward(dout_TNH, q_TNH, k, v, out_TNH, lse_NT, mask, scale)
    return dq, _sum_queries(dk, k_SKH, kv_of_query), _sum_queries(dv, v_SKH, kv_of_query)


def _for_each_query(k: Tensor, v: Tensor, kv_of_query: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values in a layout that kernels know: as they are, or one head for each query head."""
    if _is_regular(kv_of_query, k.shape[1]):
        return k, v
    index = _index(kv_of_query, k.device)
    return k.index_select(1, index), v.index_select(1, index)


def _sum_queries(grad: Tensor, like: Tensor, kv_of_query: tuple[int, ...]) -> Tensor:
    """The gradient of what `_for_each_query` was given; query heads that share a head are summed in a wide type."""
    if _is_regular(kv_of_query, like.shape[1]):
        return grad
    index = _index(kv_of_query, grad.device)
    return wide(grad).new_zeros(like.shape).index_add_(1, index, wide(grad)).to(like.dtype)


def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    # Made on a GPU at once, it would let the host wait for all that it has launched.
    return torch.tensor(heads).to(device, non_blocking=True)


def _is_regular(kv_of_query: tuple[int, ...], num_kv: int) -> bool:
    """Whether kernels find the key/value head of each query head by division alone."""
    num_query = len(kv_of_query)
    if num_query % num_kv:
        return False
    return kv_of_query == tuple(head // (num_query // num_kv) for head in range(num_query))
