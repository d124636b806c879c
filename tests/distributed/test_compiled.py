"""Compiled blocks give the loss and gradients of uncompiled ones under nested plans, and new lengths compile nothing.

Most run ``aot_eager``, which traces and differentiates as ``inductor`` does, and runs the same operators one by one:
what it shows, in float64 throughout, is that the pieces are right, at a tenth of the price. A slow one runs
``inductor``.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.config import LoraConfig
from nestsp.execute.executor import Executor
from nestsp.execute.float64 import all_float64
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients, reference_gradients
from nestsp.model.compiled import Compiled, install_compiler
from nestsp.model.derive import reference_attention
from nestsp.plan import Plan
from nestsp.train import setup, trainer
from nestsp.train.generate import generating
from tests.distributed import equivalence
from tests.distributed.equivalence import (
    GEMMA3,
    GPT_OSS,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan
from tests.distributed.test_evaluate import generated
from tests.distributed.test_trainer import ROUNDING, train_rank
from tests.e2e.runs import losses, tiny, write_corpus

PAIR = GroupTree((2,))

# Norms are float32 in models of any dtype, and inductor adds in another order there: a few roundings of 6e-8.
INDUCTOR_ROUNDING = 2e-6

# What PyTorch's compiler warns of in its own code, when it is imported and when it looks at a tensor.
OWN_WARNINGS = ("`torch.jit.script_method` is deprecated", "The .grad attribute of a Tensor that is not a leaf")


@contextmanager
def without_the_compilers_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in OWN_WARNINGS:
            warnings.filterwarnings("ignore", re.escape(message))
        yield


def whole(length: int) -> Plan:
    """One long sequence over both ranks, and a short one on the first."""
    batch = SequenceBatch.of_lengths([length, 5])
    return Plan.of_groups(PAIR, batch, [{PAIR.group(0, 0): [0], PAIR.group(1, 0): [1]}], "test")


def float64_pieces(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend: ``aot_eager`` on a graph that asks for float64 where it asked for float32, as `all_float64` does."""
    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, lambda arg: torch.float64 if arg is torch.float32 else arg)
        node.kwargs = map_aggregate(node.kwargs, lambda arg: torch.float64 if arg is torch.float32 else arg)
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
    graph.recompile()
    return lookup_backend("aot_eager")(graph, inputs)


class WithoutModes:
    """Nothing is compiled under a dispatch mode such as `all_float64`; `float64_pieces` stands in for it."""

    def __init__(self, code: Any) -> None:
        self.code = code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return self.code(*args, **kwargs)


def make_compiled(case: Case, rank: int, links: Any) -> Executor:
    """Its compiler may be ``float64``, too."""

    def install(model: torch.nn.Module, compiler: str) -> None:
        install_compiler(model, float64_pieces if compiler == "float64" else compiler)
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, Compiled):
                forward.code = WithoutModes(forward.code)

    with without_the_compilers_warnings(), patch.object(equivalence, "install_compiler", install):
        return make_executor(case, rank, links=links)


def gradients(executor: Executor, plan: Plan) -> Gradients:
    """Of one step; they are unset afterwards."""
    with without_the_compilers_warnings():
        total = executor.run(load(executor, plan, make_tokens(plan)))
    dist.all_reduce(total)
    found = Gradients(total.item(), full_gradients(executor.root, keep=executor.rank == 0), {})
    executor.root.zero_grad()
    return found


def run_plans(rank: int, num_ranks: int, case: Case, plans: Sequence[Any]) -> list[Verification]:
    """Under each plan, against each sequence alone."""
    executor = make_compiled(case, rank, make_tree_links(case.made, rank))
    return compare(executor, case, [Plan.from_json(plan) for plan in plans])


def compare(executor: Executor, case: Case, plans: Sequence[Plan]) -> list[Verification]:
    outcomes = []
    counters.clear()
    for plan in plans:
        with all_float64():
            found = gradients(executor, plan)
        if executor.rank == 0:
            model = make_model(case.keys, reference_attention(executor.shape), trainable=case.trainable)
            with all_float64():
                alone = reference_gradients(model, make_tokens(plan))
            outcomes.append(compare_gradients(found, replace(alone, experts={}), 1))
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    return outcomes


def check(outcomes: Sequence[Verification], tolerance: float = TOLERANCE) -> None:
    assert outcomes
    for outcome in outcomes:
        assert outcome.worst <= tolerance, outcome


