"""Negative log-likelihoods in slices of tokens, so that the logits of all tokens never exist at one time.

The loss is a weighted sum of them: a mean taken on a rank or in a microbatch would be wrong, because they hold unequal
numbers of targets. The sum is divided once, at the update, by the total weight of the batch's targets. Memory: one
slice's logits and their gradient, slice × vocabulary × (the model's dtype + 2 × float32).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["IGNORED_TARGET", "sliced_nll"]

IGNORED_TARGET = -100
"""Stands for a token that has no target: the last one of each sequence, and fillers."""


def sliced_nll(head: Callable[[Tensor], Tensor], hidden_TD: Tensor, targets_T: Tensor, slice_tokens: int) -> Tensor:
    """Negative log-likelihood of each token's target, in float32 (float64 for a float64 model).

    Args:
        head: Gives the logits [tokens, V] of hidden states [tokens, D].
        hidden_TD: [T, D], last hidden states.
        targets_T: int64 [T]; the likelihood of `IGNORED_TARGET` counts 0.
        slice_tokens: Tokens whose logits exist at one time.

    Returns:
        [T], with a gradient also where no token has a target.
    """
    slices = [
        checkpoint(_nll, head, hidden, targets, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_TD.split(slice_tokens), targets_T.split(slice_tokens), strict=True)
    ]
    return torch.cat(slices)


def _nll(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    return F.cross_entropy(logits.to(_wide(logits.dtype)), targets, ignore_index=IGNORED_TARGET, reduction="none")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
