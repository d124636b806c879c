"""The kernels of flash-attn 2 and 3, from their packages or from the Hugging Face Hub. Not run here: no GPU.

Called by their inner functions, because a block of a ring needs the backward pass with the output and log-sum-exp over
all blocks. Those are nobody's promise, so `nestsp.attention.choice` compares a kernel with plain operators on the
device before it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nestsp.attention.local import Kernel, Mask

__all__ = ["FlashAttn2", "FlashAttn3"]


@dataclass(frozen=True, slots=True)
class FlashAttn2:
    """flash-attn 2, one call for all sequences: bfloat16 and float16, head sizes that are multiples of 8, up to 256.

    Attributes:
        functions: Its module of functions, with the signatures of 2.7 and later.
        name: See `Kernel`.
        window: See `Kernel`.
        softcap: See `Kernel`.
    """

    functions: Any
    name: str
    window: int | None = None
    softcap: float | None = None

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return replace(self, window=window, softcap=softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        left, right = _window_sides(self.window, mask)
        out, lse, *_ = self.functions._flash_attn_varlen_forward(
            q,
            k,
            v,
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            0.0,
            scale,
            mask.is_causal,
            window_size_left=left,
            window_size_right=right,
            softcap=self.softcap or 0.0,
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
        dq, dk, dv = _like(q, k, v)
        left, right = _window_sides(self.window, mask)
        self.functions._flash_attn_varlen_backward(
            _dense_heads(dout),
            q,
            k,
            v,
            _dense_heads(out),
            lse_NT.contiguous(),
            dq,
            dk,
            dv,
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            0.0,
            scale,
            mask.is_causal,
            left,
            right,
            self.softcap or 0.0,
            None,  # no linear biases
            False,  # sums of the gradients in any order, as PyTorch's own
        )
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class FlashAttn3:
    """flash-attn 3, for Hopper GPUs, one call for all sequences: dtypes and head sizes as `FlashAttn2`.

    Attributes:
        functions: Its module of functions. Older ones take a window as a pair, newer ones as two numbers.
        name: See `Kernel`.
        window: See `Kernel`.
        softcap: See `Kernel`.
    """

    functions: Any
    name: str
    window: int | None = None
    softcap: float | None = None

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        return replace(self, window=window, softcap=softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        function = self.functions._flash_attn_forward
        out, lse, *_ = function(
            q,
            k,
            v,
            *(None,) * 4,  # no cache of keys: no new ones, no second queries, no place for the output
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            *(None,) * 3,  # all of every sequence is used
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            *(None,) * 9,  # no pages, no rotation, no scales of 8-bit numbers
            scale,
            mask.is_causal,
            **_window_arguments(function, _window_sides(self.window, mask)),
            softcap=self.softcap or 0.0,
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
        function = self.functions._flash_attn_backward
        dq, dk, dv = _like(q, k, v)
        function(
            _dense_heads(dout),
            q,
            k,
            v,
            _dense_heads(out),
            lse_NT.contiguous(),
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            None,
            None,
            max(mask.queries.lengths),
            max(mask.keys.lengths),
            dq,
            dk,
            dv,
            scale,
            mask.is_causal,
            **_window_arguments(function, _window_sides(self.window, mask)),
            softcap=self.softcap or 0.0,
        )
        return dq, dk, dv


def _dense_heads(x: Tensor) -> Tensor:
    """A tensor as both kernels take it: numbers of a head one after another, any stride between rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _window_sides(window: int | None, mask: Mask) -> tuple[int, int]:
    """Keys before and after its own that a query sees; -1 for all."""
    assert mask.is_causal or window is None
    return (-1, -1) if window is None else (window - 1, 0)


def _window_arguments(function: Callable[..., Any], sides: tuple[int, int]) -> dict[str, Any]:
    if "window_size" in inspect.signature(function).parameters:
        return {"window_size": sides}
    return {"window_size_left": sides[0], "window_size_right": sides[1]}
