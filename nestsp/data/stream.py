"""The order of samples and the batches cut from it: a function of the samples, the seed and the batch size alone.

No ranks, groups or planners are known here, so neither the order nor the number of steps can depend on them, and a run
resumes on other hardware where it stopped. A position in the order is all the state there is: where the next batch
ends follows from where it starts, so resuming walks over nothing. A new epoch of a million samples takes about 0.2 s to
order; every further batch is a binary search.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.errors import ConfigError, DataError

__all__ = ["DataState", "SampleStream", "Share", "sample_order", "splitmix64"]


@dataclass(frozen=True, slots=True)
class DataState:
    """Where a stream stands: ``position`` samples of epoch ``epoch`` are taken. Both are plain integers, as in JSON.

    Raises:
        DataError: One of them is below 0 or not a whole number.
    """

    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        for name in ("epoch", "position"):
            value = getattr(self, name)
            try:
                whole = operator.index(value)
            except TypeError:
                whole = -1
            if whole < 0 or isinstance(value, bool):
                raise DataError(f"the data's {name} is {value!r}, but it must be a whole number from 0; start anew")
            object.__setattr__(self, name, whole)


class Share(NamedTuple):
    """What a mixture's epoch takes of one source.

    The source is a deck that is shuffled anew for each pass; epochs take their cards from it one after another. So all
    samples of a source come equally often, whatever its weight.

    Attributes:
        num_samples: The source's samples.
        num_taken: How many an epoch takes; more than there are takes some, or all, again.
    """

    num_samples: int
    num_taken: int


class _Epoch(NamedTuple):
    order: npt.NDArray[np.int64]  # [num_samples]: id at each position
    ends: npt.NDArray[np.int64]  # [num_samples + 1]: tokens before each position


@dataclass(frozen=True, slots=True, eq=False)
class SampleStream:
    """Batches of samples in a shuffled order, another one each epoch.

    A batch is the next samples in order: ``sequences_per_step`` of them, or as many as stay within
    ``tokens_per_step``, at least one. Batches do not cross epochs; an epoch's last batch may be short and is kept.
    With ``together`` above 1, runs of so many neighbouring samples are what is ordered and taken; none is cut.

    Attributes:
        lengths: int64, tokens of each sample of the table.
        seed: The order follows from it and the epoch.
        shares: Of a mixture, whose sources lie one after another in the table; empty for every sample once. A sample
            that an epoch takes again has an id that is its number plus a multiple of the table's length.
        together: Samples 0 to together - 1 are the first run, the next so many the second, and so on.

    Raises:
        ConfigError: Not exactly one batch size is given, or it is below 1, or no number of whole runs.
        DataError: There is no sample, or one has no token.
    """

    lengths: npt.NDArray[np.int64] = field(repr=False)
    seed: int = 0
    tokens_per_step: int | None = None
    sequences_per_step: int | None = None
    shares: tuple[Share, ...] = ()
    together: int = 1
    # The epoch used last, under its number: a memo, not state.
    _memo: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [size for size in (self.tokens_per_step, self.sequences_per_step) if size is not None]
        if len(sizes) != 1:
            raise ConfigError(
                f"a stream has {len(sizes)} of tokens_per_step and sequences_per_step, but needs exactly one; give one"
            )
        if sizes[0] < 1:
            raise ConfigError(f"a stream's batch size is {sizes[0]}, but it must be at least 1; raise it")
        if self.sequences_per_step is not None and self.sequences_per_step % self.together:
            raise ConfigError(
                f"a stream takes {self.sequences_per_step} samples a step, but {self.together} stay together; take a "
                "multiple"
            )
        lengths = np.asarray(self.lengths, dtype=np.int64)
        if not lengths.size:
            raise DataError("a stream has no sample, but needs at least 1; give another corpus")
        if lengths.min() < 1:
            raise DataError(
                f"sample {int(np.argmin(lengths))} has {int(lengths.min())} tokens, but every sample needs "
                "at least 1; drop it"
            )
        assert not self.shares or sum(share.num_samples for share in self.shares) == lengths.size
        sizes = [number for share in self.shares for number in share] or [lengths.size]
        assert not any(number % self.together for number in sizes), "a table of whole runs"
        object.__setattr__(self, "lengths", lengths)

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return sum(share.num_taken for share in self.shares) or int(self.lengths.size)

    def take(self, state: DataState) -> tuple[SequenceBatch, DataState]:
        """The batch that starts at a state, and the state after it.

        Returns:
            A batch whose ids are the samples' in order, and where the next one starts: after an epoch's last batch at
            position 0 of the next epoch.

        Raises:
            DataError: The position is past the last sample.
        """
        if state.position >= self.num_samples:
            raise DataError(
                f"the data's position is {state.position}, but an epoch has {self.num_samples} samples; "
                "resume with the corpus and limits that the run began with"
            )
        epoch = self._epoch(state.epoch)
        stop = int(self._stops(epoch, np.array([state.position]))[0])
        ids = epoch.order[state.position : stop]
        batch = SequenceBatch(tuple(ids.tolist()), tuple(self.lengths[ids % self.lengths.size].tolist()))
        after = DataState(state.epoch, stop) if stop < self.num_samples else DataState(state.epoch + 1, 0)
        return batch, after

    def steps_in_epoch(self, epoch: int) -> int:
        """Batches of an epoch. Equal for all epochs with ``sequences_per_step``, else it varies with the order."""
        if self.sequences_per_step is not None:
            return -(-self.num_samples // self.sequences_per_step)
        hops = self._stops(self._epoch(epoch), np.arange(0, self.num_samples, self.together)).tolist()
        position = steps = 0
        while position < self.num_samples:
            position = hops[position // self.together]
            steps += 1
        return steps

    def num_steps(self, epochs: int) -> int:
        """Batches of the first ``epochs`` epochs."""
        if self.sequences_per_step is not None:
            return epochs * self.steps_in_epoch(0)
        return sum(self.steps_in_epoch(epoch) for epoch in range(epochs))

    def _stops(self, epoch: _Epoch, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the batch that starts at each position ends. Sizes are cut to the epoch, so no sum leaves int64."""
        if self.sequences_per_step is not None:
            num_sequences = min(self.sequences_per_step, self.num_samples)
            return np.minimum(positions + num_sequences, self.num_samples)
        assert self.tokens_per_step is not None
        num_tokens = min(self.tokens_per_step, int(epoch.ends[-1]))
        stops = np.searchsorted(epoch.ends, epoch.ends[positions] + num_tokens, side="right") - 1
        whole: npt.NDArray[np.int64] = stops - stops % self.together
        return np.maximum(whole, positions + self.together)

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._memo.get(number)
        if epoch is None:
            order = sample_order(self.num_samples // self.together, self.seed, number)
            if self.shares:
                order = self._taken(number)[order]
            order = (order[:, None] * self.together + np.arange(self.together)).reshape(-1)
            epoch = _Epoch(order, np.concatenate([[0], np.cumsum(self.lengths[order % self.lengths.size])]))
            self._memo.clear()
            self._memo[number] = epoch
        return epoch

    def _taken(self, epoch: int) -> npt.NDArray[np.int64]:
        """Runs that an epoch of a mixture takes, source after source, not yet in its order."""
        taken, first, num_runs = [], 0, self.lengths.size // self.together
        for number, share in enumerate(self.shares):
            share = Share(share.num_samples // self.together, share.num_taken // self.together)
            begin, end = epoch * share.num_taken, (epoch + 1) * share.num_taken
            passes = range(begin // share.num_samples, (end - 1) // share.num_samples + 1)
            for again, deck in enumerate(passes):
                dealt = deck * share.num_samples
                low, high = max(begin - dealt, 0), min(end - dealt, share.num_samples)
                cards = _shuffled(share.num_samples, self.seed, number, deck)[low:high]
                taken.append(first + cards + again * num_runs)
            first += share.num_samples
        return np.concatenate(taken)


def sample_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A shuffled order of samples that follows from these numbers alone, on every machine and version of NumPy.

    Samples are sorted by the outputs of one SplitMix64 generator, which never gives the same output twice. Its start
    is a digest of seed and epoch, so neighbouring seeds and epochs have nothing in common.

    Returns:
        int64 [num_samples], each of 0 to num_samples - 1 once.
    """
    return _shuffled(num_samples, seed, epoch)


def _shuffled(num_samples: int, *numbers: int) -> npt.NDArray[np.int64]:
    start = int.from_bytes(hashlib.sha256(",".join(map(str, numbers)).encode()).digest()[:8], "little")
    return np.argsort(splitmix64(start, num_samples), kind="stable").astype(np.int64, copy=False)


def splitmix64(start: int, num_outputs: int) -> npt.NDArray[np.uint64]:
    """The first outputs of the SplitMix64 generator.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
    Vigna's splitmix64.c. Ours computes all outputs at once: the i-th is a mix of start + i · golden.

    Args:
        start: 0 to 2^64 - 1.

    Returns:
        uint64 [num_outputs].

    >>> splitmix64(1234567, 2).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    z = np.uint64(start) + np.arange(1, num_outputs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    outputs: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return outputs
