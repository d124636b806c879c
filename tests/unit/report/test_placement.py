from __future__ import annotations

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.plan import Plan
from nestsp.report.placement import degree_table, placement_tree

TREE = GroupTree((2, 2, 2))


def test_one_of_a_thing_is_no_plural() -> None:
    batch = SequenceBatch.of_lengths([1, 1, 1, 1, 1, 2])
    group = TREE.group
    plan = Plan.of_groups(
        TREE, batch, [{group(3, 0): [0], group(3, 1): [1]}, {group(3, 0): [2, 3], group(3, 1): [4, 5]}], "test"
    )
    assert [line.strip() for line in placement_tree(plan).splitlines()] == [
        "microbatch 1 of 2",
        "ranks 0-1, each alone: 1 sequence of 1 token each",
        "microbatch 2 of 2",
        "ranks 0-1, each alone: 2 sequences, 2-3 tokens each, longest 1-2",
    ]


def test_groups_stand_below_the_nearest_one_around_them_and_like_neighbours_share_a_line() -> None:
    batch = SequenceBatch.of_lengths([9000, 400, 300, 50, 60, 70, 80, 90])
    group = TREE.group
    plan = Plan.of_groups(
        TREE,
        batch,
        [
            {
                group(0, 0): [0],
                group(2, 0): [1],
                group(2, 2): [2],
                group(3, 0): [3],
                group(3, 1): [4],
                group(3, 5): [5, 6],
            },
            {group(3, 7): [7]},
        ],
        "test",
    )
    assert placement_tree(plan).splitlines() == [
        "microbatch 1 of 2",
        "  ranks 0-7: 1 sequence of 9,000 tokens",
        "    ranks 0-1: 1 sequence of 400 tokens",
        "      ranks 0-1, each alone: 1 sequence of 50-60 tokens each",
        "    ranks 2-3: 1 sequence of 300 tokens",
        "    rank 5: 2 sequences, 150 tokens, longest 80",
        "microbatch 2 of 2",
        "  rank 7: 1 sequence of 90 tokens",
    ]


def test_groups_of_one_degree_side_by_side_share_a_line() -> None:
    batch = SequenceBatch.of_lengths([10, 20, 30, 40])
    plan = Plan.of_groups(TREE, batch, [{TREE.group(2, 2 * i): [i] for i in range(4)}], "test")
    assert placement_tree(plan).splitlines()[1:] == ["  ranks 0-7, 4 groups of 2: 1 sequence of 10-40 tokens each"]


def test_a_long_drawing_is_cut_and_says_how_much_is_left() -> None:
    batch = SequenceBatch.of_lengths([1] * 6)
    plan = Plan.of_groups(TREE, batch, [{TREE.group(0, 0): [i]} for i in range(6)], "test")
    assert placement_tree(plan, max_lines=4).splitlines()[4:] == ["... 8 more lines; --json has the whole plan"]


def test_the_table_counts_each_sequence_once() -> None:
    batch = SequenceBatch.of_lengths([600, 300, 100])
    plan = Plan.of_groups(TREE, batch, [{TREE.group(0, 0): [0], TREE.group(3, 3): [1, 2]}], "test", keep="output")
    assert [line.split() for line in degree_table(plan).splitlines()[1:]] == [
        ["8", "1", "1", "600", "600", "60.0%", "1", "sequence"],
        ["1", "1", "2", "300", "400", "40.0%", "2", "sequences"],
    ]
