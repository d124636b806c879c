"""Recomputation of layers, at the seam that Transformers gives: a decoder layer's ``_gradient_checkpointing_func``.

Transformers calls it with the layer's forward, inside FSDP's hooks, so parameters are gathered once for a recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from nestsp.model.adapter import decoder_layers

__all__ = ["LayerRunner", "install_layer_runner"]


class LayerRunner:
    """Runs one decoder layer, keeping or recomputing what is in it.

    Attributes:
        recomputes: Whether the layer is recomputed in the backward pass.
    """

    def __init__(self, recomputes: bool) -> None:
        self.recomputes = recomputes

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a layer's forward."""
        if not self.recomputes:
            return run(*args)
        # No dropout and no other random number in a layer: there is no generator state to restore.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def install_layer_runner(model: nn.Module, *, recompute: bool) -> int:
    """Let nestsp run the layers of a model; sets two attributes that Transformers' layers have for this.

    Returns:
        The number of layers.
    """
    layers = decoder_layers(model)
    runner = LayerRunner(recompute)
    for layer in layers:
        layer.gradient_checkpointing = True
        layer.__dict__["_gradient_checkpointing_func"] = runner  # an attribute that Transformers' layers declare
    return len(layers)
