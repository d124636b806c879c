"""FlexSP's own ground: its published cost model, four Wikipedia batches, and what its authors' solver makes of them.

    python -m benchmarks.planning.flexsp_ground [--flexsp] [--nodes 1] [--lengths FILE --seed 0]

Prints ms of each planner, nothing streamed, beside the reference and the communication-free bound; then what streaming
makes of the plans of nsp, and what overlapping the linear part as well would make of them at best. The 2,048 lengths
and the reference times lie in ``flexsp_batches.json``, with their source. ``--flexsp`` also solves the programmes,
which takes minutes. ``--lengths FILE --seed N`` draws four other batches from a corpus (.npz of lengths) instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.flexsp_model import (
    GPT_7B,
    FlexSPModel,
    communication_free_bound_s,
    flexsp_ground,
    overlapped_time_s,
    streamed_time_s,
)
from nestsp.batch import SequenceBatch
from nestsp.plan import Plan
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, StaticDegree
from nestsp.planners.flexsp import FlexSPGroups
from nestsp.planners.search import NestedGroups
from nestsp.report.tables import format_table


def main() -> None:
    """Plan the four batches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flexsp", action="store_true", help="also solve the programmes")
    parser.add_argument("--nodes", type=int, default=1, help="node limit of each programme")
    parser.add_argument("--lengths", type=Path, help="a corpus to draw other batches from, .npz with 'lengths'")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    given = parser.parse_args()
    data = json.loads(Path(__file__).with_name("flexsp_batches.json").read_text())
    ground = flexsp_ground(GPT_7B)
    planners: dict[str, Any] = {
        "static 64": StaticDegree(ground, 64),
        "batch-adaptive": BatchAdaptive(ground),
        "basp": BaspGroups(ground),
        "disjoint": DisjointGroups(ground),
        "nsp": NestedGroups(ground),
    }
    if given.flexsp:
        planners["flexsp"] = FlexSPGroups(ground, max_nodes=given.nodes)
    drawn = data["batches"] if given.lengths is None else draw(given.lengths, given.seed)
    reference = data["reference_ms"] if given.lengths is None else {}
    batches = [SequenceBatch.of_lengths(lengths) for lengths in drawn]
    bounds = [communication_free_bound_s(GPT_7B, batch) for batch in batches]
    rows = [["bound", *(f"{bound * 1e3:.0f}" for bound in bounds), "1.000", ""]]
    for name, times in reference.items():
        over = sum(ms / 1e3 / bound for ms, bound in zip(times, bounds, strict=True)) / len(bounds)
        rows.append([f"theirs: {name}", *(f"{ms:.0f}" for ms in times), f"{over:.3f}", ""])
    for name, planner in planners.items():
        began = time.process_time()
        judged = [planner.judge(batch) for batch in batches]
        cpu_s = (time.process_time() - began) / len(batches)
        rows.append(row(f"ours: {name}", [one.makespan_s for one in judged], bounds, f"{cpu_s * 1e3:.0f} ms"))
        if name == "nsp":
            later: dict[str, Callable[[FlexSPModel, Plan], float]] = {
                "streamed": streamed_time_s,
                "linear part overlapped too": overlapped_time_s,
            }
            for how, time_s in later.items():
                rows.append(row(f"ours: nsp, {how}", [time_s(GPT_7B, one.plan) for one in judged], bounds))
    print(format_table(["", "batch 0", "1", "2", "3", "mean over bound", "CPU a batch"], rows))


def row(name: str, times_s: list[float], bounds_s: list[float], last: str = "") -> list[str]:
    """One row of the table."""
    over = sum(seconds / bound for seconds, bound in zip(times_s, bounds_s, strict=True)) / len(bounds_s)
    return [name, *(f"{seconds * 1e3:.0f}" for seconds in times_s), f"{over:.3f}", last]


def draw(corpus: Path, seed: int) -> list[list[int]]:
    """Four batches of 512 sequences, prepared as the reference was: multiples of 128, none above 384,000 - 128."""
    lengths = np.load(corpus)["lengths"]
    rounded = -(-lengths // 128) * 128
    kept = rounded[rounded <= 384_000 - 128]
    picked = np.random.default_rng(seed).choice(kept, (4, 512), replace=False)
    return [batch.tolist() for batch in picked]


if __name__ == "__main__":
    main()
