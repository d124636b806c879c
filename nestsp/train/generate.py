"""Text from the model between training steps, by Transformers' own ``generate``, on the sharded model as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from nestsp.model.adapter import ATTENTION
from nestsp.model.derive import model_shape, reference_attention
from nestsp.model.root import LossRoot

__all__ = ["generating"]


@contextmanager
def generating(root: LossRoot, attention: str | None = None) -> Iterator[PreTrainedModel]:
    """The model, ready for ``generate``; training goes on afterwards as if nothing had been.

    Inside, all ranks make the same calls with the same inputs: each gathers a layer's parameters when the layer runs,
    and a rank that asked for fewer tokens would leave the others waiting. Sampling needs one seed on all ranks.

    Args:
        root: Sharded or not.
        attention: One of Transformers' attention implementations, which runs one prompt at a time; None for one that
            has all that the model asks of it.
    """
    model, training = root.model, root.training
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()  # else the first layer to run would take itself for the root
        root.unshard()
    model.set_attn_implementation(attention or reference_attention(model_shape(model.config)))
    model.eval()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # a cache and single tokens: other code
            yield model
    finally:
        model.train(training)
        model.set_attn_implementation(ATTENTION)
        if isinstance(root, FSDPModule):
            root.reshard()
