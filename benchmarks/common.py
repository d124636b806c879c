"""Interleaved pairs on a noisy machine: ratios within one run, medians with bootstrap intervals."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from nestsp.attention.choice import choose_kernel
from nestsp.cluster import GroupTree
from nestsp.comm.groups import make_links
from nestsp.config import RunConfig, load_config
from nestsp.execute.executor import Executor
from nestsp.execute.local import LocalTokens
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, decoder_layers, model_config
from nestsp.model.derive import model_shape
from nestsp.model.logits import logit_function
from nestsp.model.loss import sliced_nll
from nestsp.model.root import LossRoot
from nestsp.train.parallelize import shard_root

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.yaml"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, {self.num_pairs} pairs)"


def ratio(numerators: list[float], denominators: list[float]) -> Ratio:
    """Of pairs that were measured one right after the other."""
    return median_of((np.array(numerators) / np.array(denominators)).tolist())


def median_of(ratios: list[float]) -> Ratio:
    """Of ratios that were each measured at one time."""
    pairs = np.array(ratios)
    draws = np.random.default_rng(0).choice(pairs, (10_000, len(pairs)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return Ratio(float(np.median(pairs)), float(low), float(high), len(pairs))


def interleave(
    first: Callable[[], float], second: Callable[[], float], num_pairs: int
) -> tuple[list[float], list[float]]:
    """Measure two things in turn, each going first in every other pair, after one warm-up of each."""
    first()
    second()
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(num_pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for which in order:
            times[which].append((first, second)[which]())
    return times


def quickstart(*overrides: str) -> RunConfig:
    """The quickstart's settings."""
    return load_config(QUICKSTART, overrides)


def make_executor(config: RunConfig, tree: GroupTree, rank: int) -> Executor:
    """The quickstart's model, sharded over all ranks, in float32 on the CPU."""
    device = torch.device("cpu")
    model = model_config(config.model.source)
    shape = model_shape(model)
    root = LossRoot(build_model(model, seed=0), config.train.loss_slice_tokens)
    install_layer_runner(root.model)
    mesh = init_device_mesh("cpu", (tree.num_ranks,))
    shard_root(root, mesh, compute_dtype=torch.float32, reduce_dtype=torch.float32)
    links = make_links(tree, rank, device, ranks_per_host=tree.num_ranks, timeout=timedelta(seconds=120))
    kernel = choose_kernel(device, torch.float32, shape.head_dim)
    return Executor(root, shape, links, rank, device, kernel, AttentionTimer(device))


def plain_nll(model: Any, tokens: LocalTokens, slice_tokens: int, **kwargs: Any) -> Tensor:
    """Negative log-likelihoods [T] of a model with an attention that is not nestsp's, its loss in slices like ours."""
    output = model.base_model(
        input_ids=tokens.ids[None], position_ids=tokens.positions[None], use_cache=False, return_dict=True, **kwargs
    )
    return sliced_nll(logit_function(model), output.last_hidden_state[0], tokens.targets, slice_tokens)


def recompute_every_layer(model: nn.Module) -> None:
    """Recompute every layer of a model that nestsp does not run."""
    for layer in decoder_layers(model):
        layer.gradient_checkpointing = True
        layer.__dict__["_gradient_checkpointing_func"] = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )


def where() -> str:
    """Hardware and commit of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{platform.machine()}, {torch.get_num_threads()} threads a rank, torch {torch.__version__}, "
        f"commit {commit.stdout.strip() or 'unknown'}"
    )
