"""The root module: base model, head and sliced likelihoods in one forward, so that they are one FSDP unit.

The head inside the root's unit is gathered once and called once a slice; as a unit of its own it would be gathered a
number of times that differs between ranks, and their collectives would no longer match.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nestsp.errors import ModelError
from nestsp.model.adapter import ATTENTION
from nestsp.model.fused_loss import FusedLoss
from nestsp.model.logits import logit_function
from nestsp.model.loss import sliced_nll
from nestsp.model.router_loss import RouterLoss

__all__ = ["LossRoot"]


class LossRoot(nn.Module):
    """Computes the negative log-likelihood of each token of one microbatch on one rank.

    Args:
        model: A Transformers causal language model, unmodified.
        slice_tokens: Tokens whose logits exist at one time.
        router_loss: Counts and corrects what its routers choose, or None.
        keeps_router_counts: What a step's routers chose is part of the run's state, for the next step.
        fused: The kernel of head and likelihoods; None for PyTorch's operators.
    """

    router_counts: Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        slice_tokens: int,
        router_loss: RouterLoss | None = None,
        *,
        keeps_router_counts: bool = False,
        fused: FusedLoss | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.slice_tokens = slice_tokens
        self.router_loss = router_loss
        self.fused = fused
        counts = None
        if keeps_router_counts:
            assert router_loss is not None
            counts = torch.zeros(2, router_loss.num_experts, dtype=torch.float64)
        self.register_buffer("router_counts", counts)  # a checkpoint takes it along

    def forward(self, tokens: Any, attention: Any) -> Tensor:
        """Negative log-likelihoods [T] of a rank's targets; see `nestsp.model.loss.sliced_nll`.

        Args:
            tokens: A `nestsp.execute.local.LocalTokens`.
            attention: A `nestsp.attention.streaming.AttentionContext`. Both are plain classes, which FSDP passes on
                untouched.
        """
        implementation = self.model.config._attn_implementation
        if implementation != ATTENTION:  # which would not know of the batch's sequences, nor of other ranks
            raise ModelError(
                f"the model's attention is '{implementation}', but nestsp runs its own; call "
                f"model.set_attn_implementation('{ATTENTION}')"
            )
        counted = nullcontext() if self.router_loss is None else self.router_loss.forward_pass(tokens.num_tokens)
        with counted:
            output = self.model.base_model(
                input_ids=tokens.ids[None],
                position_ids=tokens.positions[None],
                use_cache=False,
                return_dict=True,
                nestsp=attention,
            )
        hidden = output.last_hidden_state[0]
        if self.fused is not None:
            head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
            return self.fused.sliced_nll(head, hidden, tokens.targets, self.slice_tokens)
        return sliced_nll(logit_function(self.model), hidden, tokens.targets, self.slice_tokens)
