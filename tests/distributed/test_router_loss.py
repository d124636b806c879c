"""The routers' auxiliary loss is that of the whole batch: gradients of one process, whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from nestsp.cluster import GroupTree
from nestsp.errors import ModelError
from nestsp.execute.router_loss import RouterLossKind, run_with_router_loss
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients
from nestsp.model.root import LossRoot
from nestsp.model.router_loss import RouterLoss, router_loss_of
from tests.distributed.equivalence import (
    LLAMA,
    MIXTRAL,
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
from tests.distributed.test_equivalence import nested_plan, static_plan
from tests.distributed.test_losses import one_microbatch

COEFFICIENT = 0.1


def run_steps(
    rank: int, num_ranks: int, cases: Sequence[Case], kind: RouterLossKind, shards: Sequence[int]
) -> list[tuple[Verification, float, float]]:
    """Two steps of each case at the same weights; of each: the comparison, and both auxiliary losses."""
    outcomes = []
    for case, num_shards in zip(cases, shards, strict=True):
        plan = case.made
        tokens = make_tokens(plan)
        num_targets = sum(length - 1 for length in plan.batch.lengths)
        executor = make_executor(case, rank, links=make_tree_links(plan, rank), num_shards=num_shards, router_loss=kind)
        for step in (1, 2):
            total, auxiliary = run_with_router_loss(
                executor, load(executor, plan, tokens), kind=kind, scale=COEFFICIENT * num_targets
            )
            dist.all_reduce(total)
            planned = Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {})
            executor.root.zero_grad()
            if rank == 0:
                # The first step has no batch before it.
                factor = 0.0 if kind == "previous_step" and step == 1 else COEFFICIENT * num_targets
                expected, auxiliary_there = reference(case, tokens, factor)
                outcomes.append((compare_gradients(planned, expected, num_targets), auxiliary, auxiliary_there))
    return outcomes


def reference(case: Case, tokens: dict[int, Tensor], factor: float) -> tuple[Gradients, float]:
    """Each sequence alone; F and P over the batch and all layers, in float64. Transformers sums in float32."""
    model = make_model(case.keys, "sdpa", trainable=case.trainable)
    total = torch.zeros((), dtype=torch.float64)
    by_layer: list[list[Tensor]] = [[] for _ in range(3)]
    for ids in tokens.values():
        output = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        if len(ids) > 1:
            total = total + F.cross_entropy(output.logits[0, :-1], ids[1:], reduction="sum")
        for layer, logits in zip(by_layer, output.router_logits, strict=True):
            layer.append(logits)
    logits = torch.cat([torch.cat(layer) for layer in by_layer])
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(probabilities.topk(2, -1).indices, 4).sum(1).double().mean(0)
    auxiliary = 4 * (chosen * probabilities.mean(0)).sum()
    theirs: Any = load_balancing_loss_func(tuple(torch.cat(layer) for layer in by_layer), 4, 2)  # type: ignore[arg-type]
    assert auxiliary.item() == pytest.approx(theirs.item(), rel=1e-6)
    (total + factor * auxiliary).backward()
    return Gradients(total.item(), {name: p.grad for name, p in model.named_parameters()}, {}), auxiliary.item()


def check(outcomes: Sequence[Any], number: int) -> None:
    assert len(outcomes) == number
    for verification, auxiliary, auxiliary_there in outcomes:
        assert verification.passes(TOLERANCE), verification
        assert auxiliary == pytest.approx(auxiliary_there, rel=TOLERANCE)


@pytest.mark.parametrize("keys", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_G22_a_counting_pass_gives_the_whole_batchs_loss_under_any_plan(pool: RankPool, keys: dict[str, Any]) -> None:
    tree = GroupTree((2, 2))
    plans = [nested_plan(tree, keep="output"), one_microbatch(tree), static_plan(tree, 0)]
    cases = [Case(keys, plan.to_json()) for plan in plans]
    cases.append(replace(cases[1], recompute=False))
    check(pool.run(run_steps, cases, "counting_pass", [4, 4, 1, 2], ranks=4, timeout_s=120.0)[0], 8)


def test_the_counts_of_the_step_before_are_those_of_its_whole_batch(pool: RankPool) -> None:
    """At the same weights and tokens the second step is the counting pass's; the first has no such gradient."""
    tree = GroupTree((2, 2))
    cases = [Case(QWEN3_MOE, plan.to_json()) for plan in (nested_plan(tree), one_microbatch(tree))]
    check(pool.run(run_steps, cases, "previous_step", [4, 2], ranks=4)[0], 4)


def test_an_even_router_has_the_loss_top_k_and_no_tokens_have_none() -> None:
    even = torch.tensor([[6.0, 6.0, 6.0, 6.0], [3.0, 3.0, 3.0, 3.0]], dtype=torch.float64)
    loss, slopes = router_loss_of(even, 2)
    assert loss.item() == pytest.approx(2.0)
    assert slopes.tolist() == pytest.approx([4 * 6 / 12**2] * 4)
    loss, slopes = router_loss_of(torch.zeros(2, 4, dtype=torch.float64), 2)
    assert not loss
    assert not slopes.any()


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no routers of experts; set train\.router_loss: off"):
        RouterLoss(make_model(LLAMA, "sdpa"))


def test_counts_of_the_step_before_are_part_of_the_saved_state() -> None:
    model = make_model(QWEN3_MOE, "nestsp")
    kept = LossRoot(model, 5, RouterLoss(model), keeps_router_counts=True)  # type: ignore[arg-type]
    plain = LossRoot(model, 5, RouterLoss(model))  # type: ignore[arg-type]
    assert kept.state_dict().keys() - plain.state_dict().keys() == {"router_counts"}
