"""The first tensors of a step: ids, positions, shifted targets, and no more reads than needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.execute.local import LocalTokens, load_local
from nestsp.model.loss import IGNORED_TARGET
from nestsp.plan import Plan
from nestsp.shard import rank_spans

TREE = GroupTree((2, 2))
BATCH = SequenceBatch((40, 41, 42), (10, 3, 1))


def load(rank: int, reads: list[tuple[int, int, int]]) -> LocalTokens:
    groups: dict[Group, list[int]] = {TREE.group(0, 0): [0], TREE.group(1, 0): [1], TREE.group(2, 1): [2]}
    plan = Plan.of_groups(TREE, BATCH, [groups], "test")
    lengths = dict(zip(BATCH.ids, BATCH.lengths, strict=True))

    def read(identity: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        assert 0 <= start < stop <= lengths[identity]
        reads.append((identity, start, stop))
        return np.arange(start, stop, dtype=np.uint8) + 20 * (identity - 40)

    return load_local(rank_spans(plan, rank)[0], plan.batch, read, torch.device("cpu"))


def test_targets_come_from_the_next_token_of_the_same_sequence() -> None:
    reads: list[tuple[int, int, int]] = []
    tokens = load(1, reads)  # tokens 2 to 4 of the long one, 1 and 2 of the middle one, the one of the short one
    assert tokens.ids.tolist() == [2, 3, 4, 21, 22, 40]
    assert tokens.positions.tolist() == [2, 3, 4, 1, 2, 0]
    assert tokens.targets.tolist() == [3, 4, 5, 22, IGNORED_TARGET, IGNORED_TARGET]
    assert tokens.weights.tolist() == [1.0] * 6
    assert tokens.weights.dtype == torch.float32
    assert tokens.ids.dtype == tokens.targets.dtype == tokens.positions.dtype == torch.int64
    assert tokens.num_tokens == 6
    assert reads == [(40, 2, 6), (41, 1, 3), (42, 0, 1)]  # its own spans, and one more token inside a sequence


def test_every_token_but_the_last_of_each_sequence_is_a_target_once() -> None:
    targets = sorted(t for rank in range(4) for t in load(rank, []).targets.tolist() if t != IGNORED_TARGET)
    assert targets == [*range(1, 10), 21, 22]


def test_a_rank_without_tokens_gets_one_filler_without_a_target() -> None:
    plan = Plan.of_groups(TREE, SequenceBatch.of_lengths([5]), [{TREE.group(2, 0): [0]}], "test")

    def read(identity: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        pytest.fail("a rank without tokens reads none")

    tokens = load_local(rank_spans(plan, 3)[0], plan.batch, read, torch.device("cpu"))
    assert (tokens.ids.tolist(), tokens.targets.tolist(), tokens.num_tokens) == ([0], [IGNORED_TARGET], 0)
    tokens.ids.add_(1)
    assert tokens.positions.tolist() == [0]  # memory of its own
