"""The ground of a run: a cost model's prices, under the run's own limits and for what its executor can run.

Two limits hold for every rank in every microbatch: bytes, and optionally a cap on tokens. Packing knows one size a
sequence, so a token counts at least as many bytes as its part of the cap: both limits then hold exactly where one of
them decides, and a little early where both are near.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.plan import Capabilities, Microbatch, Plan
from nestsp.planners.ground import Ground, cost_ground
from nestsp.simulate import rank_tokens
from nestsp.units import format_bytes, format_count, plural

__all__ = ["CappedGround", "check_cap", "run_ground"]

Floats = npt.NDArray[np.float64]

# A cap is met to the token: this far below one token, rounding of sums must not count as passing it.
_ROUNDING = 1e-9
# Bytes per token, so few that there is always room.
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class CappedGround(Ground):
    """A ground with a cap on tokens beside its bytes.

    Attributes:
        max_tokens_per_rank: What a rank may hold in one microbatch.
        memory_bytes_per_token: For each level, bytes on each rank of a group for each token, the cap left out.
    """

    max_tokens_per_rank: int
    memory_bytes_per_token: tuple[float, ...]

    def bytes(self, lengths: Floats) -> Floats:
        """See `Ground.bytes`; parts are whole tokens."""
        degrees = self.degrees
        more = np.where(degrees > 1, degrees, 0)
        memory = np.array(self.memory_bytes_per_token)[:, None] * (lengths + more)
        each = self.free_bytes / self.max_tokens_per_rank * (1 - _ROUNDING)
        sizes: Floats = np.maximum(memory, np.ceil(lengths / degrees) * each)
        return sizes


def run_ground(
    cost: CostModel,
    can: Capabilities,
    max_tokens_per_rank: int | None = None,
    *,
    streaming: bool = True,
    rings: bool = True,
) -> Ground:
    """The ground of a cost model for plans that an executor can run.

    Args:
        cost: The model, cluster, hardware and memory limit.
        can: What the executor can run.
        max_tokens_per_rank: Cap on the tokens that a rank holds in a microbatch; None for none.
        streaming: Whether exchanges are hidden behind other groups' attention.
        rings: Whether groups may be rings and hybrids, if the executor has them.

    Raises:
        InfeasibleError: The model itself does not fit.
    """
    ground = cost_ground(cost, streaming=streaming, rings=rings and can.rings)
    if can.num_kept_layers:
        ground = _keep_layers(ground, cost)
    elif can.num_kept_layers == 0:
        ground = dataclasses.replace(ground, layer_s=0.0, layer_bytes=0.0)
    if max_tokens_per_rank is not None:
        per_token = ground.bytes_per_token
        each = ground.free_bytes / max_tokens_per_rank * (1 - _ROUNDING)
        values = {field.name: getattr(ground, field.name) for field in dataclasses.fields(ground)}
        values["bytes_per_token"] = tuple(
            max(size, each / ground.tree.degree(level)) for level, size in enumerate(per_token)
        )
        ground = CappedGround(**values, max_tokens_per_rank=max_tokens_per_rank, memory_bytes_per_token=per_token)
    of_memory, limited = ground.check, ground

    def check(batch: SequenceBatch) -> None:
        if max_tokens_per_rank is not None:
            check_cap(cost.tree, max_tokens_per_rank, batch.ids, batch.lengths)
        of_memory(batch)
        _check_longest(limited, batch, "set train.recompute = true, " if can.num_kept_layers else "")

    return dataclasses.replace(
        ground,
        check=check,
        finish=lambda plan: _finish(plan, cost, can, ground.finish),
    )


def check_cap(tree: GroupTree, max_tokens_per_rank: int, names: Sequence[int], lengths: Sequence[int]) -> None:
    """Prove that every sequence keeps the cap when it alone is split over all ranks.

    Args:
        tree: The groups.
        max_tokens_per_rank: The cap.
        names: What to call each sequence in the error.
        lengths: Tokens of each sequence.

    Raises:
        InfeasibleError: One does not; names the longest.
    """
    if not len(lengths):
        return
    longest = int(np.asarray(lengths).argmax())
    length, ranks = int(lengths[longest]), tree.num_ranks
    need = -(-length // ranks)
    if need > max_tokens_per_rank:
        enough = -(-length // max_tokens_per_rank)
        raise InfeasibleError(
            f"sequence {names[longest]} ({format_count(length)} tokens) needs {format_count(need)} tokens on each of "
            f"{plural(ranks, 'rank')}, but planner.max_tokens_per_rank is "
            f"{format_count(max_tokens_per_rank)}; raise it to {format_count(need)}, take {enough} ranks, or set "
            "data.max_length"
        )


def _check_longest(ground: Ground, batch: SequenceBatch, remedy: str) -> None:
    """Prove that the longest sequence fits on some group, with all that the executor must hold of it.

    Raises:
        InfeasibleError: It does not.
    """
    if not batch.num_sequences:
        return
    longest = max(range(batch.num_sequences), key=batch.lengths.__getitem__)
    need = float(ground.bytes(np.array([batch.lengths[longest]], float)).min())
    if need > ground.free_bytes:
        raise InfeasibleError(
            f"sequence {batch.ids[longest]} ({format_count(batch.lengths[longest])} tokens) needs {format_bytes(need)} "
            f"on a rank even on the group where it needs least, but {format_bytes(ground.free_bytes)} are free; "
            f"{remedy}take more ranks, or set data.max_length"
        )


def _keep_layers(ground: Ground, cost: CostModel) -> Ground:
    """The same prices of time, all layers' recompute spared, and the bytes of plans that keep every layer whole."""
    memory, tree, layers = cost.memory, cost.tree, cost.shape.num_layers
    degrees = [tree.degree(level) for level in range(tree.num_levels)]
    num_bytes = [memory.stream_bytes(degree, num_kept_layers=layers) for degree in degrees]
    free = cost.memory_per_rank_bytes - memory.fixed
    at_loss = (free - memory.loss_slice) / memory.loss_bytes_per_token(layers)
    return dataclasses.replace(
        ground,
        bytes_per_token=tuple(num_bytes),
        free_bytes=min(free, at_loss * num_bytes[-1]),
        token_bytes=0.0,  # all layers are kept, whatever is held: it is paid above
        layer_bytes=_NOTHING,
    )


