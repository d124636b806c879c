"""From last hidden states to logits: the model's head, and what its own forward does to what the head gives.

nestsp computes the loss itself, in slices, so it repeats the two steps that Transformers' models have after the head:
a factor, and a soft cap. A model with another step gives another loss than its own; the probe finds that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["logit_function"]


def logit_function(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """A function from hidden states [T, D] to logits [T, V], as the model itself computes them."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    multiplier: float | None = getattr(model.config, "logit_scale", None)  # Cohere
    divisor: float | None = getattr(model.config, "logits_scaling", None)  # Granite
    cap: float | None = getattr(model.config, "final_logit_softcapping", None)  # Gemma
    if multiplier is None and divisor is None and cap is None:
        return head

    def logits(hidden_TD: Tensor) -> Tensor:
        result: Tensor = head(hidden_TD)
        if multiplier is not None:
            result = result * multiplier
        if divisor is not None:
            result = result / divisor
        return result if cap is None else torch.tanh(result / cap) * cap

    return logits
