"""The loss as a sum over targets, in slices of tokens, so that the logits of all tokens never exist at one time.

A mean taken on a rank or in a microbatch would be wrong: they hold unequal numbers of targets. The sum is divided once,
at the update, by the total weight of the batch's targets. Memory: one slice's logits and their gradient, slice ×
vocabulary × (the model's dtype + 2 × float32).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["IGNORED_TARGET", "sliced_loss_sum"]

IGNORED_TARGET = -100
"""Stands for a token that has no target: the last one of each sequence, and fillers."""


def sliced_loss_sum(
    head: nn.Module, hidden_TD: Tensor, targets_T: Tensor, weights_T: Tensor, slice_tokens: int
) -> Tensor:
    """Sum over tokens of weight × negative log-likelihood of the target, in float32 (float64 for a float64 model).

    Args:
        head: Gives the logits [tokens, V] of hidden states [tokens, D].
        hidden_TD: [T, D], last hidden states.
        targets_T: int64 [T]; `IGNORED_TARGET` counts 0.
        weights_T: [T], float32.
        slice_tokens: Tokens whose logits exist at one time.

    Returns:
        A scalar with a gradient, 0 if there is no target.
    """
    total = hidden_TD.new_zeros((), dtype=_wide(hidden_TD.dtype))
    for start in range(0, len(targets_T), slice_tokens):
        part = slice(start, start + slice_tokens)
        total = total + checkpoint(
            _loss_sum,
            head,
            hidden_TD[part],
            targets_T[part],
            weights_T[part],
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return total


def _loss_sum(head: nn.Module, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    logits = head(hidden)
    nll = F.cross_entropy(logits.to(_wide(logits.dtype)), targets, ignore_index=IGNORED_TARGET, reduction="none")
    return (nll * weights).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
