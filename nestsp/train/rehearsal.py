"""Runs the data's longest samples once before the first step, so that what does not fit shows at once, not in a week.

The step is the longest samples of the store, as many as one step takes: no step of the run has a longer sequence, nor,
at that many sequences, more tokens. It runs forward and backward by a plan of its own, with room taken for AdamW's
moments where they do not exist yet. Parameters, moments, random numbers, the data's order and the routers' kept counts
are afterwards as they were; gradients are dropped. Price: one step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from nestsp.batch import SequenceBatch
from nestsp.data.stream import SampleStream
from nestsp.errors import InfeasibleError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.planners.task import Planned, PlanningTask
from nestsp.train.prepare import Prepared
from nestsp.train.world import World
from nestsp.units import format_count, plural

__all__ = ["longest_step", "rehearse"]


def longest_step(stream: SampleStream) -> SequenceBatch:
    """The longest samples, longest first, as many as a step takes; ties in the order of the store."""
    order = np.argsort(-stream.lengths.astype(np.int64), kind="stable")
    if stream.sequences_per_step is not None:
        taken = order[: stream.sequences_per_step]
    else:
        assert stream.tokens_per_step is not None
        ends = np.cumsum(stream.lengths[order].astype(np.int64))
        taken = order[: max(1, int(np.searchsorted(ends, stream.tokens_per_step, side="right")))]
    return SequenceBatch(tuple(taken.tolist()), tuple(stream.lengths[taken].tolist()))


def rehearse(
    prepared: Prepared,
    task: PlanningTask,
    world: World,
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    run: Callable[[LocalBatch, SequenceBatch], object],
) -> str:
    """Run the longest step and forget it; every rank must call it.

    Args:
        prepared: The run.
        task: Of its planner.
        world: This rank.
        executor: Of the run.
        optimizer: Of the run; its state is looked at only.
        run: Runs a batch as a step does, forward and backward.

    Returns:
        A line for people.

    Raises:
        NestspError: The step cannot be planned; on every rank.
        InfeasibleError: This rank's device ran out of memory.
    """
    batch = longest_step(prepared.stream)
    plan = Planned.from_json(world.first(lambda: task.solver()(batch).to_json())).plan
    cost = task.cost()
    world.together(lambda: (task.check(plan, cost), executor.check(plan)))
    root = executor.root
    kept = {name: buffer.clone() for name, buffer in root.named_buffers() if name == "router_counts"}
    what = f"{plural(batch.num_sequences, 'sequence')} of {format_count(batch.num_tokens)} tokens"
    try:
        room = [] if optimizer.state else _moments(executor)
        run(executor.load(plan, prepared.samples.read), batch)
        del room
    except torch.OutOfMemoryError as error:
        raise InfeasibleError(
            f"the step of the longest samples ({what}) ran out of memory on rank {world.rank} before the first step "
            f"({' '.join(str(error).split())[:200]}), but every step must fit; lower cluster.memory_per_rank, so that "
            "plans leave more free"
        ) from None
    finally:
        optimizer.zero_grad(set_to_none=True)
        for name, buffer in root.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])
    executor.timer.clear()
    microbatches = plural(len(plan.microbatches), "microbatch", "microbatches")
    return f"the step of the longest samples fits: {what} in {microbatches}"


def _moments(executor: Executor) -> list[torch.Tensor]:
    """As much memory as AdamW's two moments will take at its first step."""
    shards = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in executor.root.parameters()
        if parameter.requires_grad
    ]
    return [torch.zeros_like(shard) for shard in shards for _ in range(2)]
