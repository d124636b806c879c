"""The stream of batches: each sample once an epoch, the same after any resume, whatever the hardware."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.data.stream import DataState, SampleStream, Share, sample_order, splitmix64
from nestsp.errors import ConfigError, DataError

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=40)
batch_sizes = st.one_of(
    st.builds(lambda n: {"tokens_per_step": n}, st.integers(1, 200)),
    st.builds(lambda n: {"sequences_per_step": n}, st.integers(1, 50)),
)


def _stream(lengths: list[int], sizes: dict[str, Any], seed: int = 0) -> SampleStream:
    return SampleStream(np.array(lengths, dtype=np.int64), seed, **sizes)


def _steps(stream: SampleStream, num_epochs: int) -> list[tuple[DataState, SequenceBatch]]:
    """Every batch of the first epochs, each with the state that it was taken from."""
    state, steps = DataState(), []
    while state.epoch < num_epochs:
        before = state
        batch, state = stream.take(before)
        steps.append((before, batch))
    assert state == DataState(num_epochs, 0)
    return steps


@pytest.mark.parametrize("sizes", [{"sequences_per_step": 4}, {"tokens_per_step": 40}])
def test_each_of_23_samples_is_taken_once_in_each_of_2_epochs(sizes: dict[str, int]) -> None:
    """Row G2."""
    steps = _steps(_stream(list(range(1, 24)), sizes), 2)
    assert Counter(i for _, batch in steps for i in batch.ids) == {i: 2 for i in range(23)}
    epochs = [[i for state, batch in steps if state.epoch == epoch for i in batch.ids] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("sizes", [{"sequences_per_step": 4}, {"tokens_per_step": 40}])
def test_a_run_resumed_before_any_step_takes_the_same_batches(sizes: dict[str, int]) -> None:
    """Rows G3, G5, G7, G8, G36: the first step, the last, those of epoch 2 and the start of each epoch."""
    lengths = list(range(1, 24))
    steps = _steps(_stream(lengths, sizes), 3)
    for number, (state, _) in enumerate(steps):
        saved = json.dumps(asdict(state))
        resumed, again = DataState(**json.loads(saved)), _stream(lengths, sizes)
        for expected_state, expected in steps[number:]:
            assert resumed == expected_state
            batch, resumed = again.take(resumed)
            assert batch == expected
        assert resumed == DataState(3, 0)


def test_1000_samples_of_16_a_step_are_63_steps() -> None:
    """Row G9: and nothing else can change it."""
    for lengths in ([1] * 1000, list(range(1, 1001))):
        stream = _stream(lengths, {"sequences_per_step": 16})
        assert stream.steps_in_epoch(0) == stream.steps_in_epoch(7) == 63
        assert stream.num_steps(2) == 126
        sizes = [batch.num_sequences for _, batch in _steps(stream, 1)]
        assert sizes == [16] * 62 + [8]  # the short one is kept


def test_batches_do_not_cross_epochs() -> None:
    """Rows F3, G7: 5 samples, 4 a step."""
    steps = _steps(_stream([3, 3, 3, 3, 3], {"sequences_per_step": 4}), 2)
    assert [(state.epoch, state.position, batch.num_sequences) for state, batch in steps] == [
        (0, 0, 4),
        (0, 4, 1),
        (1, 0, 4),
        (1, 4, 1),
    ]


def test_one_sample_longer_than_the_step_is_a_step_of_its_own() -> None:
    steps = _steps(_stream([5, 500, 5, 5, 500], {"tokens_per_step": 10}), 1)
    assert all(batch.num_tokens <= 10 or batch.lengths == (500,) for _, batch in steps)
    assert sum(batch.lengths == (500,) for _, batch in steps) == 2


@settings(deadline=None)
@given(lengths=lengths_lists, sizes=batch_sizes, seed=st.integers(0, 2**70), num_epochs=st.integers(1, 3))
def test_every_epoch_is_a_permutation_cut_by_the_batch_size(
    lengths: list[int], sizes: dict[str, int], seed: int, num_epochs: int
) -> None:
    """Rows G2, G9."""
    stream = _stream(lengths, sizes, seed)
    steps = _steps(stream, num_epochs)
    for epoch in range(num_epochs):
        batches = [batch for state, batch in steps if state.epoch == epoch]
        ids = [i for batch in batches for i in batch.ids]
        assert ids == sample_order(len(lengths), seed, epoch).tolist()
        assert sorted(ids) == list(range(len(lengths)))
        assert len(batches) == stream.steps_in_epoch(epoch)
        for number, batch in enumerate(batches):
            assert batch.lengths == tuple(lengths[i] for i in batch.ids)
            last = number == len(batches) - 1
            if "sequences_per_step" in sizes:
                assert batch.num_sequences == sizes["sequences_per_step"] or last
            else:
                assert batch.num_tokens <= sizes["tokens_per_step"] or batch.num_sequences == 1
                # greedy: the next sample would not have fitted
                assert last or batch.num_tokens + batches[number + 1].lengths[0] > sizes["tokens_per_step"]
    assert len(steps) == stream.num_steps(num_epochs)


@settings(deadline=None)
@given(lengths=lengths_lists, sizes=batch_sizes, seed=st.integers(0, 100), data=st.data())
def test_a_batch_depends_on_nothing_but_its_state(
    lengths: list[int], sizes: dict[str, int], seed: int, data: st.DataObject
) -> None:
    """Rows G3, G5: in whatever order batches are asked for."""
    stream = _stream(lengths, sizes, seed)
    steps = _steps(stream, 2)
    for state, batch in data.draw(st.permutations(steps)):
        assert stream.take(state)[0] == batch


def test_the_generator_is_splitmix64() -> None:
    mask = 2**64 - 1
    for start in (0, 1234567, mask):
        expected, state = [], start
        for _ in range(5):
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            expected.append(z ^ (z >> 31))
        assert splitmix64(start, 5).tolist() == expected


def test_an_order_stays_what_it_was_released_as() -> None:
    """Row G3: a changed order would resume runs on other data. These numbers may never change."""
    assert sample_order(10, 0, 0).tolist() == [2, 3, 8, 9, 1, 0, 6, 5, 7, 4]
    assert sample_order(10, 0, 1).tolist() == [7, 3, 1, 2, 9, 6, 5, 0, 4, 8]
    assert sample_order(10, 2**64 + 1, 0).tolist() == [6, 2, 4, 5, 9, 7, 8, 1, 0, 3]


def test_orders_of_neighbouring_seeds_and_epochs_have_nothing_in_common() -> None:
    """Row G5."""
    num_samples = 2000
    orders = [sample_order(num_samples, seed, epoch) for seed in range(3) for epoch in range(3)]
    places = np.arange(num_samples)
    for number, order in enumerate(orders):
        assert order.dtype == np.int64
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.1  # 4.5 standard deviations
        for other in orders[:number]:
            assert np.count_nonzero(order == other) < 10  # 1 is expected


def test_a_million_samples_are_taken_from_any_place_without_walking_there() -> None:
    """Rows G3, G36: one epoch's order is made, whatever the position. (Time is reported, not tested.)"""
    lengths = np.arange(1_000_000, dtype=np.int64) % 1000 + 1
    stream = SampleStream(lengths, tokens_per_step=1 << 20)
    batch, state = stream.take(DataState(3, 777_777))
    assert batch.num_tokens <= 1 << 20
    assert state == DataState(3, 777_777 + batch.num_sequences)
    assert stream.take(DataState(3, 999_999)) == (
        SequenceBatch((batch_id := int(sample_order(1_000_000, 0, 3)[-1]),), (int(lengths[batch_id]),)),
        DataState(4, 0),
    )


