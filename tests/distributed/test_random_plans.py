"""Drawn plans on drawn models give the gradients of one process, and do what their schedules say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nestsp.comm.groups import Link
from nestsp.execute.executor import Executor
from nestsp.execute.float64 import all_float64
from nestsp.execute.verify import Gradients, compare_gradients, reference_gradients
from tests.distributed.draws import draw_case, draw_plan
from tests.distributed.equivalence import (
    QWEN3,
    TOLERANCE,
    Case,
    compare_with_one_process,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
)
from tests.distributed.pool import RankPool

WORLDS = (1, 2, 3, 4, 5, 6)


def check_draws(pool: RankPool, num_ranks: int, seeds: range) -> None:
    cases = [draw_case(seed, num_ranks) for seed in seeds]
    outcomes = pool.run(compare_with_one_process, cases, ranks=num_ranks, timeout_s=30.0 + 5.0 * len(cases))[0]
    assert len(outcomes) == len(cases)
    for seed, case, outcome in zip(seeds, cases, outcomes, strict=True):
        assert outcome.verification.passes(TOLERANCE), (num_ranks, seed, case, outcome)
        assert outcome.faults == (), (num_ranks, seed, case, outcome)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_drawn_plans_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int) -> None:
    check_draws(pool, num_ranks, range({1: 4, 2: 8, 3: 8, 4: 12, 5: 5, 6: 8}[num_ranks]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_drawn_plans_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int, block: int) -> None:
    check_draws(pool, num_ranks, range(1000 + 20 * block, 1020 + 20 * block))


# Few models, kept from plan to plan and not sharded: what is drawn are plans, at a tenth of a second each.
HEADS = ((6, 3), (4, 1), (5, 5))


def errors_of_plans(rank: int, num_ranks: int, seeds: Sequence[int]) -> list[tuple[int, float]]:
    """(seed, largest error of loss, norm and gradients) of each plan, on rank 0."""
    links: dict[tuple[int, ...], Mapping[int, Link]] = {}
    executors: dict[tuple[int, int], Executor] = {}
    alone: dict[tuple[int, int], nn.Module] = {}
    found = []
    for seed in seeds:
        random = Random(f"{num_ranks} ranks, plan {seed}")
        heads, plan = random.choice(HEADS), draw_plan(random, num_ranks)
        keys = {**QWEN3, "num_hidden_layers": 2, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        case = Case(keys, plan.to_json(), streaming=random.random() < 0.8)
        if plan.tree.fanouts not in links:
            links[plan.tree.fanouts] = make_tree_links(plan, rank)
        if heads not in executors:
            executors[heads] = make_executor(case, rank, links={}, sharded=False)
            alone[heads] = make_model(keys, "sdpa")
        executor = replace(executors[heads], links=links[plan.tree.fanouts], streaming=case.streaming)
        executor.root.zero_grad(set_to_none=False)
        with all_float64():  # a normalisation's float32 input may round the other way, and then 1e-9 is missed
            total = executor.run(load(executor, plan, make_tokens(plan))).double()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in executor.root.named_parameters()}
        together = torch.cat([total.reshape(1), *(grad.flatten() for grad in grads.values())])
        dist.all_reduce(together)
        if rank == 0:
            parts = together[1:].split([grad.numel() for grad in grads.values()])
            named = {
                name.removeprefix("model."): part.view(grad.shape)
                for (name, grad), part in zip(grads.items(), parts, strict=True)
            }
            alone[heads].zero_grad()
            with all_float64():
                reference = reference_gradients(alone[heads], make_tokens(plan))
            planned = Gradients(float(together[0]), named, {})
            found.append((seed, compare_gradients(planned, reference, sum(n - 1 for n in plan.batch.lengths)).worst))
    return found


def check_plans(pool: RankPool, num_ranks: int, seeds: range) -> None:
    found = pool.run(errors_of_plans, seeds, ranks=num_ranks, timeout_s=60.0 + 2.0 * len(seeds))[0]
    assert [seed for seed, _ in found] == list(seeds)
    assert [(seed, error) for seed, error in found if not error <= TOLERANCE] == []


@pytest.mark.parametrize("num_ranks", WORLDS[1:])
def test_many_drawn_plans_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int) -> None:
    check_plans(pool, num_ranks, range(40))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("num_ranks", WORLDS[1:])
def test_thousands_of_drawn_plans_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int) -> None:
    check_plans(pool, num_ranks, range(1000, 1600))


def test_a_case_is_a_function_of_its_seed() -> None:
    first: list[Case] = [draw_case(seed, 4) for seed in range(5)]
    assert first == [draw_case(seed, 4) for seed in range(5)]
    assert len({str(case) for case in first}) == 5
