"""Ranks that act together: what one refuses, all refuse, in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nestsp import errors
from nestsp.cluster import Cluster
from nestsp.errors import ConfigError, DataError, NestspError
from nestsp.train.console import Screen
from nestsp.train.trainer import prepare_with_progress
from nestsp.train.world import World
from tests.distributed.pool import RankPool
from tests.distributed.test_trainer import working_in
from tests.e2e.runs import tiny, write_corpus


def world_of(rank: int, num_ranks: int) -> World:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return World(rank, rank, Cluster(1, num_ranks), torch.device("cpu"), "gloo", dist.group.WORLD)


def outcome(action: Callable[[], object]) -> tuple[str, str, bool] | object:
    try:
        return action()
    except NestspError as error:
        return type(error).__name__, str(error), error.raised_on_all_ranks


def refuse(rank: int, refusing: tuple[int, ...], alike: bool) -> int:
    if rank in refusing:
        raise DataError("no" if alike else f"no {rank}")
    return rank * 10


def try_each(rank: int, num_ranks: int, way: str, refusing: tuple[int, ...], alike: bool) -> object:
    world = world_of(rank, num_ranks)
    act = {"agree": world.agree, "together": world.together, "first": world.first}[way]
    first = outcome(lambda: act(lambda: refuse(rank, refusing, alike)))
    return first, world.gather(rank)  # and the group is as good as before


@pytest.mark.parametrize(
    ("way", "results"),
    [("agree", [[0, 10, 20]] * 3), ("together", [0, 10, 20]), ("first", [0, 0, 0])],
)
def test_without_a_refusal_each_rank_has_its_result(pool: RankPool, way: str, results: list[object]) -> None:
    assert pool.run(try_each, way, (), True, ranks=3) == [(result, [0, 1, 2]) for result in results]


@pytest.mark.parametrize("way", ["agree", "together"])
@pytest.mark.parametrize(
    ("refusing", "alike", "sentence"),
    [((2,), True, "rank 2: no"), ((1, 2), False, "rank 1: no 1"), ((0, 1, 2), False, "rank 0: no 0"),
     ((0, 1, 2), True, "no")],
)  # fmt: skip
def test_a_refusal_of_some_ranks_is_the_refusal_of_all(
    pool: RankPool, way: str, refusing: tuple[int, ...], alike: bool, sentence: str
) -> None:
    expected = (("DataError", sentence, True), [0, 1, 2])
    assert pool.run(try_each, way, refusing, alike, ranks=3) == [expected] * 3


def test_what_rank_0_refuses_alone_is_refused_by_all_without_its_number(pool: RankPool) -> None:
    assert pool.run(try_each, "first", (0, 1), True, ranks=3) == [(("DataError", "no", True), [0, 1, 2])] * 3


def test_what_others_would_refuse_is_not_asked_of_them(pool: RankPool) -> None:
    assert pool.run(try_each, "first", (1, 2), True, ranks=3) == [(0, [0, 1, 2])] * 3


def share_a_value(rank: int, num_ranks: int) -> object:
    return world_of(rank, num_ranks).share({"rank": 0} if rank == 0 else None)


def test_a_shared_value_is_rank_0s(pool: RankPool) -> None:
    assert pool.run(share_a_value, ranks=3) == [{"rank": 0}] * 3


def raise_each_kind(rank: int, num_ranks: int) -> list[object]:
    world = world_of(rank, num_ranks)

    def raise_it(name: str) -> None:
        if rank == 1:
            raise getattr(errors, name)("no")

    kinds = [name for name in errors.__all__ if name not in ("NestspError", "did_you_mean")]
    return [outcome(lambda name=name: world.agree(lambda: raise_it(name))) for name in kinds]  # type: ignore[misc]


def test_every_kind_of_error_stays_what_it_is_on_its_way(pool: RankPool) -> None:
    kinds = [name for name in errors.__all__ if name not in ("NestspError", "did_you_mean")]
    assert ConfigError.__name__ in kinds
    assert pool.run(raise_each_kind, ranks=2) == [[(name, "rank 1: no", True) for name in kinds]] * 2


def prepare_slowly(rank: int, num_ranks: int, refusing: tuple[int, ...]) -> tuple[object, bool]:
    """Rank 1's work takes longer than a collective may."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    assert isinstance(control, dist.ProcessGroup)
    world = World(rank, rank, Cluster(1, num_ranks), torch.device("cpu"), "gloo", control)
    told: list[tuple[int, int]] = []

    def work() -> int:
        if rank == 1:
            time.sleep(3.0)
        return refuse(rank, refusing, True)

    return outcome(lambda: world.prepare_together("data", work, lambda *state: told.append(state))), bool(told)


def test_preparation_may_take_longer_than_a_collective_may(pool: RankPool) -> None:
    results = pool.run(prepare_slowly, (), ranks=3)
    assert results == [(0, True), (10, False), (20, True)]


def test_a_refusal_after_long_preparation_is_that_of_all(pool: RankPool) -> None:
    results = pool.run(prepare_slowly, (1,), ranks=3)
    assert [result for result, _ in results] == [("DataError", "rank 1: no", True)] * 3


def prepare_elsewhere(rank: int, num_ranks: int, folders: tuple[str, ...]) -> object:
    with working_in(Path(folders[rank])):
        config = tiny("planner.max_tokens_per_rank=150")
        return outcome(lambda: prepare_with_progress(config, world_of(rank, num_ranks), Screen(silent=True)).num_steps)


def test_hosts_whose_data_differ_are_refused(pool: RankPool, tmp_path: Path) -> None:
    """Each has its own file system, and one of them another corpus of the same lengths."""
    folders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus.jsonl", seed=seed)
        folders.append(str(tmp_path / name))
    assert pool.run(prepare_elsewhere, (folders[0], folders[1]), ranks=2) == [9, 9]
    sentence = (
        "the ranks read different samples from corpus.jsonl, but all must read the same; copy the same files and "
        "tokenizer to every host"
    )
    assert pool.run(prepare_elsewhere, tuple(folders), ranks=3) == [("DataError", sentence, True)] * 3