def test_batch_sizes_beyond_every_integer_take_the_whole_epoch() -> None:
    for sizes in ({"tokens_per_step": 10**30}, {"sequences_per_step": 10**30}):
        assert _stream([3, 4, 5], sizes).take(DataState())[0].num_sequences == 3


def test_a_position_of_another_corpus_is_refused() -> None:
    stream = _stream([1, 2, 3], {"sequences_per_step": 2})
    with pytest.raises(DataError, match="position is 3, but an epoch has 3 samples; resume with"):
        stream.take(DataState(0, 3))


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_a_state_that_is_no_position_is_refused(value: object) -> None:
    for name in ("epoch", "position"):
        with pytest.raises(DataError, match=re.escape(f"the data's {name} is {value!r}, but it must be")):
            DataState(**{name: value})  # type: ignore[arg-type]


def test_a_stream_needs_exactly_one_batch_size_and_whole_samples() -> None:
    one = np.ones(1, dtype=np.int64)
    with pytest.raises(ConfigError, match="has 0 of tokens_per_step and sequences_per_step"):
        SampleStream(one)
    with pytest.raises(ConfigError, match="has 2 of tokens_per_step and sequences_per_step"):
        SampleStream(one, tokens_per_step=1, sequences_per_step=1)
    with pytest.raises(ConfigError, match="batch size is 0"):
        SampleStream(one, tokens_per_step=0)
    with pytest.raises(DataError, match="has no sample"):
        SampleStream(one[:0], sequences_per_step=1)
    with pytest.raises(DataError, match="sample 1 has 0 tokens"):
        SampleStream(np.array([3, 0]), sequences_per_step=1)


@settings(deadline=None)
@given(
    lengths=lengths_lists,
    together=st.integers(1, 4),
    tokens=st.none() | st.integers(1, 200),
    seed=st.integers(0, 3),
    mixed=st.booleans(),
)
def test_A14_samples_that_stay_together_come_in_one_step_in_their_order(
    lengths: list[int], together: int, tokens: int | None, seed: int, mixed: bool
) -> None:
    table = [length + number for length in lengths for number in range(together)]
    half = (len(lengths) + 1) // 2 * together
    shares = (Share(half, half + together), Share(len(table) - half, together)) if mixed and len(lengths) > 1 else ()
    sizes = {"tokens_per_step": tokens} if tokens else {"sequences_per_step": 3 * together}
    stream = SampleStream(np.array(table, dtype=np.int64), seed, **sizes, shares=shares, together=together)
    taken: list[int] = []
    for state, batch in _steps(stream, 2):
        assert state.position % together == 0
        runs = np.array(batch.ids).reshape(-1, together)
        assert (runs[:, 0] % together == 0).all()
        assert (runs == runs[:, :1] + np.arange(together)).all()
        assert tokens is None or batch.num_sequences == together or batch.num_tokens <= tokens
        taken += batch.ids
    assert len(taken) == 2 * stream.num_samples
    if not shares:
        assert Counter(taken) == Counter(2 * list(range(len(table))))
    assert sum(1 for _ in _steps(stream, 1)) == stream.steps_in_epoch(0)


def test_a_step_that_would_tear_a_run_of_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stream takes 3 samples a step, but 2 stay together; take a multiple"):
        SampleStream(np.ones(4, dtype=np.int64), sequences_per_step=3, together=2)
