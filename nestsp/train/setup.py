"""Puts model, process groups and executor together, the same for training and for verification."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nestsp.attention.choice import choose_kernel
from nestsp.attention.local import Kernel
from nestsp.comm.groups import make_links
from nestsp.errors import ConfigError, ModelError
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model
from nestsp.model.compiled import install_compiler
from nestsp.model.fused_loss import FusedLoss, choose_loss
from nestsp.model.load import Source, empty_model, fill_parameters, find_sources
from nestsp.model.lora import add_adapters, draw_adapters
from nestsp.model.mini_sequence import install_mlp_slices
from nestsp.model.root import LossRoot
from nestsp.model.router_loss import RouterLoss
from nestsp.train.agreement import everywhere
from nestsp.train.parallelize import make_mesh, shard_root
from nestsp.train.prepare import Prepared
from nestsp.train.world import World

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
    """Build the model on every rank from the same seed or files, shard it, and make and warm the process groups.

    Args:
        prepared: The run.
        world: This rank.
        dtype: Of computation. Parameters and reductions are float32, or float64 for float64.
        streaming: Of the planning task, which is the same on all ranks.
        model_options: Passed to Transformers, such as ``experts_implementation``.

    Raises:
        ModelError: The ranks built different weights, or the files do not fit the model.
        ConfigError: A kernel that the settings name cannot be used.
    """
    kernel = _choose_kernel(prepared, world, dtype)
    train, cluster = prepared.config.train, world.cluster
    num_shards = train.num_shards(cluster.num_ranks, cluster.ranks_per_host)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    path, options = prepared.config.model.path, dict(model_options or {})
    sources: Mapping[str, Source] | None = None
    if path is None:
        model = _random_model(prepared, world, wide, options)
    else:
        model = empty_model(prepared.model, **options).to(wide)  # type: ignore[arg-type]
        sources = world.together(lambda: find_sources(model, Path(path)))
    lora = train.lora
    if lora is not None:
        world.together(lambda: add_adapters(model, lora))
    fused = _choose_loss(prepared, world, model, dtype)
    if train.compile:
        install_compiler(model)
    if train.mlp_slice_tokens is not None:
        install_mlp_slices(model, train.mlp_slice_tokens)
    install_layer_runner(model, offload=train.offload)
    root = LossRoot(
        model,
        train.loss_slice_tokens,
        None if train.router_loss == "off" else RouterLoss(model),
        keeps_router_counts=train.router_loss == "previous_step",
        fused=fused,
    )
    _move_buffers(root, world.device)
    mesh = make_mesh(world.device.type, cluster.num_ranks, num_shards)
    shard_root(root, mesh, compute_dtype=dtype, reduce_dtype=wide)
    if sources is not None:
        world.together(lambda: fill_parameters(model, sources, world.device))
    if lora is not None:
        draw_adapters(model, train.seed)
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
        kernel,
        AttentionTimer(world.device),
        streaming,
    )


def _choose_kernel(prepared: Prepared, world: World, dtype: torch.dtype) -> Kernel:
    shape = prepared.shape
    kernel = world.together(
        lambda: choose_kernel(
            world.device,
            dtype,
            shape.head_dim,
            window=shape.window or None,
            softcap=shape.softcap or None,
            named=prepared.config.train.attention_kernel,
        )
    )
    _same_everywhere("train.attention_kernel", kernel.name, world)
    return kernel


def _choose_loss(prepared: Prepared, world: World, model: PreTrainedModel, dtype: torch.dtype) -> FusedLoss | None:
    fused = world.together(lambda: choose_loss(model, world.device, dtype, prepared.config.train.loss_kernel))
    _same_everywhere("train.loss_kernel", "torch" if fused is None else fused.name, world)
    return fused


def _same_everywhere(key: str, name: str, world: World) -> None:
    """Refuse kernels that differ between ranks."""
    names = sorted(set(world.gather(name)))
    if len(names) > 1:
        raise everywhere(
            ConfigError(
                f"{key} chose {' on some ranks and '.join(names)} on others, but all must run the same; install the "
                "same packages on all hosts, or set it to torch"
            )
        )


def _random_model(prepared: Prepared, world: World, dtype: torch.dtype, options: Mapping[str, Any]) -> PreTrainedModel:
    model = build_model(prepared.model, seed=prepared.config.train.seed, **options)
    model.to(dtype)  # type: ignore[arg-type]
    if len(set(world.gather(_weights_digest(model)))) != 1:
        raise everywhere(
            ModelError(
                "the ranks built different initial weights from one seed, but must have the same; install the same "
                "torch and transformers on all hosts"
            )
        )
    nn.Module.to(model, world.device)
    return model


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _weights_digest(model: nn.Module) -> str:
    """Of the first thousand elements of each parameter: enough to tell one sequence of random numbers from another."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1000].double().numpy().tobytes())
    return digest.hexdigest()
