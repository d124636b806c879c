"""FlexSP's own ground: its published cost model, four Wikipedia batches, and what its authors' solver makes of them.

    python -m benchmarks.planning.flexsp_ground [--flexsp] [--nodes 1]

Prints ms of each planner, nothing streamed, beside the reference and the communication-free bound. The 2,048 lengths
and the reference times lie in ``flexsp_batches.json``, with their source. ``--flexsp`` also solves the programmes,
which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.planning.flexsp_model import GPT_7B, communication_free_bound_s, flexsp_ground
from nestsp.batch import SequenceBatch
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, StaticDegree
from nestsp.planners.flexsp import FlexSPGroups
from nestsp.planners.search import NestedGroups
from nestsp.report.tables import format_table


def main() -> None:
    """Plan the four batches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flexsp", action="store_true", help="also solve the programmes")
    parser.add_argument("--nodes", type=int, default=1, help="node limit of each programme")
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
    batches = [SequenceBatch.of_lengths(lengths) for lengths in data["batches"]]
    bounds = [communication_free_bound_s(GPT_7B, batch) for batch in batches]
    rows = [["bound", *(f"{bound * 1e3:.0f}" for bound in bounds), "1.000", ""]]
    for name, times in data["reference_ms"].items():
        over = sum(ms / 1e3 / bound for ms, bound in zip(times, bounds, strict=True)) / len(bounds)
        rows.append([f"theirs: {name}", *(f"{ms:.0f}" for ms in times), f"{over:.3f}", ""])
    for name, planner in planners.items():
        began = time.process_time()
        times = [planner.judge(batch).makespan_s for batch in batches]
        cpu_s = (time.process_time() - began) / len(batches)
        over = sum(seconds / bound for seconds, bound in zip(times, bounds, strict=True)) / len(bounds)
        rows.append([f"ours: {name}", *(f"{s * 1e3:.0f}" for s in times), f"{over:.3f}", f"{cpu_s * 1e3:.0f} ms"])
    print(format_table(["", "batch 0", "1", "2", "3", "mean over bound", "CPU a batch"], rows))


if __name__ == "__main__":
    main()
