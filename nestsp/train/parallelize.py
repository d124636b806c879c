"""Sharding by FSDP2: each decoder layer is a unit, the rest (embedding, final norm, head, loss) is the root's.

Gradients are summed over ranks, never averaged: ranks hold unequal numbers of targets. They are divided once, at the
update. Reductions are float32, whatever the computation's dtype.

All kinds of sharding are one: ranks form replicas × shards, and a parameter is cut into as many pieces as there are
shards. ``fsdp`` is one replica, ``none`` is shards of one rank, ``hsdp`` is between them. So precision, gathering and
the order of collectives are the same in all three, and so are the gradients. Price of a rank's states: 16 bytes ×
parameters / shards.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nestsp.model.adapter import decoder_layers

__all__ = ["make_mesh", "shard_root"]


def make_mesh(device_type: str, num_ranks: int, num_shards: int) -> DeviceMesh:
    """The mesh of replicas × shards; all ranks call it.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: All ranks.
        num_shards: Ranks that hold one copy of the parameters together: neighbours, so that they share hosts.

    Returns:
        [shards] if there is one replica, else [replicas, shards].
    """
    assert num_ranks % num_shards == 0
    if num_shards == num_ranks:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shards",))
    return init_device_mesh(device_type, (num_ranks // num_shards, num_shards), mesh_dim_names=("replicas", "shards"))


def shard_root(root: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard a root module over all ranks of a mesh, in place.

    Args:
        root: A `nestsp.model.root.LossRoot` with all its parameters, the same on every rank, or on no device yet.
        mesh: From `make_mesh`.
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
