"""What a run says of itself before its first step: everything that was decided, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from nestsp.config import RunConfig
from nestsp.execute.executor import Executor
from nestsp.model.root import LossRoot
from nestsp.planners.task import PlanningTask
from nestsp.report.banner import aligned, describe_cluster, describe_model, draw_tree, steps_arithmetic
from nestsp.train.limits import Limits
from nestsp.train.manifest import Progress
from nestsp.train.prepare import Prepared
from nestsp.train.world import World
from nestsp.units import format_bytes, format_count, plural

__all__ = ["run_banner"]

_RECOMPUTE: Mapping[bool | str, str] = {
    "auto": "as few layers as memory allows are recomputed",
    True: "all layers are recomputed",
    False: "no layer is recomputed",
}

_NO_PRESET = "no preset names this GPU, so plans are made for a CPU's figures; name one in cluster.profile"


def run_banner(
    prepared: Prepared,
    task: PlanningTask,
    limits: Limits,
    world: World,
    executor: Executor,
    dtype: torch.dtype,
    folder: Path,
    checkpoint: Path | None,
    start: Progress,
    changes: tuple[str, ...],
    probe: list[str],
) -> str:
    """Lines for people."""
    config = prepared.config
    device = platform.machine() if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    cap, cost = task.max_tokens_per_rank, task.cost()
    chosen = " (chosen over a sample of batches)" if config.planner.degree is None else ""
    degree = "" if task.degree is None else f", degree {task.degree}{chosen}"
    root, cores = executor.root, os.cpu_count() or 1
    assert isinstance(root, LossRoot)
    fused = root.fused
    compiled = config.train.compile
    unnamed = world.device.type == "cuda" and cost.profile.name == "cpu" and config.cluster.profile is None
    crowded = world.device.type == "cpu" and world.cluster.ranks_per_host > 2 * cores
    rows = [
        ("run", [str(folder) + (f", from {checkpoint.name}" if checkpoint is not None else "")]),
        ("model", [describe_model(prepared.shape)]),
        ("probe", probe),
        (
            "ranks",
            [
                f"{describe_cluster(world.cluster)}; {world.device.type} ({device}), {world.backend}, "
                f"{str(dtype).removeprefix('torch.')}; attention by {executor.kernel.name}, loss by "
                f"{'PyTorch' if fused is None else fused.name}{_own_loss(config)}",
                *([f"more ranks than this host's {plural(cores, 'core')}, so they take turns"] if crowded else []),
                f"{_sharding(config, world)}; {_RECOMPUTE[config.train.recompute]} in backward",
                *(["blocks of layers are compiled by torch.compile, attention and experts not"] if compiled else []),
            ],
        ),
        ("tree", draw_tree(prepared.tree)),
        ("planner", [f"{task.planner}{degree}" + ("" if task.streaming else "; groups one after the other")]),
        (
            "profile",
            [
                f"{cost.profile.name}: {cost.profile.hardware}",
                *([_NO_PRESET] if unnamed else []),
            ],
        ),
        (
            "memory",
            [
                f"{format_bytes(limits.memory_per_rank_bytes)} a rank may use ({limits.source}), "
                f"{format_bytes(cost.memory.fixed)} of them before any token"
            ],
        ),
        (
            "cap",
            [
                "none but memory"
                if cap is None
                else f"{plural(cap, 'token')} a rank holds in one microbatch, after splitting "
                f"(a sequence of {format_count(cap * prepared.tree.num_ranks)} fits on all ranks together)"
            ],
        ),
        (
            "data",
            [
                *prepared.samples.describe_sources(),
                *prepared.samples.counts.describe().split("; "),
            ],
        ),
        (
            "steps",
            [
                steps_arithmetic(
                    num_samples=prepared.stream.num_samples,
                    steps_in_epoch=prepared.stream.steps_in_epoch(0),
                    num_steps=prepared.num_steps,
                    tokens_per_step=config.data.tokens_per_step,
                    sequences_per_step=config.data.sequences_per_step,
                )
            ]
            + ([f"going on after step {start.step}"] if start.step else [])
            + [f"changed since the start before: {change}" for change in changes],
        ),
    ]
    return f"nestsp {importlib.metadata.version('nestsp')}\n{aligned(rows)}\n"


def _own_loss(config: RunConfig) -> str:
    """The user's function, if there is one."""
    train = config.train
    own = train.token_loss or train.sequence_loss
    return "" if own is None else f", given to {own}" + (", beside the reference" if train.reference else "")


def _sharding(config: RunConfig, world: World) -> str:
    ranks = world.cluster.num_ranks
    shards = config.train.num_shards(ranks, world.cluster.ranks_per_host)
    if shards == ranks:
        return "FSDP2 over all ranks"
    return "a whole model on each rank" if shards == 1 else f"FSDP2 over {shards} ranks, {ranks // shards} copies"
