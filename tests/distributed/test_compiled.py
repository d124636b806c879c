"""Compiled blocks give the loss and gradients of uncompiled ones under nested plans, and new lengths compile nothing.

``aot_eager`` traces and differentiates as ``inductor`` does, and runs the same operators one by one: what it shows is
that the pieces are right, at a tenth of the price. A slow test runs ``inductor`` itself.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients, reference_gradients
from nestsp.model.compiled import check_compiler, install_compiler
from nestsp.plan import Plan
from tests.distributed.equivalence import (
    GPT_OSS,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

# Models compute norms and routers in float32 whatever their dtype; one rounding there is 1e-7, and two ways to add
# differ by a few of them. `all_float64` would take that away, but nothing is compiled under a dispatch mode.
ROUNDING = 2e-6
PAIR = GroupTree((2,))


# What PyTorch's compiler warns of in its own code, when it is imported and when it looks at a tensor.
OWN_WARNINGS = ("`torch.jit.script_method` is deprecated", "The .grad attribute of a Tensor that is not a leaf")


@contextmanager
def without_the_compilers_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in OWN_WARNINGS:
            warnings.filterwarnings("ignore", re.escape(message))
        yield


def run_pairs(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[tuple[Verification, Verification]]:
    """Each case compiled: against the same plan uncompiled, and against one process."""
    outcomes = []
    for case in cases:
        plan, tokens = case.made, make_tokens(case.made)
        links = make_tree_links(plan, rank)
        found = []
        for each in (case, replace(case, compiler=None)):
            executor = make_executor(each, rank, links=links)
            with without_the_compilers_warnings():
                total = executor.run(load(executor, plan, tokens))
            dist.all_reduce(total)
            found.append(Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {}))
        if rank == 0:
            alone = reference_gradients(make_model(case.keys, "sdpa", trainable=case.trainable), tokens)
            alone = replace(alone, experts={})
            outcomes.append((compare_gradients(found[0], found[1], 1), compare_gradients(found[0], alone, 1)))
    return outcomes


def check(pool: RankPool, cases: Sequence[Case]) -> None:
    outcomes = pool.run(run_pairs, cases, ranks=2, timeout_s=240.0)[0]
    assert len(outcomes) == len(cases)
    for against_uncompiled, against_one_process in outcomes:
        assert against_uncompiled.worst <= ROUNDING, against_uncompiled
        assert against_one_process.worst <= ROUNDING, against_one_process


def test_G28_compiled_blocks_have_the_gradients_of_uncompiled_ones_and_of_one_process(pool: RankPool) -> None:
    plan = nested_plan(PAIR, keep="output").to_json()
    cases = [
        Case(QWEN3, plan, compiler="aot_eager"),
        Case(QWEN3, plan, compiler="aot_eager", recompute=False, mlp_slice_tokens=5),
    ]
    check(pool, cases)


def count_graphs(rank: int, num_ranks: int, case: Case, lengths: Sequence[int]) -> list[int]:
    """Graphs compiled so far, after a step of each length."""
    torch._dynamo.reset()
    executor = make_executor(case, rank, links=make_tree_links(case.made, rank))
    counters.clear()
    found = []
    for length in lengths:
        plan = whole(length)
        with without_the_compilers_warnings():
            executor.run(load(executor, plan, make_tokens(plan)))
        found.append(counters["stats"]["unique_graphs"])
    return found


def whole(length: int) -> Plan:
    """One long sequence over both ranks, and a short one on the first."""
    batch = SequenceBatch.of_lengths([length, 5])
    return Plan.of_groups(PAIR, batch, [{PAIR.group(0, 0): [0], PAIR.group(1, 0): [1]}], "test")


# Norm, before attention, after attention, feed-forward block; and variants: one token or several.
MOST_GRAPHS = 8


@pytest.mark.slow
def test_G28_twenty_lengths_compile_what_the_first_one_compiles(pool: RankPool) -> None:
    case = Case(LLAMA, whole(20).to_json(), compiler="aot_eager")
    by_rank = pool.run(count_graphs, case, list(range(20, 60, 2)), ranks=2, timeout_s=240.0)
    for found in by_rank:
        assert len(found) == 20
        assert 0 < found[-1] <= MOST_GRAPHS
        assert found[-1] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(QWEN3, {}, trainable=("layers.1",)),  # its first layer's input has no gradient
        Case(QWEN3_MOE, {}),
        Case(GPT_OSS, {}),  # windows and sinks
    ],
    ids=["frozen", "experts", "sinks"],
)
def test_G28_other_models_compiled_have_the_gradients_of_one_process(pool: RankPool, case: Case) -> None:
    check(pool, [replace(case, plan=nested_plan(PAIR).to_json(), compiler="aot_eager")])


@pytest.mark.slow
def test_G28_inductor_gives_the_same_gradients(pool: RankPool) -> None:
    check(pool, [Case(LLAMA, nested_plan(PAIR).to_json(), compiler="inductor")])


def test_blocks_of_experts_are_not_compiled() -> None:
    with without_the_compilers_warnings():
        assert install_compiler(make_model(LLAMA, "nestsp")) == 3 * 4  # norms, attention, a feed-forward block
        assert install_compiler(make_model(QWEN3_MOE, "nestsp")) == 3 * 3


def test_a_compiler_that_does_not_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        Exception,
        match=r"train\.compile is true, but torch\.compile does not work on this cpu host \(No working C\+\+ compiler "
        r"found\); install a C\+\+ compiler, or set train\.compile: false",
    ):
        check_compiler(torch.device("cpu"))
