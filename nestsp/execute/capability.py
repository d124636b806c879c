"""What the executor can run of all that a plan can say; needs no torch, so that planners can be told early."""

from __future__ import annotations

from typing import Literal

from nestsp.plan import Capabilities
from nestsp.shape import ModelShape

__all__ = ["executor_capabilities", "ring_refusal"]


def executor_capabilities(shape: ModelShape, *, recompute: bool | Literal["auto"] = "auto") -> Capabilities:
    """Any group, which may keep its attention's output, and any number of layers that keep everything.

    A model with sliding windows runs in Ulysses groups alone.

    Args:
        shape: The model.
        recompute: What the run wants of that: all layers recomputed, none, or as many as the plan says.
    """
    wanted = {"auto": None, True: 0, False: shape.num_layers}
    return Capabilities(rings=ring_refusal(shape) is None, kept_outputs=True, num_kept_layers=wanted[recompute])


def ring_refusal(shape: ModelShape) -> str | None:
    """Why a model does not run in rings, and so not in hybrid groups either; None where it does."""
    if not shape.window:
        return None
    return f"the model has layers with a sliding window of {shape.window}, which no ring runs; plan with ring degree 1"
