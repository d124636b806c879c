"""``nestsp plan``: what each planner makes of one batch, without a GPU and without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile, preset_names
from nestsp.data.lengths import draw_batch, read_lengths
from nestsp.errors import ConfigError, InfeasibleError, did_you_mean
from nestsp.known_models import KNOWN_MODELS, known_model
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, Judged
from nestsp.planners.flexsp import FlexSPGroups
from nestsp.planners.ground import Ground, cost_ground
from nestsp.planners.search import NestedGroups
from nestsp.report.tables import PlannerRow, planner_table
from nestsp.report.trace import write_trace
from nestsp.schedule import make_schedule
from nestsp.shape import ModelShape, read_config_json
from nestsp.simulate import simulate
from nestsp.units import format_bytes, format_count, format_seconds, plural

__all__ = ["COSTED_PLANNERS", "make_model", "plan_lengths"]


class _Judge(Protocol):
    def judge(self, batch: SequenceBatch) -> Judged: ...


# "all" leaves out flexsp, which takes seconds to minutes where the others take milliseconds.
COSTED_PLANNERS: Mapping[str, Callable[[Ground], _Judge]] = {
    "batch-adaptive": BatchAdaptive,
    "basp": BaspGroups,
    "disjoint": DisjointGroups,
    "flexsp": FlexSPGroups,
    "nsp": NestedGroups,
}


def make_model(cluster: str, model: str, memory_gib: float | None = None) -> CostModel:
    """The cost model of a command line.

    Args:
        cluster: Hosts x ranks of each, and a preset or profile: ``8x8:h100``.
        model: A known model's name, or the path of a config.json.
        memory_gib: What a rank may use, if not the profile's own.

    Raises:
        ConfigError: One of them does not parse.
    """
    hosts, colon, hardware = cluster.partition(":")
    if not colon:
        raise ConfigError(
            f"--cluster is {cluster!r}, but it must name its hardware, such as 8x8:h100; "
            f"there are {', '.join(preset_names())}, or the path of a profile"
        )
    shape = known_model(model) if model.lower() in KNOWN_MODELS or not Path(model).exists() else _read_shape(model)
    limit = None if memory_gib is None else memory_gib * 2**30
    return make_cost_model(shape, Cluster.parse(hosts), load_profile(hardware), memory_per_rank_bytes=limit)


def plan_lengths(
    source: str,
    *,
    cluster: str,
    model: str,
    planner: str,
    max_tokens: int | None,
    max_length: int | None,
    seed: int,
    memory_gib: float | None,
    as_json: bool,
    trace: Path | None,
) -> None:
    """Print what each planner makes of one batch.

    Raises:
        NestspError: An argument is wrong, or nothing fits.
    """
    names = [name for name in COSTED_PLANNERS if name != "flexsp"] if planner == "all" else [planner]
    if planner != "all" and planner not in COSTED_PLANNERS:
        raise ConfigError(
            f"--planner is {planner!r}, but the planners are all, {', '.join(COSTED_PLANNERS)}"
            f"{did_you_mean(planner, COSTED_PLANNERS)}"
        )
    cost = make_model(cluster, model, memory_gib)
    lengths = read_lengths(source, num_samples=200_000, seed=seed)
    drawn = draw_batch(lengths, max_tokens=max_tokens, max_length=max_length)
    batch = drawn.batch
    say = (lambda text: None) if as_json else print
    limit = f" of {plural(max_length, 'token')}" if max_length else ""
    say(
        f"{plural(batch.num_sequences, 'sequence')}, {plural(batch.num_tokens, 'token')}, longest "
        f"{format_count(max(batch.lengths))}, on {plural(cost.tree.num_ranks, 'rank')} ({cost.profile.name}), "
        f"tree {cost.tree}"
    )
    if drawn.num_empty or drawn.num_too_long:
        say(
            f"dropped: {plural(drawn.num_empty, 'empty sequence')}, "
            f"{plural(drawn.num_too_long, 'sequence')} over the limit{limit}"
        )
    say(
        f"profile: {cost.profile.hardware}; {cost.profile.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host; "
        f"a rank may use {format_bytes(cost.memory_per_rank_bytes)}, {format_bytes(cost.memory.fixed)} before any token"
    )
    bound = lower_bound(batch, cost)
    say(f"no plan is faster than {format_seconds(bound.makespan_s)}; the ideal is {format_seconds(bound.ideal_s)}\n")
    rows = []
    ground = cost_ground(cost)
    for name in names:
        began = time.perf_counter()
        try:
            judged = COSTED_PLANNERS[name](ground).judge(batch)
        except InfeasibleError as error:
            rows.append(PlannerRow(name, None, time.perf_counter() - began, str(error)))
            continue
        planning_s = time.perf_counter() - began
        rows.append(PlannerRow(name, simulate(make_schedule(judged.plan), cost), planning_s))
    planned = [row for row in rows if row.timeline is not None]
    if not planned:
        raise InfeasibleError(rows[0].why_not)
    best = min(reversed(planned), key=lambda row: row.timeline.makespan_s if row.timeline else 0.0)
    assert best.timeline is not None
    if trace is not None:
        write_trace(simulate(best.timeline.schedule, cost, record=True), trace)
    if as_json:
        bounds = {"makespan_s": bound.makespan_s, "ideal_s": bound.ideal_s, "num_microbatches": bound.num_microbatches}
        print(json.dumps({"bound": bounds, "planners": [row.to_json(bound) for row in rows]}))
        return
    print(planner_table(rows, bound))
    print(f"\nthe plan of {best.planner}:")
    print(best.timeline.schedule.plan.format_tree())
    if trace is not None:
        print(f"\ntrace of {best.planner}: {trace}")


def _read_shape(path: str) -> ModelShape:
    return ModelShape.for_planning(read_config_json(Path(path)))
