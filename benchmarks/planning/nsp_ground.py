"""NSP's ground: two mixture-of-experts models, three corpora, three kinds of hardware, all planners but the programme.

    python -m benchmarks.planning.nsp_ground [--batches 4] [--limit 384000] [--only "64 h800"] [--flexsp] [--nodes 1]

A batch is what a corpus gives in seeded order until 2,000,000 tokens; longer samples than the limit are dropped. Best
static is the one degree that is best in hindsight over all batches of the cell and fits each. Estimated by the
simulator, nothing measured. ``--flexsp`` also solves FlexSP's programmes, minutes a batch; ``--only`` takes the cells
whose name holds those words.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.data.lengths import draw_batch, read_lengths
from nestsp.errors import InfeasibleError
from nestsp.known_models import known_model
from nestsp.planners import Planner
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, StaticDegree, best_static_degree
from nestsp.planners.flexsp import FlexSPGroups
from nestsp.planners.ground import cost_ground
from nestsp.planners.search import NestedGroups
from nestsp.report.tables import format_table

MODELS = {"qwen3-30b-a3b": (8,), "qwen3-235b-a22b": (8, 16)}  # hosts of 8 ranks
PROFILES = ("a100-80g", "h100", "h800")
CORPORA = ("wikipedia", "github", "arxiv")
HEAD = ("cell", "best static", "over it", "over adaptive", "over basp", "over disjoint", "over flexsp", "gap",
        "largest", "CPU")  # fmt: skip


def cell(cost: CostModel, batches: Sequence[SequenceBatch], flexsp_nodes: int | None = None) -> list[str]:
    """One row of the table, without its name; FlexSP's programmes are solved if there is a node limit for them."""
    try:
        bounds = [lower_bound(batch, cost).makespan_s for batch in batches]
        ground = cost_ground(cost)
        began = time.process_time()
        nested = [NestedGroups(ground).judge(batch).makespan_s for batch in batches]
        cpu_s = (time.process_time() - began) / len(batches)
        planners: list[Planner] = [BatchAdaptive(ground), BaspGroups(ground), DisjointGroups(ground)]
        if flexsp_nodes is not None:
            planners.append(FlexSPGroups(ground, max_nodes=flexsp_nodes))
        others = [sum(planner.judge(batch).makespan_s for batch in batches) for planner in planners]
    except InfeasibleError as error:
        return [f"infeasible: {error}"]
    degree = best_static_degree(ground, batches)
    total = sum(nested)
    static = ["none fits", "-"]
    if degree is not None:
        planner = StaticDegree(ground, degree)
        static = [str(degree), f"{sum(planner.judge(batch).makespan_s for batch in batches) / total:.2f} x"]
    gaps = [seconds / bound - 1 for seconds, bound in zip(nested, bounds, strict=True)]
    ratios = [f"{other / total:.2f} x" for other in others] + ["-"] * (flexsp_nodes is None)
    return [*static, *ratios, f"{sum(gaps) / len(gaps):.1%}", f"{max(gaps):.1%}", f"{cpu_s * 1e3:.0f} ms"]


def main() -> None:
    """Plan every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4, help="batches of each cell")
    parser.add_argument("--limit", type=int, default=384_000, help="longest sample, in tokens")
    parser.add_argument("--only", default="", help="words that a cell's name must hold")
    parser.add_argument("--flexsp", action="store_true", help="also solve the programmes")
    parser.add_argument("--nodes", type=int, default=1, help="node limit of each programme")
    given = parser.parse_args()
    rows = []
    for model, host_counts in MODELS.items():
        for hosts in host_counts:
            for profile in PROFILES:
                cost = make_cost_model(known_model(model), Cluster(hosts, 8), load_profile(profile))
                for corpus in CORPORA:
                    name = f"{model} {hosts * 8} {profile} {corpus}"
                    if given.only not in name:
                        continue
                    drawn = [read_lengths(corpus, num_samples=100_000, seed=seed) for seed in range(given.batches)]
                    batches = [draw_batch(each, max_tokens=2_000_000, max_length=given.limit).batch for each in drawn]
                    rows.append([name, *cell(cost, batches, given.nodes if given.flexsp else None)])
    print(format_table(HEAD, rows))


if __name__ == "__main__":
    main()
