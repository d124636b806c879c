"""Runs a plan on gloo ranks in float64 and compares loss and every gradient with one process, each sequence alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nestsp.attention.local import CpuFlash
from nestsp.comm.groups import make_links
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import (
    Gradients,
    RoutingRecorder,
    Verification,
    compare_gradients,
    full_gradients,
    reference_gradients,
)
from nestsp.model.adapter import build_model, model_config, model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.shard import rank_spans
from nestsp.train.parallelize import shard_root

# Rounding in float64 leaves about 1e-14; anything structural is above 1e-6.
TOLERANCE = 1e-9

LLAMA = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
COMMON: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 67}


def small_config(keys: dict[str, Any]) -> dict[str, Any]:
    return {**COMMON, **keys}


def make_model(keys: dict[str, Any], attention: str) -> torch.nn.Module:
    config = model_config(small_config(keys))
    more = {"experts_implementation": "eager"} if keys["model_type"] == "qwen3_moe" else {}
    model = build_model(config, seed=3, attention=attention, **more).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # the usual initial weights are so small that errors in attention would hardly show
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
    return model


def make_tokens(plan: Plan, vocabulary: int = COMMON["vocab_size"]) -> dict[int, torch.Tensor]:
    """Random tokens of each sequence, a function of its id and length alone."""
    tokens = {}
    for identity, length in zip(plan.batch.ids, plan.batch.lengths, strict=True):
        generator = torch.Generator().manual_seed(1000 + identity)
        tokens[identity] = torch.randint(0, vocabulary, (length,), generator=generator)
    return tokens


def make_executor(keys: dict[str, Any], plan: Plan, rank: int, recompute: bool) -> Executor:
    shape = model_shape(model_config(small_config(keys)))
    model = make_model(keys, "nestsp")
    install_layer_runner(model, recompute=recompute)
    root = LossRoot(model, slice_tokens=5)
    mesh = init_device_mesh("cpu", (plan.tree.num_ranks,))
    shard_root(root, mesh, compute_dtype=torch.float64, reduce_dtype=torch.float64)
    links = make_links(
        plan.tree, rank, torch.device("cpu"), ranks_per_host=plan.tree.num_ranks, timeout=timedelta(seconds=30)
    )
    device = torch.device("cpu")
    return Executor(root, shape, links, rank, device, CpuFlash(), recompute, AttentionTimer(device))


def planned_gradients(executor: Executor, plan: Plan, tokens: dict[int, torch.Tensor]) -> Gradients:
    plan.check()
    executor.check(plan)

    def read(identity: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return tokens[identity][start:stop].numpy()

    recorder = RoutingRecorder(executor.root)
    total = torch.zeros((), dtype=torch.float64)
    local = executor.load(plan, read)
    for microbatch, spans in zip(local.microbatches, rank_spans(plan, executor.rank), strict=True):
        origin = [(plan.batch.ids[s.sequence], p) for s in spans.spans for p in range(s.start, s.stop)]
        with recorder.tokens(origin):
            total += executor.run(type(local)((microbatch,)))
    recorder.remove()
    dist.all_reduce(total)
    choices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(choices, recorder.choices)
    merged = {key: value for part in choices for key, value in part.items()}
    return Gradients(total.item(), full_gradients(executor.root, keep=executor.rank == 0), merged)


def compare_with_one_process(
    rank: int, num_ranks: int, keys: dict[str, Any], plan_json: dict[str, Any], recompute: bool
) -> Verification | None:
    plan = Plan.from_json(plan_json)
    tokens = make_tokens(plan)
    executor = make_executor(keys, plan, rank, recompute)
    planned = planned_gradients(executor, plan, tokens)
    if rank != 0:
        return None
    reference = reference_gradients(make_model(keys, "sdpa"), tokens)
    return compare_gradients(planned, reference, sum(n - 1 for n in plan.batch.lengths))
