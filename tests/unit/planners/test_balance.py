from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import Plan
from nestsp.planners.balance import balance
from nestsp.planners.ground import cost_ground

COST: CostModel = make_cost_model(known_model("llama-3.1-8b"), Cluster(2, 4), load_profile("h100"))
GROUND = cost_ground(COST)
BATCH = SequenceBatch.of_lengths([30_000, *[1_000 + 10 * i for i in range(40)]])


def lopsided() -> Plan:
    """The long sequence on the first host, all short ones on two ranks of it."""
    tree = COST.tree
    groups = {tree.group(1, 0): [0], tree.group(3, 0): list(range(1, 21)), tree.group(3, 1): list(range(21, 41))}
    return Plan.of_groups(tree, BATCH, [groups], "test")


def test_short_sequences_go_where_work_ends_first_and_long_ones_stay() -> None:
    plan = GROUND.finish(lopsided())
    before = GROUND.evaluate(plan)
    dealt = balance(plan, before.own_s, GROUND)
    assert dealt is not None
    dealt.check()
    after = GROUND.evaluate(GROUND.finish(dealt))
    assert after.makespan_s < before.makespan_s
    assert after.own_s.max() < 0.7 * before.own_s.max()
    assert dealt.microbatches[0].placements[0] == lopsided().microbatches[0].placements[0]


def test_a_plan_in_balance_is_not_made_slower_by_much() -> None:
    plan = GROUND.finish(lopsided())
    for _ in range(3):
        dealt = balance(plan, GROUND.evaluate(plan).own_s, GROUND)
        assert dealt is not None
        plan = GROUND.finish(dealt)
    loads = GROUND.evaluate(plan).own_s[0]
    longest = GROUND.guesses[0].seconds(np.array([1_390.0]))[-1, 0]
    assert loads.max() - np.sort(loads)[0] <= longest * 1.1  # no further apart than one short sequence


def test_no_room_is_no_plan() -> None:
    plan = GROUND.finish(lopsided())
    full = dataclasses.replace(GROUND, free_bytes=float(GROUND.bytes(np.array([5_000.0]))[-1, 0]))
    assert balance(plan, GROUND.evaluate(plan).own_s, full) is None


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_every_sequence_stays_in_its_microbatch(num_microbatches: int) -> None:
    tree = COST.tree
    parts = [list(range(1 + i, 41, num_microbatches)) for i in range(num_microbatches)]
    groups = [{tree.group(3, 2): part} for part in parts]
    groups[0][tree.group(0, 0)] = [0]
    plan = GROUND.finish(Plan.of_groups(tree, BATCH, groups, "test"))
    dealt = balance(plan, GROUND.evaluate(plan).own_s, GROUND)
    assert dealt is not None
    for number, part in enumerate(parts):
        placed = {s for placement in dealt.microbatches[number].placements for s in placement.sequences}
        assert placed == set(part) | ({0} if number == 0 else set())
