"""Runs the data's longest samples once before the first step, so that what does not fit shows at once, not in a week.

The step holds the longest samples of the data, whatever steps they come in: as many as ``data.sequences_per_step``, so
that no step has longer ones or more tokens; or filled up to ``data.tokens_per_step`` by the longest that still fit, so
that none has a longer one, and more tokens only by what the last gap leaves. It runs forward and backward by a plan of
its own, while AdamW's moments, where they do not exist yet, have their room taken. Afterwards parameters, moments,
random numbers, the data's order and the routers' kept counts are what they were, and gradients are dropped. Price: one
step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from nestsp.batch import SequenceBatch
from nestsp.data.stream import SampleStream
from nestsp.errors import InfeasibleError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.router_loss import remember_counts
from nestsp.planners.task import Planned, PlanningTask
from nestsp.train.prepare import Prepared
from nestsp.train.world import World
from nestsp.units import format_bytes, format_count, plural

__all__ = ["longest_step", "rehearse"]

Ints = npt.NDArray[np.int64]

# What PyTorch says where a CPU has no memory left; GPUs have an exception of their own.
_CPU_WORDS = "can't allocate memory"


def longest_step(stream: SampleStream) -> SequenceBatch:
    """A step with the longest sample: first its run of ``stream.together``, then those of the most tokens."""
    runs = stream.lengths.reshape(-1, stream.together)
    tokens = runs.sum(1)
    first = int(runs.max(1).argmax())
    order = np.argsort(-tokens, kind="stable")
    order = np.concatenate([[first], order[order != first]])
    if stream.sequences_per_step is not None:
        order = order[: stream.sequences_per_step // stream.together]
    else:
        assert stream.tokens_per_step is not None
        order = order[_filled(tokens[order], stream.tokens_per_step)]
    ids = (order[:, None] * stream.together + np.arange(stream.together)).reshape(-1)
    return SequenceBatch(tuple(ids.tolist()), tuple(stream.lengths[ids].tolist()))


def _filled(tokens: Ints, num_tokens: int) -> Ints:
    """Places of what fills a step up: the first in any case, then, of the others, which fall, each that still fits."""
    falling = tokens[1:]
    taken, left, place = [0], num_tokens - int(tokens[0]), 0
    while True:
        place = max(place, int(np.searchsorted(-falling, -left)))  # all before it are more than what is left
        if place >= falling.size:
            return np.array(taken, dtype=np.int64)
        taken.append(place + 1)
        left -= int(falling[place])
        place += 1


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
        InfeasibleError: This rank ran out of memory.
    """
    batch = longest_step(prepared.stream)
    plan = Planned.from_json(world.first(lambda: task.solver()(batch).to_json())).plan
    cost = task.cost()

    def check() -> None:
        task.check(plan, cost)
        executor.check(plan)

    world.together(check)
    put_back = remember_counts(executor)
    what = f"{plural(batch.num_sequences, 'sequence')} of {plural(batch.num_tokens, 'token')}"
    try:
        with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
            room = [] if optimizer.state else _moments(executor.root)
            run(executor.load(plan, prepared.samples.read), batch)
            del room
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_WORDS not in str(error):
            raise
        raise InfeasibleError(
            f"the step of the longest samples ({what}, the longest {format_count(batch.lengths[0])}) ran out of memory "
            f"on rank {world.rank} ({' '.join(str(error).split())[:200]}), but every step must fit; lower "
            f"cluster.memory_per_rank from {format_bytes(task.memory_per_rank_bytes)}, so that plans leave more free, "
            "or lower data.max_length"
        ) from None
    finally:
        optimizer.zero_grad(set_to_none=True)
        executor.timer.clear()
        put_back()
    number = len(plan.microbatches)
    return f"the step of the longest samples fits: {what} in {number} microbatch{'' if number == 1 else 'es'}"


def _moments(root: torch.nn.Module) -> list[torch.Tensor]:
    """As much memory as AdamW's two moments take after its first step."""
    shards = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in root.parameters()
        if parameter.requires_grad
    ]
    return [torch.zeros_like(shard) for shard in shards for _ in range(2)]
