"""Puts model, process groups and executor together, the same for training and for verification."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from nestsp.attention.local import choose_kernel
from nestsp.comm.groups import make_links
from nestsp.errors import ModelError
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model
from nestsp.model.root import LossRoot
from nestsp.train.parallelize import shard_root
from nestsp.train.prepare import Prepared
from nestsp.train.world import World, everywhere

__all__ = ["build_executor", "compute_dtype"]


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The dtype that ``train.dtype`` means on a device."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]


def build_executor(
    prepared: Prepared,
    world: World,
    *,
    dtype: torch.dtype,
    streaming: bool,
    model_options: Mapping[str, Any] | None = None,
) -> Executor:
    """Build the model on every rank from the same seed, shard it, and make and warm the process groups.

    Args:
        prepared: The run.
        world: This rank.
        dtype: Of computation. Parameters and reductions are float32, or float64 for float64.
        streaming: Of the planning task, which is the same on all ranks.
        model_options: Passed to Transformers, such as ``experts_implementation``.

    Raises:
        ModelError: The ranks built different weights.
    """
    train = prepared.config.train
    model = build_model(prepared.model, seed=train.seed, **(model_options or {}))
    if dtype == torch.float64:
        model.double()
    if len(set(world.gather(_weights_digest(model)))) != 1:
        raise everywhere(
            ModelError(
                "the ranks built different initial weights from one seed, but must have the same; install the same "
                "torch and transformers on all hosts"
            )
        )
    nn.Module.to(model, world.device)
    install_layer_runner(model)
    root = LossRoot(model, train.loss_slice_tokens)
    mesh = init_device_mesh(world.device.type, (world.cluster.num_ranks,))
    reduce_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    shard_root(root, mesh, compute_dtype=dtype, reduce_dtype=reduce_dtype)
    links = make_links(
        prepared.tree,
        world.rank,
        world.device,
        ranks_per_host=world.cluster.ranks_per_host,
        timeout=timedelta(seconds=prepared.config.cluster.timeout_s),
    )
    return Executor(
        root,
        prepared.shape,
        links,
        world.rank,
        world.device,
        choose_kernel(world.device, dtype, prepared.shape.head_dim),
        AttentionTimer(world.device),
        streaming,
    )


def _weights_digest(model: nn.Module) -> str:
    """Of the first thousand elements of each parameter: enough to tell one sequence of random numbers from another."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1000].double().numpy().tobytes())
    return digest.hexdigest()
