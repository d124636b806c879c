"""What compiled blocks gain: a step's processor time against uncompiled ones, what layers keep, how far gradients are.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled

One process, a Qwen3 of three layers, ``inductor``, steps of lengths that were not seen before. There is no target: a
compiler joins the small operations between products, of which a CPU does little else than wait for memory.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.common import Ratio, interleave, ratio, where
from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.executor import Executor
from nestsp.execute.local import weighted_sum
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, model_config
from nestsp.model.compiled import install_compiler
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan

VOCABULARY = 512
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
TREE = GroupTree(())
NUM_PAIRS = 24
FIRST_LENGTHS, LENGTH = (530, 571), 640


def plan_of(length: int, kept_layers: int) -> Plan:
    """One long sequence and one of 200 tokens."""
    batch = SequenceBatch.of_lengths([length - 200, 200])
    plan = Plan.of_groups(TREE, batch, [{TREE.group(0, 0): [0, 1]}], "benchmark")
    return replace(plan, microbatches=tuple(replace(m, num_kept_layers=kept_layers) for m in plan.microbatches))


def make_executors(dtype: torch.dtype) -> dict[str, Executor]:
    """Uncompiled, compiled, and uncompiled in float32, of the same weights."""
    config = model_config(MODEL)
    made = build_model(config, seed=0)
    executors = {}
    for name, each in (("uncompiled", dtype), ("compiled", dtype), ("float32", torch.float32)):
        model = copy.deepcopy(made)
        if name == "compiled":
            install_compiler(model)
        install_layer_runner(model)
        root = LossRoot(model, slice_tokens=512).to(each)
        executors[name] = Executor(
            root, model_shape(config), {}, 0, torch.device("cpu"), CpuFlash(), AttentionTimer(torch.device("cpu"))
        )
    return executors


def read(identity: int, start: int, stop: int) -> Any:
    """Random tokens."""
    return np.random.default_rng(identity).integers(0, VOCABULARY, stop)[start:]


def step_s(executor: Executor, plan: Plan) -> float:
    """Processor time of a step."""
    executor.root.zero_grad()
    local = executor.load(plan, read)
    start = time.process_time()
    executor.run(local)
    return time.process_time() - start


def gradient(executor: Executor, plan: Plan) -> Tensor:
    """Of all parameters, in one row."""
    step_s(executor, plan)
    return torch.cat([p.grad.float().flatten() for p in executor.root.parameters() if p.grad is not None])


def kept_bytes(executor: Executor, plan: Plan) -> int:
    """Of all tensors kept for the backward pass that have a row for each token."""
    (microbatch,) = executor.load(plan, read).microbatches
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if microbatch.tokens.num_tokens in tensor.shape:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = weighted_sum(microbatch.tokens, executor.root(microbatch.tokens, microbatch.attention))
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def speed(uncompiled: Executor, compiled: Executor, kept_layers: int) -> Ratio:
    """Processor time of uncompiled steps over compiled ones, each of another length."""
    lengths = iter(range(LENGTH, LENGTH + 4 * NUM_PAIRS))

    def step_of(executor: Executor) -> float:
        return step_s(executor, plan_of(next(lengths), kept_layers))

    return ratio(*interleave(partial(step_of, uncompiled), partial(step_of, compiled), NUM_PAIRS))


def main() -> None:
    """Measure and print."""
    print(f"one process; {where()}")
    for dtype in (torch.float32, torch.bfloat16):
        executors = make_executors(dtype)
        uncompiled, compiled = executors["uncompiled"], executors["compiled"]
        counters.clear()
        first_s = sum(step_s(compiled, plan_of(length, 0)) for length in FIRST_LENGTHS)
        pieces = counters["stats"]["unique_graphs"]
        print(f"{dtype}: {pieces} pieces compiled in the first two steps, {first_s:.1f} s of this process")
        expected = gradient(executors["float32"], plan_of(LENGTH, 0))
        for name, executor in (("uncompiled", uncompiled), ("compiled", compiled)):
            error = float((gradient(executor, plan_of(LENGTH, 0)) - expected).norm() / expected.norm())
            none, all_layers = (kept_bytes(executor, plan_of(LENGTH, layers)) for layers in (0, 3))
            token_bytes = (all_layers - none) / LENGTH / 3
            print(f"  {name}: gradient {error:.1e} from float32's; a kept layer keeps {token_bytes:,.0f} bytes a token")
        for kept_layers in (0, 3):
            gain = speed(uncompiled, compiled, kept_layers)
            print(f"  {kept_layers} of 3 layers kept: uncompiled over compiled {gain}")
        assert counters["stats"]["unique_graphs"] == pieces, "later lengths compiled something"


if __name__ == "__main__":
    main()
