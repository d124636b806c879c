"""Ranks that are late at random: nothing hangs, nothing changes, and an order by readiness is caught.

Every rank sleeps, by its own dice, before it issues an exchange and before it waits for one. The order in which gloo
sees the groups' exchanges is then another one in every run, as it is on a busy cluster.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nestsp.attention import ring, streaming, ulysses
from nestsp.comm.exchange import Exchange
from nestsp.comm.groups import Link
from nestsp.execute.executor import Executor
from nestsp.plan import Plan
from tests.distributed.draws import draw_plan
from tests.distributed.equivalence import LLAMA, Case, load, make_executor, make_tokens, make_tree_links
from tests.distributed.pool import RankPool, RankTimeout

NUM_RANKS = 6
KEYS = {**LLAMA, "num_hidden_layers": 2, "hidden_size": 12, "head_dim": 4}
SLEEPS_S = (0.0, 0.0, 0.0, 0.001, 0.004)


def plan_of(seed: int) -> Plan:
    return draw_plan(Random(f"stress {seed}"), NUM_RANKS)


@contextmanager
def late(dice: Random) -> Iterator[None]:
    """Sleep before every exchange that is issued, and before every wait."""

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(dice.choice(SLEEPS_S))
            return call(*args)

        return run

    with ExitStack() as stack:
        for place, name in ((ulysses, "start_exchange"), (ring, "start_pass"), (Exchange, "wait")):
            stack.enter_context(patch.object(place, name, slow(getattr(place, name))))
        yield


def outcome(executor: Executor, plan: Plan) -> str:
    """Loss and all gradients of this rank, bit by bit."""
    executor.root.zero_grad()
    digest = hashlib.sha256(executor.run(load(executor, plan, make_tokens(plan))).numpy().tobytes())
    for parameter in executor.root.parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        digest.update(grad.to_local().numpy().tobytes())
    return digest.hexdigest()


def outcomes(rank: int, num_ranks: int, seeds: Sequence[int], dice: int | None) -> list[str]:
    """Run plans; ranks are late if there are dice."""
    links: dict[tuple[int, ...], Mapping[int, Link]] = {}
    executor = make_executor(Case(KEYS, plan_of(seeds[0]).to_json()), rank)
    found = []
    for seed in seeds:
        plan = plan_of(seed)
        fanouts = plan.tree.fanouts
        if fanouts not in links:
            links[fanouts] = make_tree_links(plan, rank)
        mine = replace(executor, links=links[fanouts])
        if dice is None:
            found.append(outcome(mine, plan))
        else:
            with late(Random(f"{dice} {seed} {rank}")):
                found.append(outcome(mine, plan))
    return found


def check(pool: RankPool, seeds: Sequence[int]) -> None:
    used = {
        (p.group.degree > 1, p.ring_degree, p.ring_degree == p.group.degree)
        for seed in seeds
        for _, p in plan_of(seed).placements()
    }
    assert {(False, 1, True), (True, 1, False), (True, 2, True), (True, 2, False)} <= used  # local, Ulysses, ring, both
    punctual, tardy = (
        pool.run(outcomes, seeds, dice, ranks=NUM_RANKS, timeout_s=60.0 + 5.0 * len(seeds)) for dice in (None, 1)
    )
    assert tardy == punctual
    assert len(set(punctual[0])) > 0.9 * len(seeds)  # single tokens have no target, and so no gradient


def test_plans_on_ranks_that_are_late_at_random_give_the_same_bits(pool: RankPool) -> None:
    check(pool, range(16))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_hundred_plans_on_ranks_that_are_late_at_random_give_the_same_bits(pool: RankPool) -> None:
    check(pool, range(200))


class ByReadiness(streaming._Run[Any]):
    """A mutant: each rank takes the groups by its own luck, and waits for what it has issued before it goes on."""

    dice: Random

    def open(self) -> None:
        pass

    def close(self) -> dict[int, Any]:
        left = list(self.turns)
        while left:
            level = self.dice.choice(sorted({turn.level for turn in left}))
            turn = next(turn for turn in left if turn.level == level)
            left.remove(turn)
            self._take(turn)
            if level in self.on_the_wire:
                self.on_the_wire[level].wait()
        return self.done


def outcomes_by_readiness(rank: int, num_ranks: int, seeds: Sequence[int]) -> list[str]:
    mutant = type("Mutant", (ByReadiness,), {"dice": Random(rank)})
    with patch.object(streaming, "_Run", mutant):
        return outcomes(rank, num_ranks, seeds, None)


def num_levels(seed: int) -> int:
    """The most levels that exchange anything in one microbatch."""
    return max(len({p.group.level for p in m.placements if p.group.degree > 1}) for m in plan_of(seed).microbatches)


def test_a_rank_that_issues_and_waits_by_readiness_hangs_and_is_caught(pool: RankPool) -> None:
    """The mutant itself is sound: with one level a plan gives the right bits, so it is the order that hangs."""
    seeds = {number: [seed for seed in range(40) if num_levels(seed) == number][:6] for number in (1, 2)}
    right = pool.run(outcomes, seeds[1], None, ranks=NUM_RANKS)
    assert pool.run(outcomes_by_readiness, seeds[1], ranks=NUM_RANKS) == right
    with pytest.raises(RankTimeout) as hung:
        pool.run(outcomes_by_readiness, seeds[2], ranks=NUM_RANKS, timeout_s=15.0)
    assert any("in wait" in stack and "in close" in stack for stack in hung.value.stacks.values())


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is NaN, whatever its type: every byte is 255."""

    def fill(tensor: Tensor) -> Tensor:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(255)
        return tensor

    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    with (
        patch.object(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs))),
        patch.object(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs))),
        patch.object(Tensor, "new_empty", lambda *args, **kwargs: fill(new_empty(*args, **kwargs))),
    ):
        assert torch.empty(3).isnan().all()
        yield


def outcomes_poisoned(rank: int, num_ranks: int, seeds: Sequence[int]) -> list[str]:
    with poisoned():
        return outcomes(rank, num_ranks, seeds, None)


def test_what_nobody_has_written_is_never_read(pool: RankPool) -> None:
    """There are no pads; buffers, unused rows and the filler token's results are all there is beside the tokens."""
    seeds = range(8)
    right = pool.run(outcomes, seeds, None, ranks=NUM_RANKS, timeout_s=100.0)
    assert pool.run(outcomes_poisoned, seeds, ranks=NUM_RANKS, timeout_s=100.0) == right
