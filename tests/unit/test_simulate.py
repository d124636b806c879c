from __future__ import annotations

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.cost.work import Work, sequence_work
from nestsp.plan import Microbatch, Placement, Plan
from nestsp.shape import ModelShape
from nestsp.simulate import imbalance, plan_work

SHAPE = ModelShape("llama", 2, 64, 6, 2, 16, 128, 100)


def test_a_member_works_for_its_tokens_and_for_its_heads() -> None:
    """G18; 6 heads on 4 ranks are 1, 2, 1, 2 of them."""
    tree = GroupTree((4,))
    plan = Plan.of_groups(
        tree, SequenceBatch.of_lengths([8, 5]), [{tree.group(0, 0): [0], Group(1, 3, 1): [1]}], "hand"
    )
    whole, alone = sequence_work(SHAPE, 8), sequence_work(SHAPE, 5)
    (ranks,) = plan_work(plan, SHAPE)
    assert [rank.linear for rank in ranks] == [whole.linear / 4] * 3 + [whole.linear / 4 + alone.linear]
    assert [rank.attention for rank in ranks] == pytest.approx(
        [whole.attention / 6, whole.attention / 3, whole.attention / 6, whole.attention / 3 + alone.attention]
    )


def test_members_of_a_ring_work_equally_and_in_a_hybrid_by_their_heads_inside() -> None:
    tree = GroupTree((4,))
    for ring_degree, shares in ((4, [1 / 4] * 4), (2, [1 / 4] * 4), (1, [1 / 6, 1 / 3, 1 / 6, 1 / 3])):
        placement = Placement(tree.group(0, 0), (0,), ring_degree)
        plan = Plan(tree, SequenceBatch.of_lengths([8]), (Microbatch((placement,)),), (0, 1), "hand")
        (ranks,) = plan_work(plan, SHAPE)
        whole = sequence_work(SHAPE, 8).attention
        assert [rank.attention for rank in ranks] == pytest.approx([whole * share for share in shares])


def test_imbalance_is_the_slowest_rank_of_each_microbatch_over_the_mean() -> None:
    work = ((Work(10, 1), Work(2, 4)), (Work(1, 1), Work(5, 0)))
    assert imbalance(work) == pytest.approx((11 + 5) / (17 / 2 + 7 / 2) - 1)


def test_no_work_is_balanced() -> None:
    assert imbalance(((Work(0, 0), Work(0, 0)),)) == 0
