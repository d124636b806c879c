"""Drawn plans on drawn models give the gradients of one process, and do what their schedules say."""

from __future__ import annotations

import pytest

from tests.distributed.draws import draw_case
from tests.distributed.equivalence import TOLERANCE, Case, compare_with_one_process
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


def test_a_case_is_a_function_of_its_seed() -> None:
    first: list[Case] = [draw_case(seed, 4) for seed in range(5)]
    assert first == [draw_case(seed, 4) for seed in range(5)]
    assert len({str(case) for case in first}) == 5