@dataclass(frozen=True)
class Counted:
    """What one rank saw.

    Attributes:
        outcomes: Of a nested plan with layers recomputed, and with layers kept; on rank 0.
        graphs: Compiled so far, after each further length.
        kept_bytes: For one microbatch's backward pass, all layers kept; compiled, and uncompiled.
    """

    outcomes: list[Verification]
    graphs: list[int]
    kept_bytes: tuple[int, int]


def run_and_count(rank: int, num_ranks: int, case: Case, lengths: Sequence[int]) -> Counted:
    executor = make_compiled(case, rank, make_tree_links(case.made, rank))
    outcomes = compare(executor, case, [case.made, replace(case, recompute=False).made])
    graphs = []
    for length in lengths:
        gradients(executor, whole(length))
        graphs.append(counters["stats"]["unique_graphs"])
    uncompiled = make_executor(replace(case, compiler=None), rank, links=executor.links)
    return Counted(outcomes, graphs, (kept_bytes(executor), kept_bytes(uncompiled)))


def kept_bytes(executor: Executor) -> int:
    """Bytes of all tensors that have a row for each token."""
    plan = replace(Case(LLAMA, whole(64).to_json()), recompute=False).made
    (microbatch,) = load(executor, plan, make_tokens(plan)).microbatches
    num_tokens = microbatch.tokens.num_tokens
    assert num_tokens in (37, 32), "no other size of the model"
    found = {}

    def pack(tensor: Tensor) -> Tensor:
        if num_tokens in tensor.shape:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with without_the_compilers_warnings():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            nll = executor.root(microbatch.tokens, microbatch.attention)
        nll.sum().backward()
    executor.root.zero_grad()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


# Norm, before attention, after attention, feed-forward block; what is after attention twice: its second length tells
# the compiler that lengths differ.
TRAINING_GRAPHS = 5


def test_G28_compiled_blocks_have_the_gradients_of_one_process_twenty_lengths_compile_nothing_new_and_no_more_is_kept(
    pool: RankPool,
) -> None:
    """Recomputed layers, of which attention's output is kept, and kept ones; filler tokens; then 20 other lengths."""
    case = Case(LLAMA, nested_plan(PAIR, keep="output").to_json(), compiler="float64")
    by_rank = pool.run(run_and_count, case, list(range(18, 58, 2)), ranks=2, timeout_s=240.0)
    check(by_rank[0].outcomes)
    for counted in by_rank:
        assert counted.graphs == [TRAINING_GRAPHS] * 20
        compiled, uncompiled = counted.kept_bytes
        assert 0 < compiled <= uncompiled


def run_evaluation(rank: int, num_ranks: int, case: Case) -> tuple[list[int], float, list[list[int]]]:
    """Graphs compiled by training, and by evaluation, too; largest error of `measure`; texts of both models."""
    plan = case.made
    executor = make_compiled(case, rank, make_tree_links(plan, rank))
    uncompiled = make_executor(replace(case, compiler=None), rank, links=executor.links)
    counters.clear()
    gradients(executor, plan)
    graphs = [counters["stats"]["unique_graphs"]]
    with all_float64(), without_the_compilers_warnings():
        found = executor.measure(load(executor, plan, make_tokens(plan)))
        expected = uncompiled.measure(load(uncompiled, plan, make_tokens(plan)))
    graphs.append(counters["stats"]["unique_graphs"])
    error = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    texts = []
    for each in (executor, uncompiled):
        with generating(each.root) as model:  # type: ignore[arg-type]
            texts.append(generated(model, make_tokens(plan)[0]))
    graphs.append(counters["stats"]["unique_graphs"])
    return graphs, error, texts


@pytest.mark.slow
def test_G28_evaluation_compiles_its_own_pieces_once_and_generation_none(pool: RankPool) -> None:
    case = Case(QWEN3, nested_plan(PAIR).to_json(), compiler="float64")
    for graphs, error, texts in pool.run(run_evaluation, case, ranks=2, timeout_s=240.0):
        assert graphs == [TRAINING_GRAPHS, TRAINING_GRAPHS + 4, TRAINING_GRAPHS + 4]
        assert error <= TOLERANCE
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(QWEN3, {}, mlp_slice_tokens=5, offload=True),
        Case(QWEN3, {}, trainable=("layers.1",)),  # its first layer's input has no gradient
        Case(QWEN3_MOE, {}),
        Case(GPT_OSS, {}),  # windows and sinks
        Case(GEMMA3, {}),  # two kinds of rotary positions
    ],
    ids=["slices", "frozen", "experts", "sinks", "windows"],
)
def test_G28_other_models_compiled_have_the_gradients_of_one_process(pool: RankPool, case: Case) -> None:
    plan = nested_plan(PAIR, keep="output").to_json()
    case = replace(case, plan=plan, compiler="float64")
    check(pool.run(run_plans, case, [plan, replace(case, recompute=False).made.to_json()], ranks=2, timeout_s=240.0)[0])


