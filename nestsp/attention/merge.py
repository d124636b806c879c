"""Attention over several blocks of keys, put together from their outputs and log-sum-exps.

Softmax over the union of two blocks is the mean of their outputs, weighted by exp(log-sum-exp). The sums are kept in
float32 (float64 for float64) whatever the kernel's dtype is, and rounded once at the end, so that the error does not
grow with the number of blocks. Price: 4 bytes an element of the output while a ring runs.

An attention sink is one more key with a learned score and no value: a number for each head that takes part in the
softmax's sum. It is merged last, when all keys have been seen; no kernel, exchange or ring knows of it. A kernel's
backward is given the output and log-sum-exp with the sink, and is then right for q, k and v.

Letters: T tokens, N query heads, H head size, R the tokens whose queries saw a block.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Rows", "merge_into", "merge_sinks", "sink_gradients", "wide"]

Rows: TypeAlias = "slice | Tensor"
"""Some rows of a tensor, each once: a slice, which copies nothing, or int64 indices."""


def merge_into(out_TNH: Tensor, lse_NT: Tensor, rows: Rows, part_RNH: Tensor, part_lse_NR: Tensor) -> None:
    """Let some queries see one more block of keys; changes the two sums in place.

    Args:
        out_TNH: float32 or float64 [T, N, H], over the blocks seen so far; at least one key for each query.
        lse_NT: The same dtype [N, T], their log-sum-exp.
        rows: The queries that saw the block.
        part_RNH: [R, N, H], their output over that block alone.
        part_lse_NR: [N, R], log-sum-exp over that block alone.
    """
    before = lse_NT[:, rows]
    after = torch.logaddexp(before, part_lse_NR)
    weight, part_weight = ((x - after).exp().T[..., None] for x in (before, part_lse_NR))
    out_TNH[rows] = out_TNH[rows] * weight + part_RNH * part_weight
    lse_NT[:, rows] = after


def merge_sinks(out_TNH: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with attention sinks, from those over all keys.

    Args:
        out_TNH: [T, N, H].
        lse_NT: float32 or float64 [N, T].
        sinks_N: [N], the sinks' scores.
    """
    after = torch.logaddexp(lse_NT, sinks_N[:, None].to(lse_NT.dtype))
    return (out_TNH * (lse_NT - after).exp().T[..., None]).to(out_TNH.dtype), after


def sink_gradients(dout_TNH: Tensor, out_TNH: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> Tensor:
    """Gradients of the sinks' scores, summed over these tokens: [N], in the dtype of sums.

    Args:
        dout_TNH: [T, N, H], gradient of the output.
        out_TNH: [T, N, H], output with the sinks.
        lse_NT: [N, T], log-sum-exp with the sinks.
        sinks_N: [N], the sinks' scores.
    """
    delta_NT = (wide(dout_TNH) * wide(out_TNH)).sum(-1).T
    return -((sinks_N[:, None].to(lse_NT.dtype) - lse_NT).exp() * delta_NT).sum(1)


def wide(x: Tensor) -> Tensor:
    """The tensor in the dtype of sums: float64 stays, all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
