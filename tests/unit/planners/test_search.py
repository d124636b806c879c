"""The parts of the nested search: packing within targets, floors, and what it makes of FlexSP's own batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning import flexsp_model
from benchmarks.planning.flexsp_model import GPT_7B, communication_free_bound_s, flexsp_ground, streamed_time_s
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups
from nestsp.planners.ground import Ground, cost_ground
from nestsp.planners.levels import pack_within
from nestsp.planners.search import NestedGroups

TREE = GroupTree((2, 2))
BATCHES = Path(flexsp_model.__file__).with_name("flexsp_batches.json")


def prices(lengths: list[float]) -> tuple[list[list[float]], list[list[float]]]:
    """A second a token, shared by the ranks of a group, and as many bytes."""
    per_level = [[length / TREE.degree(level) for length in lengths] for level in range(TREE.num_levels)]
    return per_level, per_level


def test_what_fits_into_no_rest_is_split_over_the_gaps() -> None:
    # four ranks of 10 are full with 8 each; the last 8 fill what is left only if all share it
    seconds, sizes = prices([8.0] * 5)
    packing = pack_within(TREE, [10.0], range(5), seconds, sizes, 100.0)
    assert packing is not None
    assert sorted(packing.levels) == [0, 2, 2, 2, 2]
    assert packing.loads_s.tolist() == [[10.0] * 4]


def test_targets_that_cannot_be_kept_give_nothing() -> None:
    seconds, sizes = prices([8.0] * 5)
    assert pack_within(TREE, [9.9], range(5), seconds, sizes, 100.0) is None
    assert pack_within(TREE, [10.0], range(5), seconds, sizes, 9.0) is None


def test_a_sequence_keeps_off_levels_that_are_closed_to_it() -> None:
    seconds, sizes = prices([12.0, 2.0])
    sizes[0] = [np.inf, np.inf]
    packing = pack_within(TREE, [7.0], range(2), seconds, sizes, 100.0)
    assert packing is not None
    assert packing.levels == [1, 2]


@pytest.mark.parametrize("preset", ["h100", "a100-80g"])
def test_a_floor_is_below_what_the_plan_takes(preset: str) -> None:
    cost = make_cost_model(known_model("llama-3.1-8b"), Cluster(2, 8), load_profile(preset))
    ground = cost_ground(cost)
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = SequenceBatch.of_lengths(np.minimum(rng.pareto(1.0, 60) * 1_000 + 1, 90_000).astype(int).tolist())
        lengths = np.array(batch.lengths, float)
        for planner in (BatchAdaptive(ground), BaspGroups(ground), DisjointGroups(ground)):
            for candidate in planner.candidates(batch):
                plan = ground.finish(candidate.packing.plan(batch, "test"))
                assert ground.floor_s(candidate.packing, lengths) <= ground.evaluate(plan).makespan_s


@pytest.mark.parametrize("preset", ["h100", "a100-80g"])
def test_nothing_is_passed_over_that_is_faster(preset: str) -> None:
    """Planners that people compare with are tried below what is known; that must not hide a faster plan."""
    cost = make_cost_model(known_model("llama-3.1-8b"), Cluster(2, 8), load_profile(preset))
    ground = cost_ground(cost)
    rng = np.random.default_rng(1)
    passed_over = 0
    for _ in range(3):
        batch = SequenceBatch.of_lengths(np.minimum(rng.pareto(1.0, 80) * 1_000 + 1, 90_000).astype(int).tolist())
        for planner in (BatchAdaptive(ground), BaspGroups(ground), DisjointGroups(ground)):
            every = planner.candidates(batch)
            verdicts = [ground.evaluate(ground.finish(c.packing.plan(batch, "test"))).makespan_s for c in every]
            below_s = min(verdicts)
            kept = planner.candidates(batch, below_s * 1.0001)
            places = [candidate.packing.places for candidate in kept]
            assert every[verdicts.index(below_s)].packing.places in places
            passed_over += len(every) - len(kept)
    assert passed_over > 0


def test_on_flexsps_ground_nesting_is_within_a_tenth_of_the_bound_and_faster_than_their_solver() -> None:
    data = json.loads(BATCHES.read_text())
    ground: Ground = flexsp_ground(GPT_7B)
    over, theirs = [], data["reference_ms"]["flexsp solver"]
    for lengths, their_ms in zip(data["batches"], theirs, strict=True):
        batch = SequenceBatch.of_lengths(lengths)
        judged = NestedGroups(ground).judge(batch)
        assert judged.makespan_s < their_ms / 1e3
        assert streamed_time_s(GPT_7B, judged.plan) < judged.makespan_s * 1.002  # waits for late peers counted
        over.append(judged.makespan_s / communication_free_bound_s(GPT_7B, batch))
    assert sum(over) / len(over) < 1.10
