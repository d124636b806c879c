"""What every plan keeps, whoever made it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestsp.cluster import share_sizes
from nestsp.errors import PlanError
from nestsp.plan import Plan
from nestsp.shard import rank_spans, zigzag
from tests.property.fixed_plans import fixed_digests
from tests.property.strategies import plans


@given(plans())
def test_every_token_is_on_exactly_one_rank_once(plan: Plan) -> None:
    """E2: the local tokens of all ranks and microbatches are the batch, no token twice."""
    held: Counter[tuple[int, int]] = Counter()
    for rank in range(plan.tree.num_ranks):
        for spans in rank_spans(plan, rank):
            for span in spans.spans:
                held.update((span.sequence, token) for token in range(span.start, span.stop))
    assert held == {(s, t): 1 for s, length in enumerate(plan.batch.lengths) for t in range(length)}


@given(plans())
def test_spans_are_never_empty_and_give_each_ring_members_stream_in_order(plan: Plan) -> None:
    """D14, C8: members count from the group's own first rank, and tokens from their own sequence's start."""
    of_rank = [rank_spans(plan, rank) for rank in range(plan.tree.num_ranks)]
    for number, placement in plan.placements():
        inside = placement.group.degree // placement.ring_degree
        for place in range(placement.ring_degree):
            stream: list[tuple[int, int]] = []
            for member in range(place * inside, (place + 1) * inside):
                rank = placement.group.ranks[member]
                (shard,) = (s for s in of_rank[rank][number].shards if s.placement == placement)
                assert shard.member == member
                assert all(span.start < span.stop for span in shard.spans)
                assert shard.num_tokens == sum(span.num_tokens for span in shard.spans)
                stream += [(span.sequence, t) for span in shard.spans for t in range(span.start, span.stop)]
            expected = []
            for s, edges in zip(placement.sequences, shard.chunk_edges, strict=True):
                for chunk in (place, 2 * placement.ring_degree - 1 - place):
                    expected += [(s, t) for t in range(edges[chunk], edges[chunk + 1])]
            assert stream == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 9))
def test_zigzag_chunks_of_a_sequence_are_even_and_so_are_the_members(lengths: list[int], ring_degree: int) -> None:
    """D3, D4: any length, also below 2r; what is left over by equal chunks goes round the members."""
    held = [0] * ring_degree
    for length, edges in zip(lengths, zigzag(lengths, ring_degree), strict=True):
        sizes = [b - a for a, b in pairwise(edges)]
        assert (edges[0], edges[-1], len(sizes)) == (0, length, 2 * ring_degree)
        assert max(sizes) - min(sizes) <= 1
        of_member = [sizes[m] + sizes[-1 - m] for m in range(ring_degree)]
        assert max(of_member) - min(of_member) <= 1
        held = [a + b for a, b in zip(held, of_member, strict=True)]
    assert held == list(share_sizes(sum(lengths), ring_degree))


@given(plans())
def test_a_rank_holds_its_groups_root_first_and_as_many_tokens_as_the_plan_says(plan: Plan) -> None:
    for rank in range(plan.tree.num_ranks):
        for number, spans in enumerate(rank_spans(plan, rank)):
            levels = [shard.placement.group.level for shard in spans.shards]
            assert levels == sorted(set(levels))
            offset = 0
            for shard in spans.shards:
                assert shard.offset == offset
                offset += shard.num_tokens
            assert spans.num_tokens == offset == plan.rank_tokens(number)[rank]


@given(plans())
def test_members_of_a_group_differ_by_at_most_one_token(plan: Plan) -> None:
    """D1, D3, D4: no length has to divide by the ranks."""
    for rank in range(plan.tree.num_ranks):
        for spans in rank_spans(plan, rank):
            for shard in spans.shards:
                assert max(shard.sizes) - min(shard.sizes) <= 1
                assert sum(shard.sizes) == sum(shard.lengths) == plan.group_tokens(shard.placement)


@given(plans())
def test_a_plan_is_the_same_after_json(plan: Plan) -> None:
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@given(plans(), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_dicts(plan: Plan, random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    assert Plan.from_json(shuffled(plan.to_json())).digest == plan.digest
    groups = [{p.group: p.sequences for p in microbatch.placements} for microbatch in plan.microbatches]
    forward = Plan.of_groups(plan.tree, plan.batch, groups, "any")
    backward = Plan.of_groups(plan.tree, plan.batch, [dict(reversed(g.items())) for g in groups], "any")
    assert forward == backward
    assert forward.digest == backward.digest


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_plans_and_their_digests_are_equal_in_another_process(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.property.fixed_plans"]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.split() == fixed_digests()


@given(plans(max_ranks=12), st.data())
def test_the_digest_changes_with_every_number_that_decides_what_runs(plan: Plan, data: st.DataObject) -> None:
    altered = plan.to_json()
    places = [p for p in _places(altered) if p not in (("planner",), ("format",)) and type(_at(altered, p)) is int]
    place = data.draw(st.sampled_from(places)) if places else None
    if place is None:
        return
    _set(altered, place, _at(altered, place) + data.draw(st.sampled_from([-1, 1])))
    try:
        other = Plan.from_json(altered)
    except PlanError:
        return
    assert other.digest != plan.digest


@given(plans())
def test_the_digest_does_not_depend_on_who_planned(plan: Plan) -> None:
    assert Plan.from_json({**plan.to_json(), "planner": "other"}).digest == plan.digest


def _places(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner: list[tuple[str | int, ...]] = [place] if place else []
    if isinstance(value, dict):
        keys: list[str | int] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    return inner + [p for key in keys for p in _places(value[key], (*place, key))]


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _set(value: Any, place: tuple[str | int, ...], new: Any) -> None:
    _at(value, place[:-1])[place[-1]] = new


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 10**9, 10**30, 0.0, 1.0, 0.5, float("nan"), float("inf")]),
    st.sampled_from(["", "0", "none", "output", "x"]),
    st.lists(st.integers(0, 3) | st.none(), max_size=3),
    st.just({}),
    st.just({"level": 0}),
)


@given(plans(max_ranks=12), st.data())
def test_damaged_data_are_refused_as_a_plan_error_or_read_exactly_as_they_stand(
    plan: Plan, data: st.DataObject
) -> None:
    damaged = copy.deepcopy(plan.to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        places = _places(damaged)
        if not places:
            break
        place = data.draw(st.sampled_from(places))
        match data.draw(st.sampled_from(["drop", "junk", "twice", "swap"])):
            case "drop":
                del _at(damaged, place[:-1])[place[-1]]
            case "junk":
                _set(damaged, place, data.draw(_JUNK))
            case "twice" if isinstance(place[-1], int):
                _at(damaged, place[:-1]).insert(place[-1], copy.deepcopy(_at(damaged, place)))
            case _:
                _set(damaged, place, copy.deepcopy(_at(damaged, data.draw(st.sampled_from(places)))))
    try:
        read = Plan.from_json(damaged)
    except PlanError:
        return
    assert json.dumps(read.to_json(), sort_keys=True) == json.dumps(damaged, sort_keys=True)


@pytest.mark.parametrize("data", [None, 3, "plan", [], {}, [1, 2]])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    with pytest.raises(PlanError, match="the data are no plan"):
        Plan.from_json(data)
