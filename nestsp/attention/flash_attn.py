"""The kernel of the package flash-attn, for what PyTorch's own flash kernel lacks: soft caps. Not run here: no GPU.

Called by the package's inner functions, because a block of a ring needs the backward pass with the output and
log-sum-exp over all blocks. Their signatures are those of 2.7 and later in version 2.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from nestsp.attention.local import PackedKernel, Segments

__all__ = ["FlashAttn", "has_flash_attn"]

_LEAST = (2, 7)


def has_flash_attn() -> bool:
    """Whether flash-attn is installed, in a version that is known here."""
    try:
        version = importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return _LEAST <= numbers < (3,)


class FlashAttn(PackedKernel):
    """flash-attn 2, one call for all sequences: bfloat16 and float16, head sizes that are multiples of 8, up to 256."""

    name = "flash-attn 2"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        left, right = self._window_sides()
        out, lse, _, _ = _flash_attn_varlen_forward(
            q,
            k,
            v,
            queries.cu_seqlens,
            keys.cu_seqlens,
            max(queries.lengths),
            max(keys.lengths),
            0.0,
            scale,
            causal,
            window_size_left=left,
            window_size_right=right,
            softcap=self.softcap or 0.0,
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        left, right = self._window_sides()
        _flash_attn_varlen_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse_NT.contiguous(),
            dq,
            dk,
            dv,
            queries.cu_seqlens,
            keys.cu_seqlens,
            max(queries.lengths),
            max(keys.lengths),
            0.0,
            scale,
            causal,
            left,
            right,
            self.softcap or 0.0,
            None,  # no linear biases
            False,  # sums of the gradients in any order, as PyTorch's own
        )
        return dq, dk, dv

    def _window_sides(self) -> tuple[int, int]:
        return (-1, -1) if self.window is None else (self.window - 1, 0)
