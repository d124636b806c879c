from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nestsp.batch import SequenceBatch
from nestsp.errors import DataError


@pytest.mark.parametrize("lengths", [[0], [5, 0, 3], [-1], [0, 1, 0, 1]])
def test_a_length_below_one_is_refused(lengths: list[int]) -> None:
    """B7, B10, G17: empty sequences are dropped where data are read; a planner never sees one."""
    with pytest.raises(DataError, match=r"has (0|-1) tokens, but every sequence needs at least 1; drop it"):
        SequenceBatch.of_lengths(lengths)


def test_the_refusal_names_the_sequence_by_its_id() -> None:
    with pytest.raises(DataError, match=r"^sequence 41 has 0 tokens"):
        SequenceBatch((40, 41), (3, 0))


def test_an_id_may_be_there_once() -> None:
    with pytest.raises(DataError, match="sequence 7 is twice in one batch"):
        SequenceBatch((7, 8, 7), (1, 2, 3))


def test_ids_and_lengths_must_be_as_many() -> None:
    with pytest.raises(DataError, match="a batch has 2 ids, but 3 lengths"):
        SequenceBatch((1, 2), (1, 2, 3))


@pytest.mark.parametrize("value", [1.0, "3", None, float("nan")])
def test_a_length_that_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"a sequence's length is .* but it must be a whole number; round it first"):
        SequenceBatch.of_lengths([2, value])


def test_numbers_from_numpy_become_plain_ones() -> None:
    batch = SequenceBatch(tuple(np.array([3, 4])), tuple(np.array([5, 6], np.int32)))
    assert batch == SequenceBatch((3, 4), (5, 6))
    assert {type(value) for value in (*batch.ids, *batch.lengths, SequenceBatch.of_lengths([True]).lengths[0])} == {int}


def test_a_batch_may_be_empty_or_have_one_huge_sequence() -> None:
    """G17."""
    assert (SequenceBatch.of_lengths([]).num_sequences, SequenceBatch.of_lengths([]).num_tokens) == (0, 0)
    assert SequenceBatch.of_lengths([10**7]).num_tokens == 10**7
