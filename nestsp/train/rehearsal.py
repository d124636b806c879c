"""Runs the data's longest samples once before the first step, so that what does not fit shows at once, not in a week.

The step holds the longest sample with those that stay together with it, whatever steps they come in, and is filled by
the runs of most tokens: up to ``data.sequences_per_step``, or up to ``data.tokens_per_step`` by those that still fit. A
run is there as often as an epoch may take it. Where the runs of most tokens make a larger step without the longest
sample, that one runs too. So no step has a longer sample; nor more tokens with ``data.sequences_per_step``, and with
``data.tokens_per_step`` only by what the last gap leaves. Each runs forward and backward by a plan of its own, while
AdamW's moments, where they do not exist yet, have their room taken. Afterwards parameters, moments, random numbers, the
data's order and the routers' kept counts are what they were, and gradients are dropped. Price: one step, or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from nestsp.batch import SequenceBatch
from nestsp.data.stream import SampleStream, Share
from nestsp.errors import InfeasibleError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.router_loss import remember_counts
from nestsp.plan import Plan
from nestsp.planners.task import Planned, PlanningTask
from nestsp.train.prepare import Prepared
from nestsp.train.world import World
from nestsp.units import format_bytes, format_count, plural

__all__ = ["longest_steps", "rehearse"]

Ints = npt.NDArray[np.int64]

# What PyTorch says where a CPU has no memory left; GPUs have an exception of their own.
_CPU_WORDS = "can't allocate memory"
# Of what `longest_steps` gives.
_NAMES = ("the step of the longest samples", "the step of the most tokens")


def longest_steps(stream: SampleStream) -> tuple[SequenceBatch, ...]:
    """A step with the longest sample and, if it has more tokens, the step of the runs of most tokens.

    Each is of whole runs of ``stream.together`` samples, as often as an epoch may take them.
    """
    runs = stream.lengths.reshape(-1, stream.together)
    tokens, longest = runs.sum(1), runs.max(1)
    order = _most_first(stream, tokens)
    first = int(np.where(longest == longest.max(), tokens, 0).argmax())
    with_longest = _step(stream, tokens, np.concatenate([[first], order[order != first]]))
    fullest = _step(stream, tokens, order)
    return (with_longest, fullest) if fullest.num_tokens > with_longest.num_tokens else (with_longest,)


def _most_first(stream: SampleStream, tokens: Ints) -> Ints:
    """Runs that an epoch may take, those of most tokens first; taken again, a run's number grows by all there are."""
    taken, first = [], 0
    for share in stream.shares or (Share(stream.lengths.size, stream.lengths.size),):
        num_runs, num_taken = share.num_samples // stream.together, share.num_taken // stream.together
        # Epochs begin at multiples of this in the decks, so one spans at most so many of them.
        apart = math.gcd(num_runs, num_taken)
        num_decks = (num_taken // apart - 2) // (num_runs // apart) + 2
        order = first + np.argsort(-tokens[first : first + num_runs], kind="stable")
        again = np.arange(num_runs * num_decks) % num_decks
        taken.append((np.repeat(order, num_decks) + again * tokens.size)[:num_taken])
        first += num_runs
    every = np.concatenate(taken)
    return every[np.argsort(-tokens[every % tokens.size], kind="stable")]


def _step(stream: SampleStream, tokens: Ints, order: Ints) -> SequenceBatch:
    """The step that is filled by runs in an order: one, and then those of falling numbers of tokens."""
    order = order[: stream.num_samples // stream.together]  # no step crosses epochs
    if stream.sequences_per_step is not None:
        order = order[: stream.sequences_per_step // stream.together]
    else:
        assert stream.tokens_per_step is not None
        order = order[_filled(tokens[order % tokens.size], stream.tokens_per_step)]
    ids = (order[:, None] * stream.together + np.arange(stream.together)).reshape(-1)
    return SequenceBatch(tuple(ids.tolist()), tuple(stream.lengths[ids % stream.lengths.size].tolist()))


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
    """Run the longest steps and forget them; every rank must call it.

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
        NestspError: A step cannot be planned; on every rank.
        InfeasibleError: This rank ran out of memory.
    """
    put_back = remember_counts(executor)
    fit = []
    for name, batch in zip(_NAMES, longest_steps(prepared.stream), strict=False):
        plan = _planned(batch, task, world, executor)
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
                f"{name} ({what}, the longest {format_count(max(batch.lengths))}) ran out of memory on rank "
                f"{world.rank} ({' '.join(str(error).split())[:200]}), but every step must fit; lower "
                f"cluster.memory_per_rank from {format_bytes(task.memory_per_rank_bytes)}, so that plans leave more "
                "free, or lower data.max_length"
            ) from None
        finally:
            optimizer.zero_grad(set_to_none=True)
            executor.timer.clear()
            put_back()
        number = len(plan.microbatches)
        fit.append(f"{name} fits: {what} in {number} microbatch{'' if number == 1 else 'es'}")
    return "; ".join(fit)


def _planned(batch: SequenceBatch, task: PlanningTask, world: World, executor: Executor) -> Plan:
    plan = Planned.from_json(world.first(lambda: task.solver()(batch).to_json())).plan
    cost = task.cost()

    def check() -> None:
        task.check(plan, cost)
        executor.check(plan)

    world.together(check)
    return plan


def _moments(root: torch.nn.Module) -> list[torch.Tensor]:
    """As much memory as AdamW's two moments take after its first step."""
    shards = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in root.parameters()
        if parameter.requires_grad
    ]
    return [torch.zeros_like(shard) for shard in shards for _ in range(2)]
