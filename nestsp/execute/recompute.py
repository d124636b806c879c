"""Recomputation of layers, at the seam that Transformers gives: a decoder layer's ``_gradient_checkpointing_func``.

Transformers calls it with the layer's forward, inside FSDP's hooks, so parameters are gathered once for a recompute.
Which layers are recomputed is the microbatch's own, and reaches the layer with its other arguments.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from nestsp.attention.streaming import AttentionContext
from nestsp.model.adapter import decoder_layers

__all__ = ["LayerRunner", "install_layer_runner"]


class LayerRunner:
    """Runs one decoder layer, keeping or recomputing what is in it.

    Attributes:
        layer: Number of the layer.
        offloads: The input that a recomputed layer keeps lies in the host's memory until its backward pass.
    """

    def __init__(self, layer: int, offloads: bool = False) -> None:
        self.layer, self.offloads = layer, offloads

    def __call__(self, run: partial[Any], *args: Any) -> Any:
        """Run a layer's forward; its keyword arguments, the microbatch among them, are bound in ``run``."""
        context = run.keywords.get("nestsp")
        if not isinstance(context, AttentionContext) or self.layer not in context.recomputed_layers:
            return run(*args)
        # Inside, checkpoint's own hooks take all that is saved; what the outer ones see is the layer's input.
        where = save_on_cpu(pin_memory=args[0].is_cuda) if self.offloads else nullcontext()
        with where:
            # No dropout and no other random number in a layer: there is no generator state to restore.
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def install_layer_runner(model: nn.Module, *, offload: bool = False) -> int:
    """Let nestsp run the layers of a model; sets two attributes that Transformers' layers have for this.

    Args:
        model: A Transformers model.
        offload: What recomputed layers keep goes to the host's memory (pinned, if it comes from a GPU).

    Returns:
        The number of layers.
    """
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = True
        layer.__dict__["_gradient_checkpointing_func"] = LayerRunner(number, offload)  # Transformers declares it
    return len(layers)
