"""What recomputation keeps: the memory that a placement leaves is spent where a byte saves most seconds.

A group that keeps its attention's output is spared the kernel and the exchanges of the recompute; the longer its
sequences, the more seconds that is for each byte. Whole layers that keep everything are spared all of it, but cost many
bytes. Outputs that save more for a byte than whole layers come first, longest first, as long as every rank of the group
has room; then as many of the last layers as all ranks have room for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestsp.cost.compute import StreamSize
from nestsp.cost.memory import RankTokens
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
    bare = tuple(dataclasses.replace(p, keep="none") for p in plan.microbatches[number].placements)
    plan = dataclasses.replace(plan, microbatches=(Microbatch(bare),))
    tokens = rank_tokens(plan, 0, cost)
    local = np.asarray(tokens.local, float)
    kept = np.zeros(len(local))
    free = limit - memory.peak_bytes(tokens)
    sizes = [StreamSize.of(plan.batch.lengths[s] for s in p.sequences) for p in bare]
    densities = [_output_density(p, size, cost) for p, size in zip(bare, sizes, strict=True)]
    layer_density = cost.compute.linear_s / (memory.layer_local - memory.layer_input)
    keeps = set()
    for index in sorted(range(len(bare)), key=lambda i: (-densities[i], i)):
        if densities[index] <= layer_density:
            break
        group, total = bare[index].group, sizes[index].tokens
        ranks = slice(group.first_rank, group.ranks.stop)
        more = np.diff(np.arange(group.degree + 1, dtype=np.int64) * total // group.degree).astype(float)
        needed = memory.num_layers * memory.kept_output * more
        if (needed <= free[ranks]).all():
            free[ranks] -= needed
            kept[ranks] += more
            keeps.add(index)
    held = RankTokens(tokens.local, tokens.exchanged, kept)
    low, high = 0, cost.shape.num_layers
    while low < high:  # the most layers that fit
        middle = (low + high + 1) // 2
        fits = (memory.peak_bytes(held, middle) <= limit).all()
        low, high = (middle, high) if fits else (low, middle - 1)
    placements = tuple(dataclasses.replace(p, keep="output") if i in keeps else p for i, p in enumerate(bare))
    return Microbatch(placements, low)


def _output_density(placement: Placement, size: StreamSize, cost: CostModel) -> float:
    """Seconds that a rank is spared for each byte that it keeps."""
    level, degree = placement.group.level, placement.group.degree
    heads = cost.shape.num_heads / degree
    kernel = float(cost.compute.best_attention_s("forward", heads, size.tokens, size.squares))
    exchanges = sum(link.seconds(size.tokens) for link in cost.comm.forward(level, placement.ring_degree))
    return (kernel + exchanges) / (cost.memory.kept_output * size.tokens / degree)
