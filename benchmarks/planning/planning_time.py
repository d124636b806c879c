"""How long ``nsp`` takes to plan one batch, finalists included, and the simulator to walk one plan with all events.

    python -m benchmarks.planning.planning_time [--largest]

Qwen3-30B-A3B on hosts of 8 H100 (preset ``h100``), lengths of Wikipedia. CPU time of one process, so other load matters
little; least and median of several runs. ``--largest`` also plans 65,536 sequences on 8,192 ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from benchmarks.planning.where import where
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.data.lengths import read_lengths
from nestsp.known_models import known_model
from nestsp.plan import Plan
from nestsp.planners import make_planner
from nestsp.planners.ground import cost_ground
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate
from nestsp.units import format_count, format_seconds

LIMIT = 384_000
# sequences, ranks, runs, most seconds
SIZES = ((512, 64, 20, 0.05), (8_192, 1_024, 3, 1.0))
LARGEST = (65_536, 8_192, 1, 20.0)
MOST_TIMELINE_S = 1.0


def timed(action: Callable[[], object], runs: int) -> list[float]:
    """CPU seconds of each run."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        action()
        times.append(time.process_time() - began)
    return times


def make_case(num_sequences: int, num_ranks: int) -> tuple[CostModel, SequenceBatch]:
    """A cluster and the first sequences of the table that it draws from."""
    lengths = read_lengths("wikipedia", num_samples=num_sequences, seed=0)[:num_sequences]
    cost = make_cost_model(known_model("qwen3-30b-a3b"), Cluster(num_ranks // 8, 8), load_profile("h100"))
    return cost, SequenceBatch.of_lengths([min(int(length), LIMIT) for length in lengths])


def line(what: str, times: list[float], most_s: float, more: str = "") -> str:
    """A line for people."""
    least, median = format_seconds(min(times)), format_seconds(statistics.median(times))
    runs = "one run" if len(times) == 1 else f"least of {len(times)}; median {median}"
    return f"{what}: {least} ({runs}), target {format_seconds(most_s)}{more}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true", help="65,536 sequences on 8,192 ranks, too")
    given = parser.parse_args()
    print(f"{where()}, load {os.getloadavg()[0]:.1f}; CPU time")
    for num_sequences, num_ranks, runs, most_s in (*SIZES, *([LARGEST] if given.largest else [])):
        cost, batch = make_case(num_sequences, num_ranks)
        planner = make_planner("nsp", cost_ground(cost))
        plans: list[Plan] = []
        times = timed(lambda: plans.append(planner.judge(batch).plan), runs)  # noqa: B023  (called at once)
        timeline = simulate(make_schedule(plans[-1]), cost)
        gap = timeline.makespan_s / lower_bound(batch, cost).makespan_s - 1
        what = f"{format_count(num_sequences)} sequences on {format_count(num_ranks)} ranks"
        print(line(what, times, most_s, f"; {gap:.1%} above the bound"), flush=True)
    cost, batch = make_case(2_048, 64)
    plan = make_planner("nsp", cost_ground(cost)).judge(batch).plan
    walked = timed(lambda: simulate(make_schedule(plan), cost), 10)
    recorded = timed(lambda: simulate(make_schedule(plan), cost, record=True), 5)
    print(f"timeline of that on 64 ranks without events: {format_seconds(min(walked))} (least of 10)")
    print(line("with all events", recorded, MOST_TIMELINE_S))


if __name__ == "__main__":
    main()
