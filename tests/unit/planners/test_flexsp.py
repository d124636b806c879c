from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.planning.flexsp_model import GPT_7B, flexsp_ground
from nestsp.batch import SequenceBatch
from nestsp.planners.baselines import DisjointGroups
from nestsp.planners.flexsp import FlexSPGroups, bucket_lengths

pytest.importorskip("highspy")


def added_tokens(lengths: list[int], counts: list[int]) -> int:
    edges = np.concatenate([[0], np.cumsum(counts)])
    return sum(lengths[a] * (b - a) - sum(lengths[a:b]) for a, b in itertools.pairwise(edges.tolist()))


def test_no_other_buckets_add_fewer_tokens() -> None:
    lengths = [90, 88, 60, 60, 41, 40, 12, 3]
    for number in range(1, 5):
        counts = bucket_lengths(lengths, number)
        assert sum(counts) == len(lengths)
        assert len(counts) <= number
        best = min(
            added_tokens(lengths, [b - a for a, b in itertools.pairwise((0, *cut, len(lengths)))])
            for cut in itertools.combinations(range(1, len(lengths)), number - 1)
        )
        assert added_tokens(lengths, counts) == best


def test_its_plans_are_disjoint_and_never_slower_than_the_greedy_ones() -> None:
    ground = flexsp_ground(GPT_7B)
    lengths = np.random.default_rng(0).integers(1, 4_000, 40).tolist()
    batch = SequenceBatch.of_lengths([40_000, 20_000, *lengths])
    judged = FlexSPGroups(ground, max_nodes=1, max_more=0).judge(batch)
    judged.plan.check()
    assert judged.makespan_s <= DisjointGroups(ground).judge(batch).makespan_s
    for microbatch in judged.plan.microbatches:
        assert all(len(microbatch.on_rank(rank)) <= 1 for rank in range(64))
