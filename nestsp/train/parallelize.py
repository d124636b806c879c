"""Sharding by FSDP2: each decoder layer is a unit, the rest (embedding, final norm, head, loss) is the root's.

Gradients are summed over ranks, never averaged: ranks hold unequal numbers of targets. They are divided once, at the
update. Reductions are float32, whatever the computation's dtype.

All kinds of sharding are one: ranks form replicas × shards, and a parameter is cut into as many pieces as there are
shards. ``fsdp`` is one replica, ``none`` is shards of one rank, ``hsdp`` is between them. So precision, gathering and
the order of collectives are the same in all three, and so are the gradients. Price of a rank's states: 16 bytes ×
parameters / shards.

A layer's parameters are gathered while the layer before it runs, in either pass: one layer ahead, never two. FSDP2's
own choice of the instant is off, since it knows nothing of the exchanges on the same links; each layer announces its
passes, and `nestsp.attention.gathers` issues the gather where the Schedule says. FSDP2 gathers the root and, with it,
the first layer of a pass. Calls that bring no microbatch (``generate``) gather layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nestsp.attention.gathers import Gathers
from nestsp.attention.streaming import AttentionContext
from nestsp.model.adapter import decoder_layers
from nestsp.schedule import Pass

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
    layers = decoder_layers(root)
    units = [fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in layers]
    fully_shard(root, mesh=mesh, mp_policy=policy).set_modules_to_forward_prefetch(units[:1])
    for number, (layer, unit) in enumerate(zip(layers, units, strict=True)):
        unit.set_modules_to_backward_prefetch([unit])  # itself, and so none: an empty list leaves FSDP2's choice
        _announce_passes(layer, number)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor of 1 still asks for a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            # A parameter may get no gradient on some rank; its reduction must take place all the same.
            module.set_reduce_scatter_unused_params(True)


def _announce_passes(layer: nn.Module, number: int) -> None:
    """Let a sharded layer tell a microbatch's `Gathers` when its passes begin: once its own parameters are there.

    These hooks run after FSDP's, which gather them.
    """

    def forward_begins(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        gathers = _gathers(kwargs)
        if gathers is not None:
            gathers.begin(number, Pass.FORWARD)

    def forward_ends(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        gathers = _gathers(kwargs)
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        # Where the layer's input needs no gradient (frozen first layers), no backward pass comes to the layer before.
        if gathers is not None and hidden.requires_grad and args[0].requires_grad:
            hidden.register_hook(lambda grad: gathers.begin(number, Pass.BACKWARD))

    layer.register_forward_pre_hook(forward_begins, with_kwargs=True)
    layer.register_forward_hook(forward_ends, with_kwargs=True)


def _gathers(kwargs: Mapping[str, Any]) -> Gathers | None:
    context = kwargs.get("nestsp")
    return context.gathers if isinstance(context, AttentionContext) else None
