from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.errors import InfeasibleError, PlanError
from nestsp.plan import GatherTurns, Microbatch, Placement, Plan

TREE = GroupTree((2, 2))
BATCH = SequenceBatch((10, 11, 12, 13), (9, 4, 3, 2))
ROOT, LEFT, RIGHT, RANK_0 = Group(0, 0, 4), Group(1, 0, 2), Group(1, 2, 2), Group(2, 0, 1)
PLAN = Plan.of_groups(TREE, BATCH, [{LEFT: [1], ROOT: [0], RANK_0: []}, {RIGHT: [2, 3]}], "hand")


def _with(*placements: Placement) -> Plan:
    return replace(PLAN, microbatches=(Microbatch(placements), PLAN.microbatches[1]))


def test_of_groups_orders_groups_and_leaves_out_empty_ones() -> None:
    assert [p.group for p in PLAN.microbatches[0].placements] == [ROOT, LEFT]
    PLAN.check()


def test_a_rank_works_for_all_groups_that_hold_it_root_first() -> None:
    assert [p.group for p in PLAN.microbatches[0].on_rank(1)] == [ROOT, LEFT]
    assert [p.group for p in PLAN.microbatches[0].on_rank(2)] == [ROOT]
    assert PLAN.microbatches[1].on_rank(0) == ()


