"""Weak scaling on paper: from 64 ranks on, four times as many with each line, as many tokens for each rank.

    python -m benchmarks.planning.scaling [--up-to 16384] [--seconds 60] [--batches 1]

Qwen3-30B-A3B on hosts of 8 H100 (preset ``h100``), Wikipedia, samples over 384,000 tokens dropped, 31,250 tokens a
rank; parameters are sharded over all ranks. Plans by ``nsp`` and ``batch-adaptive``, judged by the simulator, nothing
measured but the planners' CPU time. It stops after the first line on which planning one batch took longer than
``--seconds``.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.planning.where import where
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.data.lengths import draw_batches
from nestsp.known_models import known_model
from nestsp.planners import make_planner
from nestsp.planners.ground import cost_ground
from nestsp.report.tables import format_markdown
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate
from nestsp.units import format_count, format_seconds

TOKENS_PER_RANK = 31_250
LIMIT = 384_000
PLANNERS = ("batch-adaptive", "nsp")
HEAD = ("ranks", "sequences", "longest", "bound", "planner", "step", "to bound", "microbatches", "exposed",
        "CPU a batch", "simulation")  # fmt: skip


def measure(num_ranks: int, num_batches: int) -> tuple[list[list[str]], float]:
    """The lines of one size, and the longest that a planner took for a batch, CPU seconds."""
    cost = make_cost_model(known_model("qwen3-30b-a3b"), Cluster(num_ranks // 8, 8), load_profile("h100"))
    drawn, _ = draw_batches("wikipedia", num_batches, max_tokens=TOKENS_PER_RANK * num_ranks, max_length=LIMIT, seed=0)
    batches = [each.batch for each in drawn]
    bounds = [lower_bound(batch, cost).makespan_s for batch in batches]
    ground = cost_ground(cost)
    lines, slowest = [], 0.0
    for name in PLANNERS:
        began = time.process_time()
        plans = [make_planner(name, ground).judge(batch).plan for batch in batches]
        cpu_s = (time.process_time() - began) / len(batches)
        slowest = max(slowest, cpu_s)
        began = time.process_time()
        timelines = [simulate(make_schedule(plan), cost) for plan in plans]
        simulating_s = (time.process_time() - began) / len(batches)
        seconds = sum(timeline.makespan_s for timeline in timelines)
        lines.append(
            [
                format_count(num_ranks),
                format_count(sum(batch.num_sequences for batch in batches) // len(batches)),
                format_count(max(max(batch.lengths) for batch in batches)),
                format_seconds(sum(bounds) / len(batches)),
                name,
                format_seconds(seconds / len(batches)),
                f"+{seconds / sum(bounds) - 1:.1%}",
                f"{sum(len(plan.microbatches) for plan in plans) / len(plans):.1f}",
                f"{sum(timeline.exposed for timeline in timelines) / len(timelines):.1%}",
                format_seconds(cpu_s),
                format_seconds(simulating_s),
            ]
        )
    return lines, slowest


def main() -> None:
    """Plan ever larger batches, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up-to", type=int, default=16_384, help="the most ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop when a batch takes longer to plan")
    parser.add_argument("--batches", type=int, default=1, help="batches of each size")
    given = parser.parse_args()
    print(f"{where()}\n\n{format_markdown(HEAD, [])}")
    num_ranks = 64
    while num_ranks <= given.up_to:
        lines, slowest = measure(num_ranks, given.batches)
        print("\n".join(format_markdown(HEAD, lines).splitlines()[2:]), flush=True)
        if slowest > given.seconds and num_ranks * 4 <= given.up_to:
            print(f"\nstopped: planning a batch for {num_ranks:,} ranks took {slowest:.0f} s of CPU time")
            break
        num_ranks *= 4


if __name__ == "__main__":
    main()
