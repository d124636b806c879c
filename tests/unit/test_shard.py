from __future__ import annotations

from dataclasses import replace

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import Plan
from nestsp.shard import Span, rank_spans


def _one_group(fanouts: tuple[int, ...], lengths: list[int]) -> Plan:
    tree = GroupTree(fanouts)
    plan = Plan.of_groups(tree, SequenceBatch.of_lengths(lengths), [{tree.group(0, 0): range(len(lengths))}], "hand")
    plan.check()
    return plan


@pytest.mark.parametrize(
    ("num_ranks", "lengths", "sizes"),
    [
        (2, [7], (3, 4)),  # D1
        (4, [13], (3, 3, 3, 4)),  # D1
        (4, [29], (7, 7, 7, 8)),  # D4, D5
        (2, [4, 8, 6, 10], (14, 14)),  # D3
        (2, [4], (2, 2)),  # D6
        (4, [1], (0, 0, 0, 1)),
    ],
)
def test_lengths_need_not_divide_by_the_ranks(num_ranks: int, lengths: list[int], sizes: tuple[int, ...]) -> None:
    """D1, D3, D4, D5, D6."""
    plan = _one_group((num_ranks,), lengths)
    for rank in range(num_ranks):
        (spans,) = rank_spans(plan, rank)
        assert spans.shards[0].sizes == sizes
        assert spans.num_tokens == sizes[rank]


def test_a_document_over_the_edge_of_ranks_keeps_its_own_token_numbers() -> None:
    """C8: L=[3, 10] on 4 ranks, contiguous."""
    plan = _one_group((4,), [3, 10])
    assert [rank_spans(plan, rank)[0].spans for rank in range(4)] == [
        (Span(0, 0, 3),),
        (Span(1, 0, 3),),
        (Span(1, 3, 6),),
        (Span(1, 6, 10),),
    ]


def test_a_rank_holds_its_parts_of_all_its_groups_root_first() -> None:
    tree = GroupTree((2, 2))
    batch = SequenceBatch.of_lengths([8, 3, 2])
    plan = Plan.of_groups(tree, batch, [{Group(0, 0, 4): [0], Group(1, 2, 2): [1], Group(2, 3, 1): [2]}], "hand")
    (spans,) = rank_spans(plan, 3)
    assert spans.spans == (Span(0, 6, 8), Span(1, 1, 3), Span(2, 0, 2))
    assert [shard.offset for shard in spans.shards] == [0, 2, 4]
    assert [shard.member for shard in spans.shards] == [3, 1, 0]


def test_a_group_that_starts_at_another_rank_counts_members_from_its_own_first() -> None:
    """D14."""
    tree = GroupTree((2, 2))
    plan = Plan.of_groups(tree, SequenceBatch.of_lengths([4]), [{Group(1, 2, 2): [0]}], "hand")
    assert [rank_spans(plan, rank)[0].spans for rank in range(4)] == [(), (), (Span(0, 0, 2),), (Span(0, 2, 4),)]


def test_a_rank_without_tokens_is_there_in_every_microbatch_and_still_works_for_its_group() -> None:
    """F1, B7: no span is empty, the shard without spans stays."""
    plan = _one_group((3,), [1])
    (spans,) = rank_spans(plan, 0)
    assert spans.num_tokens == 0
    assert [(shard.spans, shard.sizes) for shard in spans.shards] == [((), (0, 0, 1))]


def _ring(fanouts: tuple[int, ...], lengths: list[int], ring_degree: int) -> Plan:
    plan = _one_group(fanouts, lengths)
    (microbatch,) = plan.microbatches
    placements = tuple(replace(p, ring_degree=ring_degree) for p in microbatch.placements)
    return replace(plan, microbatches=(replace(microbatch, placements=placements),))


def test_a_ring_deals_each_sequence_in_zigzag() -> None:
    """C3: each rank's two chunks are spans of their own; the two middle ones touch and are one."""
    plan = _ring((2,), [8], 2)
    assert [rank_spans(plan, rank)[0].spans for rank in range(2)] == [
        (Span(0, 0, 2), Span(0, 6, 8)),
        (Span(0, 2, 6),),
    ]


def test_a_ring_takes_lengths_that_do_not_divide() -> None:
    """D4: 29 tokens on 4 ranks, chunks of 3 and 4."""
    plan = _ring((4,), [29], 4)
    spans = [rank_spans(plan, rank)[0] for rank in range(4)]
    assert spans[0].shards[0].sizes == (7, 7, 7, 8)
    assert spans[0].spans == (Span(0, 0, 4), Span(0, 26, 29))
    assert spans[3].spans == (Span(0, 12, 20),)
    assert [s.num_tokens for s in spans] == [7, 7, 7, 8]


def test_in_a_hybrid_each_ring_members_stream_is_cut_over_its_ranks() -> None:
    plan = _ring((2, 2), [16, 3], 2)
    assert [rank_spans(plan, rank)[0].spans for rank in range(4)] == [
        (Span(0, 0, 4),),
        (Span(0, 12, 16), Span(1, 0, 1)),
        (Span(0, 4, 9),),
        (Span(0, 9, 12), Span(1, 1, 3)),
    ]
