"""``nestsp plan``: what each planner makes of one batch, without a GPU and without torch.

The planners are imported only after the first lines are printed, so that those come within half a second.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from nestsp.cli.options import PlanningOptions
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile, preset_names
from nestsp.data.lengths import LENGTH_TABLES, Drawn, draw_batch, draw_batches, open_lengths
from nestsp.errors import ConfigError, InfeasibleError
from nestsp.known_models import KNOWN_MODELS, known_model
from nestsp.shape import ModelShape, read_config_json
from nestsp.units import format_bytes, format_count, format_seconds, plural

__all__ = ["describe_cost", "left_out", "make_model", "plan_lengths"]

_TABLE_TOKENS = 2_000_000
_TREE_LINES = 40


def make_model(cluster: str, model: str, options: PlanningOptions) -> CostModel:
    """The cost model of a command line.

    Args:
        cluster: Hosts x ranks of each, and a preset or profile: ``8x8:h100``.
        model: A known model's name, or the path of a config.json.
        options: What a rank may use, and what a host's network cards carry, if not the profile's own.

    Raises:
        ConfigError: One of them does not parse.
    """
    hosts, colon, hardware = cluster.partition(":")
    if not colon:
        raise ConfigError(
            f"--cluster is {cluster!r}, but it must name its hardware, such as 8x8:h100; "
            f"there are {', '.join(preset_names())}, or the path of a profile"
        )
    named = model.lower() in KNOWN_MODELS or not Path(model).exists()
    shape = known_model(model) if named else ModelShape.for_planning(read_config_json(Path(model)))
    profile = load_profile(hardware)
    if options.network is not None:
        profile = dataclasses.replace(profile, network_bytes_per_s=options.network * 1e9 / 8)
    limit = None if options.memory is None else options.memory * 2**30
    return make_cost_model(shape, Cluster.parse(hosts), profile, memory_per_rank_bytes=limit)


def describe_cost(cost: CostModel) -> str:
    """What an estimate rests on, in two lines."""
    network = (
        f"network {cost.profile.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host; " if cost.comm.crosses_hosts else ""
    )
    num_communicators = sum(cost.tree.degree(level) > 1 for level in range(cost.tree.num_levels))
    communicators = format_bytes(num_communicators * cost.profile.communicator_bytes)
    return (
        f"profile {cost.profile.name}: {cost.profile.hardware}\n"
        f"{network}a rank may use {format_bytes(cost.memory_per_rank_bytes)}; before any token it has "
        f"{format_bytes(cost.memory.fixed)}, {communicators} of them for {plural(num_communicators, 'communicator')}"
    )


def plan_lengths(
    source: str,
    *,
    cluster: str,
    model: str,
    options: PlanningOptions,
    max_tokens: int | None,
    as_json: bool = False,
    trace: Path | None = None,
) -> None:
    """Print what each planner makes of one batch.

    Raises:
        NestspError: An argument is wrong, or nothing fits.
    """
    names = options.planners
    cost = make_model(cluster, model, options)
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace is {trace}, but there is no folder {trace.absolute().parent}; make it first")
    if source not in LENGTH_TABLES and not as_json:
        print(f"reading {source}", flush=True)
    drawn, notes = _one_batch(source, max_tokens, options)
    batch = drawn.batch
    lines = [
        f"{plural(batch.num_sequences, 'sequence')}, {plural(batch.num_tokens, 'token')}, longest "
        f"{format_count(max(batch.lengths))}; {model} on {plural(cost.tree.num_ranks, 'rank')}, tree {cost.tree}",
        *notes,
        describe_cost(cost),
    ]
    if not as_json:
        print("\n".join(lines), flush=True)

    from nestsp.planners import make_planner
    from nestsp.planners.ground import cost_ground
    from nestsp.report.comparison import plan_batch
    from nestsp.report.placement import degree_table, placement_tree
    from nestsp.report.tables import planner_table
    from nestsp.report.trace import write_trace
    from nestsp.simulate import simulate
    from nestsp.train.console import Screen

    bound = lower_bound(batch, cost)
    if not as_json:
        print(
            f"estimated, nothing is run: no plan is faster than {format_seconds(bound.makespan_s)}; without "
            f"communication, imbalance and recomputation it would be {format_seconds(bound.ideal_s)}\n",
            flush=True,
        )
    ground = cost_ground(cost)
    rows = []
    with Screen(silent=as_json).progress("planning", len(names)) as bar:
        for name in names:
            rows.append(plan_batch(name, make_planner(name, ground), batch, cost))
            bar.set(len(rows), len(names))
    planned = [row for row in rows if row.timeline is not None]
    if not planned:
        raise InfeasibleError(rows[0].why_not)
    best = min(reversed(planned), key=lambda row: row.timeline.makespan_s if row.timeline else 0.0)
    assert best.timeline is not None
    plan = best.timeline.schedule.plan
    if trace is not None:
        try:
            write_trace(simulate(best.timeline.schedule, cost, record=True), trace)
        except OSError as error:
            raise ConfigError(
                f"--trace is {trace}, but that cannot be written ({error.strerror}); name a file in a folder that is "
                "there"
            ) from None
    if as_json:
        about = {
            "estimated": True,
            "model": model,
            "profile": cost.profile.name,
            "num_ranks": cost.tree.num_ranks,
            "network_bytes_per_s": cost.profile.network_bytes_per_s,
            "memory_per_rank_bytes": cost.memory_per_rank_bytes,
            "fixed_bytes": cost.memory.fixed,
            "notes": notes,
            "num_empty_dropped": drawn.num_empty,
            "num_over_length": drawn.num_too_long,
            "over_length": options.over_length,
        }
        bounds = {"makespan_s": bound.makespan_s, "ideal_s": bound.ideal_s, "num_microbatches": bound.num_microbatches}
        print(json.dumps({**about, "bound": bounds, "planners": [row.to_json(bound) for row in rows]}))
        return
    print(planner_table(rows, bound))
    print(f"\nthe plan of {best.planner}:")
    print(degree_table(plan))
    print()
    print(placement_tree(plan, max_lines=_TREE_LINES))
    if trace is not None:
        print(f"\nthe timeline of {best.planner} is in {trace}; open it in ui.perfetto.dev or chrome://tracing")


def _one_batch(source: str, max_tokens: int | None, options: PlanningOptions) -> tuple[Drawn, list[str]]:
    """One batch, and what there is to say about where it came from."""
    limit = options.max_length
    if source in LENGTH_TABLES:
        tokens = _TABLE_TOKENS if max_tokens is None else max_tokens
        (drawn,), lengths = draw_batches(
            source, 1, max_tokens=tokens, max_length=limit, over_length=options.policy, seed=options.seed
        )
    else:
        lengths = open_lengths(source, num_samples=0, seed=options.seed, tokenizer=options.tokenizer)
        if options.policy == "split":
            lengths = lengths.split(limit)
        drawn = draw_batch(
            lengths.values, max_tokens=max_tokens, max_length=limit, over_length=options.policy, cut=lengths.cut
        )
    notes = [*lengths.notes, *left_out(drawn.num_empty, drawn.num_too_long, options)]
    left = len(lengths.values) - drawn.stop
    if left and source not in LENGTH_TABLES:
        notes.append(f"the batch is full: {plural(left, 'sequence')} of {source} are left for later steps")
    return drawn, notes


def left_out(num_empty: int, num_too_long: int, options: PlanningOptions) -> list[str]:
    """A line for each kind of sequence that is not in a batch as it is in the source; none if all are.

    >>> left_out(1, 2, PlanningOptions(max_length=4096, over_length="truncate"))
    ['warning: dropped 1 empty sequence', 'warning: truncated 2 sequences over 4,096 tokens']
    """
    lines = [f"warning: dropped {plural(num_empty, 'empty sequence')}"] if num_empty else []
    if num_too_long:
        assert options.max_length is not None
        over = f"over {plural(options.max_length, 'token')}"
        if options.policy == "split":
            lines.append(f"warning: {plural(num_too_long, 'sequence')} of the batch are pieces of ones {over}")
        else:
            done = {"drop": "dropped", "truncate": "truncated"}[options.policy]
            lines.append(f"warning: {done} {plural(num_too_long, 'sequence')} {over}")
    return lines
