"""Each sample's likelihood under the model that a run begins with, for losses that compare with it, such as DPO's.

Taken before the first step, forward only, by plans of its own; kept as ``reference.npy`` in the run's folder, so that a
resumed run compares with the same. Price: one forward pass over the data, and 8 bytes a sample on each rank.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestsp.data.stream import DataState, SampleStream
from nestsp.errors import CheckpointError, ConfigError, NumericsError
from nestsp.execute.executor import Executor
from nestsp.execute.losses import SequenceLoss, SequenceSums, measure_sequences
from nestsp.planners.task import PlanningTask
from nestsp.train.agreement import everywhere, reason
from nestsp.train.console import Bar
from nestsp.train.evaluate import evaluation_task
from nestsp.train.feed import PlanFeed
from nestsp.train.prepare import Prepared
from nestsp.train.run_folder import REFERENCE
from nestsp.train.world import World

__all__ = ["read_reference", "take_reference", "with_reference"]

Likelihoods = npt.NDArray[np.float64]


def with_reference(loss: SequenceLoss, reference: Likelihoods) -> SequenceLoss:
    """A loss that finds the reference in its sums.

    Args:
        loss: The user's.
        reference: float64 [num_samples], Σ weight × negative log-likelihood of each.
    """

    def compared(sums: SequenceSums, /) -> Tensor:
        values = reference[np.array(sums.ids) % len(reference)]
        return loss(dataclasses.replace(sums, reference_S=torch.from_numpy(values).to(sums.nll_S.device)))

    return compared


def take_reference(
    prepared: Prepared, task: PlanningTask, world: World, executor: Executor, folder: Path, bar: Bar
) -> Likelihoods:
    """Run every sample forward and keep its likelihood; every rank must call it.

    Args:
        prepared: The run.
        task: Of its planner.
        world: This rank.
        executor: Of the run, before its first step.
        folder: The run's.
        bar: Told how far it is.

    Returns:
        float64 [num_samples], Σ weight × negative log-likelihood, the same on all ranks.

    Raises:
        NestspError: A batch cannot be planned, a likelihood is not finite, or the file cannot be written; on every
            rank.
    """
    data = prepared.config.data
    stream = SampleStream(
        prepared.samples.lengths, tokens_per_step=data.tokens_per_step, sequences_per_step=data.sequences_per_step
    )
    once = dataclasses.replace(prepared, stream=stream)
    number = stream.steps_in_epoch(0)
    forward = world.first(lambda: evaluation_task(once, task))
    feed = PlanFeed(once, forward, world, executor, DataState(), number)
    values = np.full(stream.num_samples, np.nan)
    for done in range(number):
        executor.place.enter(done)  # a move, for the watchdog
        plan = feed.take().planned.plan
        sums = measure_sequences(executor, executor.load(plan, prepared.samples.read), plan.batch)
        values[list(plan.batch.ids)] = sums.nll_S.cpu().numpy()
        bar.set(done + 1, number)
    feed.close()
    executor.timer.clear()  # it times steps
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise everywhere(
            NumericsError(
                f"the reference's likelihood of sample {bad[0]} is not finite, but a loss that compares with it needs "
                "it; look at the model that the run begins with, or set train.reference to false"
            )
        )
    world.first(lambda: _write(values, folder / REFERENCE))
    return values


def read_reference(folder: Path, num_samples: int) -> Likelihoods:
    """What `take_reference` has kept.

    Raises:
        CheckpointError: It is not there, or of other samples.
    """
    path = folder / REFERENCE
    try:
        values: Likelihoods = np.load(path, allow_pickle=False)
        if values.shape != (num_samples,) or values.dtype != np.float64:
            raise ValueError(f"it has {values.size} numbers for {num_samples} samples")
        if not np.isfinite(values).all():
            raise ValueError("some of its numbers are not finite")
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"train.reference is true, but {path}, which was made when the run began, cannot be read "
            f"({reason(error)}); set it back, or begin a new run without --resume"
        ) from None
    return values


def _write(values: Likelihoods, path: Path) -> None:
    try:
        with path.with_suffix(".part").open("wb") as file:
            np.save(file, values)
        path.with_suffix(".part").replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}), but the run needs it; make room") from None
