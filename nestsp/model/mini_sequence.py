"""Feed-forward blocks in slices of tokens, so that their intermediate values never exist for all tokens.

Source: Luo et al., "Mini-Sequence Transformer" (arXiv:2407.15892). Each token goes through the block on its own, in
dense models and in mixtures of experts alike, so slices change nothing but rounding. Ours slices the block of an
unmodified model and recomputes each slice in its backward pass, alone. Price: in a layer that is recomputed anyway,
the block's forward pass once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from nestsp.errors import ModelError
from nestsp.model.adapter import build_model, decoder_layers
from nestsp.model.derive import model_shape, reference_attention
from nestsp.model.shrink import shrink_config

__all__ = ["check_mlp_slices", "install_mlp_slices"]

# Of float32 logits near 1; a block that mixes tokens is off by far more.
_ROUNDING = 1e-4


class _InSlices:
    """Runs a feed-forward block's forward on slices of the tokens."""

    def __init__(self, block: nn.Module, slice_tokens: int) -> None:
        self.block, self.slice_tokens = block, slice_tokens
        self.forward: Callable[[Tensor], Any] = block.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        slices = hidden.split(self.slice_tokens, dim=-2)
        done = [self._run(part) for part in slices] if len(slices) > 1 else [self.forward(hidden)]
        for part in done:
            if not isinstance(part, Tensor):
                raise ModelError(
                    f"train.mlp_slice_tokens is set, but {type(self.block).__name__} returns a {type(part).__name__} "
                    "instead of hidden states, which cannot be put together again; set it to null"
                )
        return torch.cat(done, -2) if len(done) > 1 else done[0]

    def _run(self, part: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(part)
        return checkpoint(self.forward, part, use_reentrant=False, preserve_rng_state=False)


def check_mlp_slices(config: PreTrainedConfig) -> None:
    """Run a few tokens through a shrunken copy of a model, with its feed-forward blocks whole and in slices.

    Args:
        config: A config that `nestsp.model.adapter.model_config` accepted.

    Raises:
        ModelError: A layer has no block that can be sliced, or slices change what the model computes.
    """
    try:
        small = shrink_config(config)
        model = build_model(small, seed=0, attention=reference_attention(model_shape(small)))
    except Exception:  # the probe, which comes next, says what a model that cannot be shrunk lacks
        return
    ids = torch.arange(5)[None] % small.vocab_size
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        install_mlp_slices(model, 2)
        try:
            sliced = model(input_ids=ids, use_cache=False).logits
        except TypeError as error:
            raise ModelError(
                f"train.mlp_slice_tokens is set, but the feed-forward blocks of {type(model).__name__} take more than "
                f"hidden states ({error}); set it to null"
            ) from None
    if not torch.allclose(whole, sliced, rtol=_ROUNDING, atol=_ROUNDING):
        raise ModelError(
            f"train.mlp_slice_tokens is set, but the feed-forward blocks of {type(model).__name__} compute something "
            "else for slices of tokens than for all at once; set it to null"
        )


def install_mlp_slices(model: nn.Module, slice_tokens: int) -> None:
    """Let the feed-forward blocks of a model run on at most so many tokens at one time.

    Raises:
        ModelError: A layer has no feed-forward block by the name ``mlp``.
    """
    for number, layer in enumerate(decoder_layers(model)):
        block = getattr(layer, "mlp", None)
        if not isinstance(block, nn.Module):
            raise ModelError(
                f"train.mlp_slice_tokens is set, but layer {number} ({type(layer).__name__}) has no feed-forward block "
                "'mlp'; set it to null"
            )
        block.__dict__["forward"] = _InSlices(block, slice_tokens)
