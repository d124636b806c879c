"""What sits where: a plan drawn for people, with what is alike folded into one line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from nestsp.cluster import Group
from nestsp.plan import Microbatch, Placement, Plan
from nestsp.report.tables import format_table
from nestsp.units import format_count, plural

__all__ = ["degree_table", "placement_tree"]


def degree_table(plan: Plan) -> str:
    """How much each degree has, over all microbatches."""
    head = ["degree", "groups", "sequences", "longest", "tokens", "of all", "output kept"]
    body = []
    for level in range(plan.tree.num_levels):
        placements = [placement for _, placement in plan.placements() if placement.group.level == level]
        if not placements:
            continue
        lengths = [plan.batch.lengths[s] for placement in placements for s in placement.sequences]
        kept = sum(len(placement.sequences) for placement in placements if placement.keep == "output")
        body.append(
            [
                str(plan.tree.degree(level)),
                format_count(len(placements)),
                format_count(len(lengths)),
                format_count(max(lengths)),
                format_count(sum(lengths)),
                f"{sum(lengths) / plan.batch.num_tokens:.1%}",
                plural(kept, "sequence"),
            ]
        )
    return format_table(head, body)


def placement_tree(plan: Plan, *, max_lines: int | None = None) -> str:
    """The groups that hold sequences, each below the nearest one around it; like neighbours share a line.

    Args:
        plan: Any plan.
        max_lines: Leave out the rest, and say how much that is; None for all.
    """
    lines = []
    for number, microbatch in enumerate(plan.microbatches):
        kept = f", the last {plural(microbatch.num_kept_layers, 'layer')} kept" if microbatch.num_kept_layers else ""
        lines.append(f"microbatch {number + 1} of {len(plan.microbatches)}{kept}")
        lines += _draw(plan, microbatch)
    if max_lines is not None and len(lines) > max_lines:
        left = len(lines) - max_lines
        lines = [*lines[:max_lines], f"... {plural(left, 'more line')}; --json has the whole plan"]
    return "\n".join(lines)


def _draw(plan: Plan, microbatch: Microbatch) -> list[str]:
    """Depth first: a group before those inside it."""
    by_rank = sorted(microbatch.placements, key=lambda p: (p.group.first_rank, p.group.level))
    parents: list[tuple[int, ...]] = []
    path: list[Group] = []
    for placement in by_rank:
        while path and placement.group.first_rank not in path[-1]:
            path.pop()
        parents.append(tuple(group.level for group in path))
        path.append(placement.group)
    # A group with others inside it has a line of its own.
    alone = [i + 1 == len(by_rank) or len(parents[i + 1]) <= len(parents[i]) for i in range(len(by_rank))]
    keys = [
        (alone[i], parents[i], placement.group.level if alone[i] else -1 - i) for i, placement in enumerate(by_rank)
    ]
    lines = []
    for (_, outer, _), run in groupby(range(len(by_rank)), key=lambda i: keys[i]):
        lines.append("  " * (len(outer) + 1) + _line(plan, [by_rank[i] for i in run]))
    return lines


def _line(plan: Plan, placements: Sequence[Placement]) -> str:
    first, last = placements[0].group, placements[-1].group
    lengths = [[plan.batch.lengths[s] for s in placement.sequences] for placement in placements]
    if len(placements) == 1:
        where = f"rank {first.first_rank}" if first.degree == 1 else str(first)
        (mine,) = lengths
        if len(mine) == 1:
            return f"{where}: 1 sequence of {plural(mine[0], 'token')}"
        longest = f", longest {format_count(max(mine))}"
        return f"{where}: {plural(len(mine), 'sequence')}, {plural(sum(mine), 'token')}{longest}"
    ranks = f"ranks {first.first_rank}-{last.ranks.stop - 1}"
    where = f"{ranks}, each alone" if first.degree == 1 else f"{ranks}, {len(placements)} groups of {first.degree}"
    if all(len(mine) == 1 for mine in lengths):
        return f"{where}: 1 sequence of {_span([max(mine) for mine in lengths], 'token')} each"
    counts = _span([len(mine) for mine in lengths], "sequence")
    totals = _span([sum(mine) for mine in lengths], "token")
    return f"{where}: {counts}, {totals} each, longest {_span([max(mine) for mine in lengths])}"


def _span(values: Sequence[int], noun: str = "") -> str:
    low, high = min(values), max(values)
    span = format_count(low) if low == high else f"{format_count(low)}-{format_count(high)}"
    return f"{span} {noun}{'' if high == 1 else 's'}" if noun else span
