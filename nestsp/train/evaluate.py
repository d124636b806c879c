"""Evaluation: the loss of the model as it is, on data of its own, by the same planner, executor and exactness.

Every sample is taken once, in batches of the training's size, whatever the ranks; the loss is Σ weight × negative
log-likelihood over Σ weight, of all targets. Every rank runs every microbatch of every plan, so none waits for another
whose samples have ended. Nothing that training depends on is touched: a run with evaluations equals one without, bit
for bit. Plans are made once, for memory without a backward pass; price of an evaluation, about a third of the training
step's on the same tokens.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.data.samples import open_evaluation
from nestsp.data.store import Progress
from nestsp.data.stream import DataState, SampleStream
from nestsp.errors import ConfigError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.model.loss import IGNORED_TARGET
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.train.feed import PlanFeed
from nestsp.train.prepare import Prepared, check_vocabulary
from nestsp.train.world import World
from nestsp.units import format_count, format_seconds

__all__ = ["EvalMetrics", "Evaluator", "evaluation_task", "measure_loss", "prepare_evaluation"]


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """One evaluation.

    Attributes:
        step: Optimizer steps done before it.
        loss: Mean over all targets, by weight; None if there is no target.
        num_targets: Targets of all samples.
        num_tokens: Tokens of all samples.
        num_microbatches: Forward passes of each rank.
        seconds: How long it took.
    """

    step: int
    loss: float | None
    num_targets: int
    num_tokens: int
    num_microbatches: int
    seconds: float

    def line(self, num_steps: int) -> str:
        """One line for people."""
        loss = "no target" if self.loss is None else f"loss {self.loss:.4f}"
        return (
            f"evaluation after step {self.step}/{num_steps}  {loss}  {format_count(self.num_targets)} targets  "
            f"{format_seconds(self.seconds)}"
        )


def prepare_evaluation(prepared: Prepared, progress: Progress | None = None) -> Prepared | None:
    """The same run with the samples of ``data.eval``, or None if there are none. No collective.

    Raises:
        NestspError: A subclass that names what is wrong with them.
    """
    data = prepared.config.data
    samples = open_evaluation(data, progress)
    if samples is None:
        return None
    for store in samples.stores:
        check_vocabulary(store, prepared.shape)
    longest = int(samples.lengths.max())
    limit = getattr(prepared.model, "max_position_embeddings", None)
    if isinstance(limit, int) and longest > limit:
        raise ConfigError(
            f"the longest sample of data.eval has {format_count(longest)} tokens, but "
            f"model.config.max_position_embeddings is {format_count(limit)}; raise it, or set data.max_length"
        )
    stream = SampleStream(
        samples.lengths,
        seed=data.seed,
        tokens_per_step=data.tokens_per_step,
        sequences_per_step=data.sequences_per_step,
    )
    return dataclasses.replace(prepared, samples=samples, stream=stream, num_steps=stream.steps_in_epoch(0))


def evaluation_task(prepared: Prepared, task: PlanningTask) -> PlanningTask:
    """What an evaluation asks of the run's planner: no memory for a backward pass, and nothing kept for one.

    Args:
        prepared: From `prepare_evaluation`.
        task: The training's.

    Raises:
        InfeasibleError: The longest sample does not fit.
    """
    forward = dataclasses.replace(
        task,
        can=dataclasses.replace(task.can, kept_outputs=False, num_kept_layers=0),
        memory=dataclasses.replace(task.memory, forward_only=True),
    )
    forward.check_longest(prepared.longest)
    return forward


class Evaluator:
    """Evaluates a run's model again and again, on the same batches by the same plans."""

    def __init__(self, prepared: Prepared, task: PlanningTask, world: World, executor: Executor) -> None:
        self._prepared, self._task, self._world, self._executor = prepared, task, world, executor
        self._plans: list[Plan] = []

    def run(self, step: int) -> EvalMetrics:
        """Evaluate the model as it is; every rank must call it.

        Args:
            step: Optimizer steps done, for the record.

        Raises:
            NestspError: A batch cannot be planned; on every rank.
        """
        start = time.perf_counter()
        self._plan()
        sums = torch.zeros(3, dtype=torch.float64, device=self._executor.device)
        for plan in self._plans:
            sums += measure_loss(self._executor, self._executor.load(plan, self._prepared.samples.read))
        self._executor.timer.clear()  # it times steps
        dist.all_reduce(sums)
        loss, weight, targets = sums.tolist()
        return EvalMetrics(
            step=step,
            loss=loss / weight if weight else None,
            num_targets=round(targets),
            num_tokens=sum(plan.batch.num_tokens for plan in self._plans),
            num_microbatches=sum(len(plan.microbatches) for plan in self._plans),
            seconds=time.perf_counter() - start,
        )

    def _plan(self) -> None:
        if self._plans:
            return
        num_batches = self._prepared.num_steps
        feed = PlanFeed(self._prepared, self._task, self._world, self._executor, DataState(), num_batches)
        for number in range(num_batches):
            self._executor.place.enter(number)  # a move, for the watchdog
            self._plans.append(feed.take().planned.plan)
        feed.close()


def measure_loss(executor: Executor, batch: LocalBatch) -> Tensor:
    """This rank's sums over a batch's targets, forward only; every rank must call it.

    Returns:
        float64 [3]: weight × negative log-likelihood, weights, and number of targets.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=executor.device)
    for microbatch, nll in zip(batch.microbatches, executor.measure(batch), strict=True):
        there = microbatch.tokens.targets != IGNORED_TARGET
        weights = microbatch.tokens.weights[there].double()
        sums += torch.stack([(nll[there].double() * weights).sum(), weights.sum(), there.sum().double()])
    return sums
