"""What recomputation keeps: the memory that a placement leaves is spent where a byte saves most seconds.

A group that keeps its attention's output is spared the kernel and the exchanges of the recompute; the longer its
sequences, the more seconds that is for each byte. Whole layers that keep everything are spared all of it, but cost many
bytes. Outputs that save more for a byte than whole layers come first, longest first, as long as every rank of the group
has room; then as many of the last layers as all ranks have room for. Where that is all of them, no output is kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from nestsp.cost.model import CostModel
from nestsp.plan import Microbatch, Placement, Plan
from nestsp.simulate import rank_tokens

__all__ = ["spend_memory"]


def spend_memory(plan: Plan, cost: CostModel) -> Plan:
    """The same placement, keeping as much as is worth it and fits."""
    microbatches = tuple(_spend(plan, number, cost) for number in range(len(plan.microbatches)))
    return dataclasses.replace(plan, microbatches=microbatches)


def _spend(plan: Plan, number: int, cost: CostModel) -> Microbatch:
    memory, limit = cost.memory, cost.memory_per_rank_bytes
    placed = plan.microbatches[number].placements
    bare = tuple(p if p.keep == "none" else dataclasses.replace(p, keep="none") for p in placed)
    plan = dataclasses.replace(plan, microbatches=(Microbatch(bare),))
    tokens = rank_tokens(plan, 0, cost)
    free = limit - memory.peak_bytes(tokens)
    lengths = plan.batch.lengths
    streams = [np.array([lengths[s] for s in p.sequences], float) for p in bare]
    totals = [int(stream.sum()) for stream in streams]
    densities = _output_densities(bare, streams, cost)
    layer_density = cost.compute.linear_s / (memory.layer_local - memory.layer_input)
    keeps = set()
    for index in np.argsort(-densities, kind="stable").tolist():
        if densities[index] <= layer_density:
            break
        group = bare[index].group
        ranks = slice(group.first_rank, group.ranks.stop)
        more = -(-totals[index] // group.degree)
        needed = memory.kept_output_bytes * more
        if needed <= free[ranks].min():
            free[ranks] -= needed
            keeps.add(index)
    placements = tuple(dataclasses.replace(p, keep="output") if i in keeps else p for i, p in enumerate(bare))
    held = rank_tokens(dataclasses.replace(plan, microbatches=(Microbatch(placements),)), 0, cost)
    low, high = 0, cost.shape.num_layers
    while low < high:  # the most layers that fit
        middle = (low + high + 1) // 2
        fits = (memory.peak_bytes(held, middle) <= limit).all()
        low, high = (middle, high) if fits else (low, middle - 1)
    if low == cost.shape.num_layers and (memory.peak_bytes(tokens, low) <= limit).all():
        placements = bare  # no recompute is spared, and backward would bring queries, keys and values once more
    return Microbatch(placements, low)


def _output_densities(
    placements: tuple[Placement, ...], streams: list[npt.NDArray[np.float64]], cost: CostModel
) -> npt.NDArray[np.float64]:
    """Seconds that a rank is spared for each byte that it keeps, float64 [placements]."""
    degrees = np.array([p.group.degree for p in placements], float)
    tokens = np.array([stream.sum() for stream in streams])
    squares = np.array([cost.compute.squares(stream).sum() for stream in streams])
    links = [cost.comm.forward(p.group.level, p.ring_degree) for p in placements]
    exchanges = np.array([sum(link.latency_s for link in each) for each in links], float)
    exchanges += np.array([sum(link.s_per_token for link in each) for each in links]) * tokens
    kernels = cost.compute.best_attention_s("forward", 1.0, tokens, squares) * cost.shape.num_heads / degrees
    densities: npt.NDArray[np.float64] = (kernels + exchanges) / (cost.memory.kept_output * tokens / degrees)
    return densities
