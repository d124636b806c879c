"""The longest steps, as lengths: no step of the stream asks for more than they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestsp.data.stream import DataState, SampleStream, Share
from nestsp.train.rehearsal import longest_steps


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"sequences_per_step": 2}, [9, 7]),
        ({"sequences_per_step": 99}, [9, 7, 4, 4, 2, 1]),
        ({"tokens_per_step": 9}, [9]),
        ({"tokens_per_step": 5}, [9]),  # one longer sample is a step of its own
        ({"tokens_per_step": 12}, [9, 2, 1]),  # 7 and both 4 do not fit beside 9
        ({"tokens_per_step": 24}, [9, 7, 4, 4]),
        ({"tokens_per_step": 99}, [9, 7, 4, 4, 2, 1]),
    ],
)
def test_the_longest_step_is_as_full_as_a_step_may_be(sizes: dict[str, Any], expected: list[int]) -> None:
    lengths = np.array([2, 4, 9, 1, 4, 7])
    [batch] = longest_steps(SampleStream(lengths, **sizes))
    assert list(batch.lengths) == expected
    assert [int(lengths[number]) for number in batch.ids] == expected


@pytest.mark.parametrize(
    ("lengths", "sizes", "expected"),
    [
        ([5, 5, 1, 9, 4, 4, 6, 1], {"sequences_per_step": 4}, [[1, 9, 5, 5]]),
        ([5, 5, 1, 9, 4, 4, 6, 1], {"tokens_per_step": 19}, [[1, 9, 4, 4]]),
        ([100, 1, 60, 60, 60, 60], {"sequences_per_step": 4}, [[100, 1, 60, 60], [60, 60, 60, 60]]),
        ([100, 1, 60, 60, 60, 60], {"tokens_per_step": 110}, [[100, 1], [60, 60]]),  # each alone, and 120 is more
        ([100, 1, 9, 100, 60, 60], {"sequences_per_step": 4}, [[9, 100, 60, 60]]),  # of two longest the fuller run
    ],
)
def test_the_longest_steps_keep_together_what_stays_together(
    lengths: list[int], sizes: dict[str, Any], expected: list[list[int]]
) -> None:
    steps = longest_steps(SampleStream(np.array(lengths), **sizes, together=2))
    assert [list(batch.lengths) for batch in steps] == expected


@pytest.mark.parametrize(
    ("shares", "sequences_per_step", "expected"),
    [
        ((Share(4, 8),), 2, {0, 4}),  # two whole decks
        ((Share(4, 5),), 3, {0, 4, 1}),  # 5 are of two decks, wherever they begin
        ((Share(4, 6),), 4, {0, 4, 1, 5}),  # so are 6, which begin at card 0 or 2
        ((Share(4, 7),), 4, {0, 4, 8, 1}),  # 7 from card 3 are of three
        ((Share(2, 1), Share(2, 4)), 3, {0, 2, 6}),  # one alone of the first source
        ((Share(2, 1), Share(2, 1)), 9, {0, 2}),  # an epoch has no more
    ],
)
def test_a_sample_is_there_as_often_as_an_epoch_may_take_it(
    shares: tuple[Share, ...], sequences_per_step: int, expected: set[int]
) -> None:
    lengths = np.array([100, 90, 60, 50])
    [batch] = longest_steps(SampleStream(lengths, shares=shares, sequences_per_step=sequences_per_step))
    assert set(batch.ids) == expected


@st.composite
def streams(draw: st.DrawFn) -> SampleStream:
    """Of one table or a mixture of up to three sources, whose epochs take up to four times what there is."""
    together = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    shares = tuple(Share(n * together, draw(st.integers(1, 4 * n)) * together) for n in sizes)
    number = sum(sizes) * together
    lengths = draw(st.lists(st.integers(1, 4) | st.integers(1, 100), min_size=number, max_size=number))
    size = (
        {"sequences_per_step": draw(st.integers(1, 8)) * together}
        if draw(st.booleans())
        else {"tokens_per_step": draw(st.integers(1, 400))}
    )
    mixed = shares if draw(st.booleans()) else ()
    return SampleStream(np.array(lengths), draw(st.integers(0, 99)), **size, shares=mixed, together=together)


@settings(deadline=None, database=None, derandomize=True, max_examples=300)
@given(streams())
def test_no_step_of_three_epochs_asks_for_more(stream: SampleStream) -> None:
    rehearsed = longest_steps(stream)
    state = DataState()
    longest, most = (max(values) for values in zip(*((max(b.lengths), b.num_tokens) for b in rehearsed), strict=True))
    while state.epoch < 3:
        batch, state = stream.take(state)
        assert max(batch.lengths) <= longest
        assert stream.tokens_per_step is not None or batch.num_tokens <= most
    for batch in rehearsed:
        assert batch.lengths == tuple(stream.lengths[np.array(batch.ids) % stream.lengths.size].tolist())
        assert batch.num_sequences <= min(stream.num_samples, stream.sequences_per_step or stream.num_samples)
        if stream.tokens_per_step is not None:
            assert batch.num_tokens <= stream.tokens_per_step or batch.num_sequences == stream.together
