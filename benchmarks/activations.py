"""How near the memory model is: activations alive at the end of the forward pass, and at the peak, on each rank.

    python -m benchmarks.activations

Each row is a model, a plan for four ranks and a choice of what recomputation keeps. One process takes the place of each
rank in turn, with a backend that moves nothing: what lives, and for how long, does not depend on what arrives.
Parameters and their gradients are not counted and nothing is sharded, so that what is counted are activations and
buffers (`benchmarks.live`). Target: what is held at the end of the forward pass within 5 % of the model, on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import where
from benchmarks.live import LiveBytes
from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.comm.groups import Link, make_links
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.execute.executor import Executor
from nestsp.execute.local import weighted_sum
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Keep, Microbatch, Placement, Plan
from nestsp.simulate import rank_tokens

__all__ = ["CELLS", "TARGET", "Cell", "Held", "measure"]

TARGET = 0.05
SLICE_TOKENS = 32
TREE = GroupTree((2, 2))

DENSE = {"model_type": "llama", "intermediate_size": 256}
NORMED = {"model_type": "qwen3", "intermediate_size": 256, "head_dim": 32}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    "norm_topk_prob": True,
}
WINDOWED = {"model_type": "mistral", "intermediate_size": 256, "sliding_window": 64}
COMMON = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
# Of the groups of four ranks, of the left two, the right two, and each rank alone; in parts of a rank's tokens.
LENGTHS = (1.5, 0.7, 0.6, 0.4, 0.5, 0.3, 0.2, 0.1)

Kinds = tuple[int, int]  # ring degrees of the root and of the pairs


@dataclass(frozen=True, slots=True)
class Cell:
    """One row.

    Attributes:
        name: For people.
        keys: Of the model's config, beyond `COMMON`.
        kinds: Ring degree of the group of four and of those of two; None if every rank works alone.
        keep: What the groups keep for recomputation.
        num_kept_layers: Layers that keep everything.
        num_slices: Slices of heads in which the pairs exchange.
        dtype: Of computation.
        rank_tokens: Tokens of a rank, about.
    """

    name: str
    keys: Mapping[str, Any]
    kinds: Kinds | None
    keep: Keep = "none"
    num_kept_layers: int = 0
    num_slices: int = 1
    dtype: torch.dtype = torch.float32
    rank_tokens: int = 256

    def plan(self) -> Plan:
        """Groups of all levels at once, or each rank alone."""
        lengths = [int(part * self.rank_tokens) | 1 for part in LENGTHS]
        groups = [TREE.group(2, rank) for rank in range(TREE.num_ranks)]
        placements = [Placement(group, (4 + rank,), 1, self.keep) for rank, group in enumerate(groups)]
        if self.kinds is None:
            placements = [dataclasses.replace(p, sequences=(n, 4 + n)) for n, p in enumerate(placements)]
        else:
            root, pair = self.kinds
            placements.append(Placement(TREE.group(0, 0), (0, 3), root, self.keep))
            pairs = [Placement(TREE.group(1, 2 * n), (1 + n,), pair, self.keep) for n in (0, 1)]
            placements += [dataclasses.replace(p, num_slices=self.num_slices) for p in pairs]
        microbatch = Microbatch(tuple(sorted(placements, key=lambda p: p.group)), self.num_kept_layers)
        return Plan(TREE, SequenceBatch.of_lengths(lengths), (microbatch,), (0, 1, 2), "benchmark")


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank: measured, and by the memory model."""

    held: int
    held_model: float
    peak: int
    peak_model: float

    @property
    def held_error(self) -> float:
        """Model over measurement, minus 1, at the end of the forward pass."""
        return self.held_model / self.held - 1

    @property
    def peak_error(self) -> float:
        """The same at the peak."""
        return self.peak_model / self.peak - 1


