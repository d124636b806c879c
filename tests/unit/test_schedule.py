from __future__ import annotations

from dataclasses import replace

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import GatherTurns, Keep, Microbatch, Placement, Plan
from nestsp.schedule import Pass, Turn, make_schedule, num_exchanges

TREE = GroupTree((2, 2))
GROUPS = (Group(0, 0, 4), Group(1, 0, 2), Group(2, 0, 1))
PLAN = Plan.of_groups(
    TREE, SequenceBatch.of_lengths([8, 4, 2]), [{group: [i] for i, group in enumerate(GROUPS)}], "hand"
)


def _kept(keep: Keep) -> Plan:
    return replace(PLAN, microbatches=(Microbatch(tuple(Placement(g, (i,), keep=keep) for i, g in enumerate(GROUPS))),))


def test_exchanges_of_all_groups_start_before_the_local_attention_that_fills_the_gap() -> None:
    assert make_schedule(PLAN).turns(0, 0, Pass.FORWARD) == (
        Turn(0, 0, True),
        Turn(1, 0, True),
        Turn(2, 0, False),
        Turn(0, 1, False),
        Turn(1, 1, False),
        Turn(0, 2, False),
        Turn(1, 2, False),
    )


def test_the_level_order_decides_between_turns_of_equal_number_only() -> None:
    turns = make_schedule(replace(PLAN, level_order=(1, 2, 0))).turns(0, 0, Pass.BACKWARD)
    assert [(t.level, t.number) for t in turns] == [(1, 0), (0, 0), (2, 0), (1, 1), (0, 1), (1, 2), (0, 2)]


def test_a_group_that_a_rank_lacks_moves_no_other_groups_place() -> None:
    full = make_schedule(PLAN).turns(0, 0, Pass.FORWARD)
    for rank, levels in ((1, {0, 1}), (2, {0})):
        assert make_schedule(PLAN).turns(0, rank, Pass.FORWARD) == tuple(t for t in full if t.level in levels)


@pytest.mark.parametrize("which", list(Pass))
def test_a_kept_output_needs_no_exchange_in_the_recompute_only(which: Pass) -> None:
    kept = _kept("output")
    exchanges = [num_exchanges(p, which) for p in kept.microbatches[0].placements]
    assert exchanges == ([0, 0, 0] if which is Pass.RECOMPUTE else [2, 2, 0])
    turns = make_schedule(kept).turns(0, 0, which)
    assert any(turn.opens for turn in turns) == (which is not Pass.RECOMPUTE)


def test_nothing_kept_repeats_the_forward_turns_in_the_recompute() -> None:
    """G35: a recompute repeats the same collectives in the same order."""
    schedule = make_schedule(PLAN)
    assert schedule.turns(0, 0, Pass.RECOMPUTE) == schedule.turns(0, 0, Pass.FORWARD)


def test_a_rank_without_groups_has_no_turns() -> None:
    """F1."""
    plan = Plan.of_groups(TREE, SequenceBatch.of_lengths([4]), [{Group(1, 0, 2): [0]}], "hand")
    assert make_schedule(plan).turns(0, 3, Pass.FORWARD) == ()


def test_one_rank_alone_exchanges_nothing() -> None:
    tree = GroupTree(())
    plan = Plan.of_groups(tree, SequenceBatch.of_lengths([4]), [{tree.group(0, 0): [0]}], "hand")
    assert make_schedule(plan).turns(0, 0, Pass.FORWARD) == (Turn(0, 0, False),)


@pytest.mark.parametrize(
    ("ring_degree", "counts"),
    [
        (1, (2, 2, 2)),
        (2, (3, 3, 4)),  # in, 1 pass, out; backward in, keys, gradients home, out
        (3, (4, 4, 6)),
        (6, (5, 5, 7)),  # keys to 5 others; backward their gradients from the third pass on, and home
    ],
)
def test_a_ring_passes_keys_round_and_their_gradients_one_pass_behind(
    ring_degree: int, counts: tuple[int, ...]
) -> None:
    for keep in ("none", "output"):
        placement = Placement(Group(0, 0, 6), (0,), ring_degree, "output" if keep == "output" else "none")
        found = [num_exchanges(placement, which) for which in (Pass.FORWARD, Pass.RECOMPUTE, Pass.BACKWARD)]
        assert found == [counts[0], counts[1] if keep == "none" else 0, counts[2]]


@pytest.mark.parametrize(
    ("gathers", "counts"),
    [
        (GatherTurns(0, 0, 3), (0, 0, 0)),  # where the layer begins
        (GatherTurns(1, 1, 3), (2, 2, 1)),  # after the first exchanges, before what is computed alone
        (GatherTurns(2, 2, 3), (5, 4, 2)),
        (GatherTurns(9, 9, 3), (5, 4, 2)),  # there are no more exchanges
        (GatherTurns(9, 9, 1), (4, 3, 2)),  # after those of the root
        (GatherTurns(9, 9, 0), (0, 0, 0)),
    ],
)
def test_a_gather_follows_the_exchanges_before_its_place(gathers: GatherTurns, counts: tuple[int, ...]) -> None:
    plan = replace(PLAN, gathers=gathers)
    for which in (Pass.FORWARD, Pass.BACKWARD):
        found = tuple(make_schedule(plan).turns_before_gather(0, rank, which) for rank in range(3))
        assert found == counts
        unhidden = make_schedule(plan, streaming=False)
        assert not any(unhidden.turns_before_gather(0, rank, which) for rank in range(4))


def test_a_gather_has_a_place_of_its_own_in_each_pass() -> None:
    schedule = make_schedule(replace(PLAN, gathers=GatherTurns(0, 1, 3)))
    assert schedule.turns_before_gather(0, 0, Pass.FORWARD) == 0
    assert schedule.turns_before_gather(0, 0, Pass.BACKWARD) == 2


def test_a_rank_without_groups_gathers_where_the_layer_begins() -> None:
    """F1."""
    plan = Plan.of_groups(TREE, SequenceBatch.of_lengths([4]), [{Group(1, 0, 2): [0]}], "hand")
    schedule = make_schedule(replace(plan, gathers=GatherTurns(1, 1, 2)))
    assert [schedule.turns_before_gather(0, rank, Pass.FORWARD) for rank in range(4)] == [1, 1, 0, 0]