def run_bfloat16(rank: int, num_ranks: int, case: Case) -> Verification:
    """Compiled against uncompiled."""
    links, found = make_tree_links(case.made, rank), []
    with without_the_compilers_warnings():
        for compiler in ("aot_eager", None):
            each = replace(case, compiler=compiler)
            options: Any = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            found.append(gradients(make_executor(each, rank, links=links, **options), case.made))
    return compare_gradients(found[0], found[1], 1)


@pytest.mark.slow
def test_G28_bfloat16_rounds_where_uncompiled_code_does(pool: RankPool) -> None:
    check([pool.run(run_bfloat16, Case(QWEN3, nested_plan(PAIR).to_json()), ranks=2, timeout_s=240.0)[0]])


def run_compiled_adapters(rank: int, num_ranks: int, case: Case) -> list[Verification]:
    from tests.distributed.test_lora import run_adapters  # skips where PEFT is missing

    with without_the_compilers_warnings():
        return run_adapters(rank, num_ranks, [case], [LoraConfig(rank=3, alpha=5.0)])


@pytest.mark.slow
def test_G28_compiled_adapters_have_the_gradients_of_one_process(pool: RankPool) -> None:
    pytest.importorskip("peft", reason="PEFT is an extra: nestsp[lora]")
    case = Case(LLAMA, nested_plan(PAIR).to_json(), compiler="aot_eager")
    check(pool.run(run_compiled_adapters, case, ranks=2, timeout_s=240.0)[0])


@pytest.mark.slow
def test_G28_inductor_gives_the_same_gradients(pool: RankPool) -> None:
    case = Case(LLAMA, nested_plan(PAIR).to_json(), compiler="inductor")
    check(pool.run(run_plans, case, [case.plan], ranks=2, timeout_s=240.0)[0], INDUCTOR_ROUNDING)


def train_compiled(rank: int, num_ranks: int, *args: Any) -> Any:
    """The trainer, but for the backend; see above."""

    def install(model: torch.nn.Module) -> int:
        return install_compiler(model, "aot_eager")

    with (
        without_the_compilers_warnings(),
        patch.object(trainer, "check_compiler", lambda device: None),
        patch.object(setup, "install_compiler", install),
    ):
        return train_rank(rank, num_ranks, *args)


@pytest.mark.slow
def test_G28_a_compiled_run_has_the_losses_and_files_of_an_uncompiled_one_and_resumes_as_one(
    pool: RankPool, tmp_path: Path
) -> None:
    """Checkpoints and exports carry the model's own names; evaluation between steps."""
    write_corpus(tmp_path / "corpus.jsonl")
    runs = tmp_path / "runs"
    given = (
        "train.steps=4",
        "train.eval_every=2",
        "data.eval={source: corpus.jsonl}",
        "planner.max_tokens_per_rank=90",
    )
    for compiled in ("false", "true"):
        config = tiny(*given, f"train.compile={compiled}")
        assert pool.run(train_compiled, tmp_path, config, None, ranks=2, timeout_s=240.0) == [None] * 2
    plain, run = runs / "tiny-1", runs / "tiny-2"
    assert losses(run) == pytest.approx(losses(plain), abs=ROUNDING)
    found, expected = (load_file(path / "hf" / "model.safetensors") for path in (run, plain))
    assert found.keys() == expected.keys()
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.rmtree(run / "hf")
    assert pool.run(train_compiled, tmp_path, tiny(*given), "auto", ranks=2, timeout_s=240.0) == [None] * 2
    assert losses(run) == pytest.approx(losses(plain), abs=ROUNDING)


def test_blocks_of_experts_are_not_compiled() -> None:
    with without_the_compilers_warnings():
        assert install_compiler(make_model(LLAMA, "nestsp")) == 3 * 4  # norms, attention, a feed-forward block
        assert install_compiler(make_model(QWEN3_MOE, "nestsp")) == 3 * 3