def _finish(plan: Plan, cost: CostModel, can: Capabilities, spend: Callable[[Plan], Plan]) -> Plan:
    """Decide what recomputation keeps, as far as the executor leaves a choice."""
    if can.num_kept_layers is None:
        return spend(plan)
    if can.num_kept_layers:
        kept = (dataclasses.replace(m, num_kept_layers=can.num_kept_layers) for m in plan.microbatches)
        return dataclasses.replace(plan, microbatches=tuple(kept))
    if not can.kept_outputs:
        return plan
    kept = (_keep_outputs(plan, number, cost) for number in range(len(plan.microbatches)))
    return dataclasses.replace(plan, microbatches=tuple(kept))


def _keep_outputs(plan: Plan, number: int, cost: CostModel) -> Microbatch:
    """Groups keep their attention's output where a byte saves most seconds, as long as all their ranks have room."""
    memory, microbatch = cost.memory, plan.microbatches[number]
    tokens = rank_tokens(plan, number, cost)
    free = cost.memory_per_rank_bytes - memory.peak_bytes(dataclasses.replace(tokens, kept=0.0))
    saved = []
    for index, placement in enumerate(microbatch.placements):
        lengths = np.array([plan.batch.lengths[s] for s in placement.sequences], float)
        total, degree = float(lengths.sum()), placement.group.degree
        kernel = cost.compute.best_attention_s("forward", 1.0, total, float(cost.compute.squares(lengths).sum()))
        links = cost.comm.forward(placement.group.level, placement.ring_degree)
        seconds = float(kernel) * cost.shape.num_heads / degree + sum(link.seconds(total) for link in links)
        saved.append((-seconds * degree / total, index))
    placements = list(microbatch.placements)
    for _, index in sorted(saved):
        group = placements[index].group
        needed = memory.kept_output_bytes * -(-plan.group_tokens(placements[index]) // group.degree)
        ranks = slice(group.first_rank, group.ranks.stop)
        if needed <= free[ranks].min():
            free[ranks] -= needed
            placements[index] = dataclasses.replace(placements[index], keep="output")
    return dataclasses.replace(microbatch, placements=tuple(placements))