def _cells() -> tuple[Cell, ...]:
    models = {"llama": DENSE, "qwen3": NORMED, "qwen3-moe": EXPERTS}
    places: dict[str, Kinds | None] = {"alone": None, "ulysses": (1, 1), "ring": (4, 2), "hybrid": (2, 1)}
    keeps: tuple[tuple[str, Keep, int], ...] = (
        ("none", "none", 0),
        ("output", "output", 0),
        ("2 layers", "none", 2),
        ("2 layers, output", "output", 2),
        ("all layers", "none", 4),
    )
    cells = [
        Cell(f"{model}, {place}, keeps {keep}", keys, kinds, what, layers)
        for model, keys in models.items()
        for place, kinds in places.items()
        for keep, what, layers in keeps
    ]
    cells += [
        dataclasses.replace(cell, name=f"{cell.name}, bf16", dtype=torch.bfloat16)
        for cell in cells
        if cell.name.startswith("qwen3") and cell.keep == "none"
    ]
    cells += [Cell(f"mistral, ulysses, keeps {keep}", WINDOWED, (1, 1), what, n) for keep, what, n in keeps]
    cells += [Cell(f"qwen3, in slices, keeps {keep}", NORMED, (1, 1), what, n, 2) for keep, what, n in keeps]
    return tuple(cells)


CELLS = _cells()


def measure(cells: Sequence[Cell], ranks: Sequence[int] = range(TREE.num_ranks)) -> list[list[Held]]:
    """Run each cell twice as each of some ranks, and count in the second run; by cell, then rank."""
    assert not dist.is_initialized(), "this takes the place of every rank itself"
    device = torch.device("cpu")
    by_rank = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=TREE.num_ranks)
        try:
            links = make_links(TREE, rank, device, ranks_per_host=TREE.num_ranks, timeout=timedelta(seconds=60))
            by_rank.append([_measure(rank, links, cell, device) for cell in cells])
        finally:
            dist.destroy_process_group()
    return [list(each) for each in zip(*by_rank, strict=True)]


def _measure(rank: int, links: Mapping[int, Link], cell: Cell, device: torch.device) -> Held:
    plan = cell.plan()
    plan.check()
    config = model_config({**COMMON, **cell.keys})
    shape = model_shape(config)
    root = LossRoot(build_model(config, seed=0), SLICE_TOKENS).to(cell.dtype)
    install_layer_runner(root.model)
    executor = Executor(root, shape, links, rank, device, CpuFlash(), AttentionTimer(device))
    executor.check(plan)
    ids = np.random.default_rng(0).integers(0, COMMON["vocab_size"], max(plan.batch.lengths))

    def read(_: int, start: int, stop: int) -> Any:
        return ids[start:stop]

    executor.run(executor.load(plan, read))
    known = [*root.parameters(), *root.buffers(), *(p.grad for p in root.parameters() if p.grad is not None)]
    with LiveBytes(known) as live:
        (local,) = executor.load(plan, read).microbatches
        loss = weighted_sum(local.tokens, root(local.tokens, local.attention))
        held = live.now
        loss.backward()
    cost = make_cost_model(
        shape,
        Cluster(1, TREE.num_ranks),
        load_profile("cpu"),
        tree=TREE,
        loss_slice_tokens=SLICE_TOKENS,
        element_bytes=cell.dtype.itemsize,
    )
    tokens = rank_tokens(plan, 0, cost)
    peaks = cost.memory.peak_bytes(tokens, cell.num_kept_layers) - cost.memory.fixed
    return Held(held, float(cost.memory.held_bytes(tokens, cell.num_kept_layers)[rank]), live.peak, float(peaks[rank]))


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"activations of the rank that is furthest off, {where()}")
    print("| model, groups, what is kept | held, MiB | model, off by | peak, MiB | model, off by |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for cell in CELLS:
        (ranks,) = measure([cell])
        held = max(ranks, key=lambda each: abs(each.held_error))
        peak = max(ranks, key=lambda each: abs(each.peak_error))
        print(
            f"| {cell.name} | {held.held / 2**20:.1f} | {held.held_error:+.1%} "
            f"| {peak.peak / 2**20:.1f} | {peak.peak_error:+.1%} |",
            flush=True,
        )
        worst = max(worst, abs(held.held_error))
    print(f"held, furthest off: {worst:.1%}; target at most {TARGET:.0%}: {'reached' if worst <= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
