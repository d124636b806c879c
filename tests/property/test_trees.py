"""Trees of any fan-outs, and how whole tokens and heads are dealt."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nestsp.cluster import Cluster, GroupTree, prime_factors, share, share_sizes
from nestsp.shape import head_shares
from tests.property.strategies import head_counts, trees


@given(trees(512))
def test_every_level_splits_every_group_into_equal_adjacent_children(tree: GroupTree) -> None:
    assert [g.ranks for g in tree.groups(0)] == [range(tree.num_ranks)]
    for level in range(tree.num_levels):
        groups = tree.groups(level)
        assert [rank for group in groups for rank in group.ranks] == list(range(tree.num_ranks))
        assert {group.degree for group in groups} == {tree.degree(level)}
        for group in groups:
            assert group in tree
            parents = {tree.group(level - 1, rank) for rank in group.ranks} if level else set()
            assert len(parents) == (1 if level else 0)
    assert {group.degree for group in tree.groups(tree.num_levels - 1)} == {1}


@given(trees(64))
def test_a_rank_is_in_one_group_of_each_level_and_each_lies_in_the_one_before(tree: GroupTree) -> None:
    """F8: as many groups as the tree has vertices, never one for each set of ranks."""
    for rank in range(tree.num_ranks):
        path = tree.path(rank)
        assert [group.level for group in path] == list(range(tree.num_levels))
        assert all(rank in group for group in path)
        assert all(set(b.ranks) < set(a.ranks) for a, b in pairwise(path))
    vertices = {group for level in range(tree.num_levels) for group in tree.groups(level)}
    assert len(vertices) == sum(math.prod(tree.fanouts[:level]) for level in range(tree.num_levels))
    assert vertices == {group for rank in range(tree.num_ranks) for group in tree.path(rank)}


@given(trees(10**6))
def test_a_tree_is_read_back_from_its_own_text(tree: GroupTree) -> None:
    assert GroupTree.parse(str(tree)) == tree


@given(trees(512))
def test_a_level_is_found_by_its_degree(tree: GroupTree) -> None:
    assert [tree.level_of_degree(tree.degree(level)) for level in range(tree.num_levels)] == list(
        range(tree.num_levels)
    )


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_default_tree_has_all_ranks_and_never_a_group_across_part_of_a_host(hosts: int, ranks: int) -> None:
    tree = Cluster(hosts, ranks).default_tree()
    assert tree.num_ranks == hosts * ranks
    degrees = [tree.degree(level) for level in range(tree.num_levels)]
    assert ranks in degrees
    assert all(degree % ranks == 0 or ranks % degree == 0 for degree in degrees)


@given(st.integers(1, 10**6))
def test_prime_factors_are_prime_and_multiply_to_the_number(number: int) -> None:
    factors = prime_factors(number)
    assert math.prod(factors) == number
    assert list(factors) == sorted(factors, reverse=True)
    assert all(f >= 2 and all(f % d for d in range(2, math.isqrt(f) + 1)) for f in factors)


@given(st.integers(0, 10**9), st.integers(1, 70))
def test_shares_are_adjacent_cover_everything_and_differ_by_at_most_one(total: int, num_parts: int) -> None:
    parts = [share(total, num_parts, index) for index in range(num_parts)]
    assert parts[0].start == 0
    assert parts[-1].stop == total
    assert all(a.stop == b.start for a, b in pairwise(parts))
    sizes = share_sizes(total, num_parts)
    assert sizes == tuple(len(part) for part in parts)
    assert max(sizes) == -(-total // num_parts)
    assert max(sizes) - min(sizes) <= 1


@given(head_counts(), st.integers(1, 70))
def test_head_shares_deal_every_query_head_once_with_the_kv_head_it_needs(heads: tuple[int, int], degree: int) -> None:
    """D9, D11: any degree is legal for any heads; a member may have none, KV heads are replicated where needed."""
    num_heads, num_kv_heads = heads
    per_kv = num_heads // num_kv_heads
    shares = head_shares(num_heads, num_kv_heads, degree)
    assert len(shares) == degree
    assert [head for member in shares for head in member.query] == list(range(num_heads))
    assert {head for member in shares for head in member.kv} == set(range(num_kv_heads))
    for member in shares:
        assert [member.kv[place] for place in member.kv_of_query] == [head // per_kv for head in member.query]
        assert set(member.kv) == {head // per_kv for head in member.query}  # nothing that no query needs: D15
    assert max(len(m.query) for m in shares) - min(len(m.query) for m in shares) <= 1
