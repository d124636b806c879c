from __future__ import annotations

from typing import Any

import pytest

from nestsp.cluster import Cluster, Group, GroupTree
from nestsp.errors import ConfigError


@pytest.mark.parametrize(
    ("hosts", "ranks", "fanouts"),
    [
        (1, 1, ()),
        (1, 4, (2, 2)),
        (1, 7, (7,)),
        (8, 8, (2,) * 6),
        (6, 8, (3, 2, 2, 2, 2)),
        (3, 6, (3, 3, 2)),
    ],
)
def test_the_default_tree_splits_hosts_first_and_then_the_ranks_in_a_host(
    hosts: int, ranks: int, fanouts: tuple[int, ...]
) -> None:
    assert Cluster(hosts, ranks).default_tree().fanouts == fanouts
    assert Cluster(hosts, ranks).tree(None).fanouts == fanouts


def test_given_fanouts_must_multiply_to_the_ranks() -> None:
    assert Cluster(1, 6).tree([2, 3]).fanouts == (2, 3)
    with pytest.raises(ConfigError) as refused:
        Cluster(1, 6).tree([2, 2])
    assert str(refused.value) == (
        "cluster.tree is 2x2, which is 4 ranks, but the run has 6; give fan-outs whose product is 6, leave it out "
        "for 3x2, or set cluster.ranks to the ranks of each host"
    )


@pytest.mark.parametrize("fanouts", [(1,), (2, 0), (2, -2), (2, 2.0), (True,), ("2",)])
def test_a_fanout_that_is_no_whole_number_of_at_least_two_is_refused(fanouts: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=f"splits level {len(fanouts) - 1} into"):
        GroupTree(fanouts)


@pytest.mark.parametrize(
    ("text", "fanouts"), [("1", ()), ("2x2x3", (2, 2, 3)), ("2*3", (2, 3)), ("2·3", (2, 3)), (" 7 ", (7,))]
)
def test_a_tree_is_read_from_a_product(text: str, fanouts: tuple[int, ...]) -> None:
    assert GroupTree.parse(text).fanouts == fanouts


@pytest.mark.parametrize("text", ["", "x", "2x", "2,2", "2x-2", "two", "2x1", "1x2", "0", "2.0"])
def test_a_text_that_is_no_product_of_fanouts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        GroupTree.parse(text)


@pytest.mark.parametrize("cluster", [(0, 4), (4, 0), (-1, 1)])
def test_a_cluster_has_at_least_one_host_and_one_rank(cluster: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="but hosts and ranks of each must be at least 1"):
        Cluster(*cluster)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("999999999x9", "is 999,999,999x9, which is 8,999,999,991 ranks, but at most 1,048,576 are planned for"),
        (f"8x{'9' * 5000}", "but it must be hosts x ranks of each"),
    ],
)
def test_a_cluster_larger_than_any_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Cluster.parse(text)


def test_a_group_knows_its_ranks_and_says_them() -> None:
    group = Group(1, 4, 2)
    assert list(group.ranks) == [4, 5]
    assert [rank in group for rank in (3, 4, 5, 6)] == [False, True, True, False]
    assert str(group) == "ranks 4-5"
    assert str(Group(2, 4, 1)) == "rank 4"


@pytest.mark.parametrize(
    "group", [Group(1, 1, 2), Group(1, 4, 2), Group(1, 0, 4), Group(3, 0, 1), Group(-1, 0, 1), Group(2, -1, 1)]
)
def test_groups_that_a_tree_does_not_have_are_not_in_it(group: Group) -> None:
    assert group not in GroupTree((2, 2))


def test_a_degree_that_no_level_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="is 4, but the tree 3x2 has only degrees 1, 2, 6; take one"):
        GroupTree((3, 2)).level_of_degree(4)


def test_eight_ranks_have_seven_groups_that_communicate() -> None:
    """F8: 7 process groups, not 2^8."""
    tree = GroupTree((2, 2, 2))
    assert sum(group.degree > 1 for level in range(tree.num_levels) for group in tree.groups(level)) == 7
