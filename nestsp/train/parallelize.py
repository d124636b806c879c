"""Sharding by FSDP2: each decoder layer is a unit, the rest (embedding, final norm, head, loss) is the root's.

Gradients are summed over ranks, never averaged: ranks hold unequal numbers of targets. They are divided once, at the
update. Reductions are float32, whatever the computation's dtype.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nestsp.model.adapter import decoder_layers

__all__ = ["shard_root"]


def shard_root(root: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard a root module over all ranks of a mesh, in place.

    Args:
        root: A `nestsp.model.root.LossRoot` with all its parameters, the same on every rank.
        mesh: One-dimensional, all ranks.
        compute_dtype: Of gathered parameters and activations.
        reduce_dtype: Of gradient reductions.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for layer in decoder_layers(root):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor of 1 still asks for a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            # A parameter may get no gradient on some rank; its reduction must take place all the same.
            module.set_reduce_scatter_unused_params(True)