def test_counts_follow_from_the_placements() -> None:
    assert PLAN.rank_tokens(0) == [4, 4, 2, 3]
    assert PLAN.rank_tokens(1) == [0, 0, 2, 3]
    assert PLAN.max_rank_tokens == 4
    assert PLAN.num_sequences_by_degree() == {2: 3, 4: 1}
    assert [PLAN.group_tokens(p) for _, p in PLAN.placements()] == [9, 4, 5]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (_with(Placement(ROOT, (0,))), "sequence 11 is placed 0 times, but every sequence must be placed once"),
        (_with(Placement(ROOT, (0, 1)), Placement(LEFT, (1,))), "sequence 11 is placed 2 times"),
        (_with(Placement(ROOT, (0, 1, 0))), "sequence 10 is placed 2 times"),
        (_with(Placement(ROOT, (0, 1, 2))), "sequence 12 is placed 2 times"),  # here and in the other microbatch
        (_with(Placement(ROOT, (0, 4))), "names sequence position 4, but the batch has 4 sequences"),
        (_with(Placement(ROOT, (0, -1))), "names sequence position -1, but the batch has 4 sequences"),
        (_with(Placement(LEFT, (1,)), Placement(ROOT, (0,))), "each may be there once, in order"),
        (_with(Placement(ROOT, (0,)), Placement(ROOT, (1,))), "each may be there once, in order"),
        (_with(Placement(Group(1, 1, 2), (0, 1))), "microbatch 1, ranks 1-2 is no group of the tree 2x2"),
        (_with(Placement(ROOT, (0, 1)), Placement(LEFT, ())), "has no sequence, but an empty group must be left out"),
        (_with(Placement(ROOT, (0, 1), 3)), "has ring degree 3, but it must divide the group's 4 ranks"),
        (_with(Placement(ROOT, (0, 1), 0)), "has ring degree 0"),
        (_with(Placement(ROOT, (0, 1), 1, "all")), "keeps 'all', but it must be 'none' or 'output'"),  # type: ignore[arg-type]
        (_with(Placement(ROOT, (0, 1), 2, "none", 2)), "has 2 slices at ring degree 2, but only a Ulysses group of se"),
        (
            _with(Placement(ROOT, (0,)), Placement(RANK_0, (1,), num_slices=2)),
            "has 2 slices at ring degree 1, but only",
        ),
        (_with(Placement(ROOT, (0, 1), num_slices=0)), "has 0 slices"),
        (replace(PLAN, microbatches=(Microbatch((), -1),)), "keeps -1 layers, but it must be 0 or more"),
        (replace(PLAN, level_order=(0, 1)), "but it must hold each of the tree's 3 levels once"),
        (replace(PLAN, level_order=(0, 1, 1)), "but it must hold each of the tree's 3 levels once"),
        (replace(PLAN, gathers=GatherTurns(1, -1, 2)), "before turns 1 and -1 of 2 levels, but turns are counted from"),
        (replace(PLAN, gathers=GatherTurns(1, 1, 4)), "before turns 1 and 1 of 4 levels, .* the tree has 3 levels"),
    ],
)
def test_check_refuses_a_plan_that_breaks_a_rule(plan: Plan, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan.check()


def test_slices_are_part_of_the_plan_and_plans_without_them_are_read_and_named_as_before() -> None:
    sliced = _with(Placement(ROOT, (0,), num_slices=3), Placement(LEFT, (1,)))
    assert Plan.from_json(sliced.to_json()) == sliced
    assert sliced.digest != PLAN.digest
    assert "num_slices" not in str(PLAN.to_json())


def test_gathers_are_part_of_the_plan_and_plans_without_them_are_read_and_named_as_before() -> None:
    gathered = replace(PLAN, gathers=GatherTurns(1, 3, 2))
    assert Plan.from_json(gathered.to_json()) == gathered
    assert gathered.digest != PLAN.digest
    assert "gathers" not in PLAN.to_json()
    for wrong in ([1, 3, 2], {"forward": 1.0}, {"forth": 1}):
        with pytest.raises(PlanError, match=r"^the data are no plan"):
            Plan.from_json({**PLAN.to_json(), "gathers": wrong})


def test_check_accepts_ring_and_hybrid_degrees_that_divide_the_group() -> None:
    for ring_degree in (1, 2, 4):
        _with(Placement(ROOT, (0, 1), ring_degree)).check()


def test_the_cap_is_kept_to_the_token() -> None:
    """G15: the cap counts a rank's tokens of one microbatch, over all its groups."""
    PLAN.check(max_tokens_per_rank=4)
    with pytest.raises(InfeasibleError) as refused:
        PLAN.check(max_tokens_per_rank=3)
    assert str(refused.value) == (
        "rank 0 would hold 4 tokens in microbatch 1, but the cap is 3; plan the batch again under that cap"
    )


def test_the_digest_is_pinned() -> None:
    """A change of format must be deliberate: ranks of two versions must not take each other for equal."""
    assert PLAN.digest == "905fb9def703464827a1e6d4335500bc676d5a1dfa6e55c29f7dcc10eb1d9c8b"


def test_a_plan_of_another_format_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has format 2, but this version reads format 1"):
        Plan.from_json({**PLAN.to_json(), "format": 2})


@pytest.mark.parametrize("as_written", [float, str, bool])
def test_a_number_that_is_not_written_as_a_whole_one_is_refused_wherever_it_stands(
    as_written: Callable[[int], object],
) -> None:
    """JSON's 1.0 and true equal 1, so they would pass every later check, and change the digest."""

    def altered(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {key: altered(item, number) for key, item in value.items()}
        if isinstance(value, list):
            return [altered(item, number) for item in value]
        if type(value) is int:
            places.append(value)
            return as_written(value) if len(places) == number else value
        return value

    places: list[int] = []
    altered(PLAN.to_json(), 0)
    for number, value in enumerate(tuple(places), 1):
        if as_written is bool and value not in (0, 1):
            continue
        places.clear()
        with pytest.raises(PlanError, match=r"^the data are no plan: TypeError .* is no whole number$"):
            Plan.from_json(altered(PLAN.to_json(), number))


def test_from_json_checks_what_it_reads() -> None:
    data = PLAN.to_json()
    data["microbatches"].pop()
    with pytest.raises(PlanError, match="sequence 12 is placed 0 times"):
        Plan.from_json(data)


@pytest.mark.parametrize(("key", "value"), [("tree", [1]), ("lengths", [0, 4, 3, 2]), ("ids", [1, 1, 2, 3])])
def test_numbers_that_make_no_batch_or_tree_are_a_plan_error(key: str, value: list[int]) -> None:
    with pytest.raises(PlanError, match=r"^the data are no plan: "):
        Plan.from_json({**PLAN.to_json(), key: value})


def test_the_drawing_shows_every_used_group_under_its_parents() -> None:
    assert PLAN.format_tree().splitlines() == [
        "microbatch 1 of 2",
        "ranks 0-3  1 sequence, 9 tokens: 9",
        "└─ ranks 0-1  1 sequence, 4 tokens: 4",
        "microbatch 2 of 2",
        "ranks 0-3",
        "└─ ranks 2-3  2 sequences, 5 tokens: 3 2",
    ]


def test_the_drawing_shortens_long_lists_and_draws_branches() -> None:
    batch = SequenceBatch.of_lengths([1200, *range(1, 8)])
    plan = Plan.of_groups(TREE, batch, [{RANK_0: range(1, 8), Group(2, 3, 1): [0]}], "hand")
    assert plan.format_tree().splitlines()[1:] == [
        "ranks 0-3",
        "├─ ranks 0-1",
        "│  └─ rank 0  7 sequences, 28 tokens: 7 6 5 4 3 2 ...",
        "└─ ranks 2-3",
        "   └─ rank 3  1 sequence, 1,200 tokens: 1,200",
    ]
