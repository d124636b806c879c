"""``nestsp simulate``: planners over many batches, without a GPU and without torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestsp.batch import SequenceBatch
from nestsp.cli.options import PlanningOptions
from nestsp.cli.plan import describe_cost, left_out, make_model
from nestsp.cluster import Cluster
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import CostProfile
from nestsp.data.lengths import draw_batches
from nestsp.errors import ConfigError, InfeasibleError
from nestsp.units import format_count

__all__ = ["simulate_cells"]

# Name of each change of the profile, and its factors on computation and on bandwidth.
_CHANGES = {
    "computation -20 %": (0.8, 1.0),
    "computation +20 %": (1.2, 1.0),
    "bandwidth -20 %": (1.0, 0.8),
    "bandwidth +20 %": (1.0, 1.2),
}


@dataclass(frozen=True, slots=True)
class _Question:
    """A cell before it is computed."""

    name: str
    cost: CostModel
    batches: tuple[SequenceBatch, ...]


def simulate_cells(
    sources: Sequence[str],
    *,
    clusters: Sequence[str],
    models: Sequence[str],
    num_batches: int,
    options: PlanningOptions,
    max_tokens: int,
    sensitivity: bool = False,
    scale: str | None = None,
    as_json: bool = False,
    as_markdown: bool = False,
    chart: Path | None = None,
) -> None:
    """Print how the planners compare in every cell: every source with every model on every cluster.

    Raises:
        NestspError: An argument is wrong, or nothing fits anywhere.
    """
    names = options.planners
    if as_json and as_markdown:
        raise ConfigError("--json and --markdown are both given, but one thing is printed; choose one")
    hosts = _host_counts(scale)
    if chart is not None:
        from nestsp.report.charts import check_chart

        check_chart(chart)
    costs = {
        (cluster, model): make_model(cluster, model, options) for cluster, model in itertools.product(clusters, models)
    }
    larger = {(named, count): _with_hosts(cost, count) for named, cost in costs.items() for count in hosts}
    say: Callable[[str], None] = (lambda text: None) if as_json or as_markdown else lambda text: print(text, flush=True)
    drawing: dict[str, Any] = {
        "max_length": options.max_length,
        "over_length": options.policy,
        "seed": options.seed,
        "tokenizer": options.tokenizer,
    }
    notes, questions = [], []
    for source in sources:
        say(f"reading {source}")
        drawn, lengths = draw_batches(source, num_batches, max_tokens=max_tokens, **drawing)
        batches = tuple(each.batch for each in drawn)
        notes.append(
            f"{source}: {len(batches):,} {'batch' if len(batches) == 1 else 'batches'} of up to "
            f"{format_count(max_tokens)} tokens, {format_count(sum(b.num_sequences for b in batches))} sequences"
        )
        notes += lengths.notes
        num_empty, num_too_long = sum(d.num_empty for d in drawn), sum(d.num_too_long for d in drawn)
        notes += left_out(num_empty, num_too_long, options)
        questions += [_Question(f"{source}, {m}, {c}", cost, batches) for (c, m), cost in costs.items()]
    about = [*notes, *dict.fromkeys(describe_cost(cost) for cost in costs.values())]
    say("\n".join(about) + "\nestimated, nothing is run; planning ...")

    # Imported after the first lines are printed.
    from nestsp.planners.baselines import static_degrees
    from nestsp.report.comparison import compare
    from nestsp.report.simulation import Sensitivity, Simulation, held_plans
    from nestsp.train.console import Screen

    steps = sum(len(q.batches) * (len(names) + len(static_degrees(q.cost.tree))) for q in questions)
    num_changes = len(_CHANGES) if sensitivity else 0
    done = 0
    with Screen(silent=as_json or as_markdown).progress("planning", steps * (1 + num_changes) or None) as bar:

        def tick() -> None:
            nonlocal done
            done += 1
            bar.set(done, max(done, steps * (1 + num_changes)))

        cells = [compare(q.name, q.cost, q.batches, names, tick=tick) for q in questions]
        changed = []
        for cell in cells if sensitivity else ():
            for name, (compute, bandwidth) in _CHANGES.items():
                profile = cell.cost.profile.scaled(compute=compute, bandwidth=bandwidth)
                other = compare(name, _with_profile(cell.cost, profile), cell.batches, names, tick=tick)
                changed.append(Sensitivity(cell.name, name, other, held_plans(cell, other)))
        scaled = []
        for source, (named, num_hosts) in itertools.product(sources, larger):
            cost, model = costs[named], named[1]
            tokens = max_tokens * num_hosts // cost.cluster.num_hosts
            drawn, _ = draw_batches(source, num_batches, max_tokens=tokens, **drawing)
            name = f"{source}, {model}, {num_hosts}x{cost.cluster.ranks_per_host}:{cost.profile.name}"
            scaled.append(compare(name, larger[named, num_hosts], [each.batch for each in drawn], names, tick=tick))
    if all(cell.why_not for cell in (*cells, *scaled)):
        raise InfeasibleError(cells[0].why_not)
    simulation = Simulation(tuple(about), tuple(cells), tuple(changed), tuple(scaled))
    if chart is not None:
        from nestsp.report.charts import draw_chart

        draw_chart(simulation, chart)
    if as_json:
        print(json.dumps(simulation.to_json()))
    elif as_markdown:
        print(simulation.to_markdown())
    else:
        print(simulation.to_text())
    if chart is not None:
        say(f"\nthe chart is in {chart}")


def _host_counts(scale: str | None) -> list[int]:
    if scale is None:
        return []
    parts = [part.strip() for part in scale.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        raise ConfigError(f"--scale is {scale!r}, but it must be numbers of hosts, such as 8,16,32")
    return [int(part) for part in parts]


def _with_profile(cost: CostModel, profile: CostProfile) -> CostModel:
    return make_cost_model(
        cost.shape, cost.cluster, profile, tree=cost.tree, memory_per_rank_bytes=cost.memory_per_rank_bytes
    )


def _with_hosts(cost: CostModel, num_hosts: int) -> CostModel:
    cluster = Cluster(num_hosts, cost.cluster.ranks_per_host)
    return make_cost_model(cost.shape, cluster, cost.profile, memory_per_rank_bytes=cost.memory_per_rank_bytes)
