"""What the executor can run of all that a plan can say; needs no torch, so that planners can be told early."""

from __future__ import annotations

from nestsp.plan import Capabilities
from nestsp.shape import ModelShape

__all__ = ["executor_capabilities"]


def executor_capabilities(shape: ModelShape, *, recompute: bool) -> Capabilities:
    """Any group, which may keep its attention's output; either all layers are recomputed, or none is.

    A model with sliding windows runs in Ulysses groups alone.

    Args:
        shape: The model.
        recompute: Whether the model's layers are recomputed in the backward pass.
    """
    return Capabilities(rings=not shape.window, kept_outputs=True, num_kept_layers=0 if recompute else shape.num_layers)
