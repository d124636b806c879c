"""What ``nestsp simulate`` says: cells, what they depend on, and how they scale; as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestsp.report.comparison import ADAPTIVE, BEST_STATIC, Cell, Ratio, ratio_of_totals
from nestsp.report.tables import format_markdown, format_table
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate
from nestsp.units import format_count, format_seconds

__all__ = ["Sensitivity", "Simulation", "held_plans"]

_CELL_HEAD = (
    "planner", "mean step", "over best static", "over batch-adaptive", "to bound", "largest", "exposed", "imbalance",
    "planned in",
)  # fmt: skip
_CHANGE_HEAD = ("profile", "planner", "mean step", "over best static", "over batch-adaptive", "plans made before")
_SCALE_HEAD = (
    "ranks", "planner", "sequences", "mean step", "over best static", "over batch-adaptive", "to bound", "planned in"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A cell under a changed profile.

    Attributes:
        cell: The name of the cell.
        change: What was changed.
        changed: All planned anew.
        held: For each planner, how much longer the plans made for the given profile take there than new ones.
    """

    cell: str
    change: str
    changed: Cell
    held: dict[str, Ratio]


def held_plans(cell: Cell, changed: Cell) -> dict[str, Ratio]:
    """Times of plans made for one profile on another, over those of plans made for that one, for each planner."""
    held = {}
    for planner in cell.planned:
        mine, anew = cell.planned[planner], changed.times_s(planner) if changed.planned else None
        timelines = [row.timeline for row in mine if row.timeline is not None]
        if anew is None or len(timelines) < len(mine):
            continue
        times = [simulate(make_schedule(timeline.schedule.plan), changed.cost).makespan_s for timeline in timelines]
        held[planner] = ratio_of_totals(times, anew)
    return held


@dataclass(frozen=True, slots=True)
class Simulation:
    """All that one command computed.

    Attributes:
        about: What it rests on, lines for people.
        cells: As asked for.
        sensitivity: Cells under changed profiles.
        scaling: Cells on other numbers of hosts.
    """

    about: tuple[str, ...]
    cells: tuple[Cell, ...]
    sensitivity: tuple[Sensitivity, ...] = ()
    scaling: tuple[Cell, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All figures, SI units."""
        return {
            "estimated": True,
            "about": list(self.about),
            "cells": [cell.to_json() for cell in self.cells],
            "sensitivity": [
                {
                    "cell": each.cell,
                    "change": each.change,
                    "changed": each.changed.to_json(),
                    "held_over_anew": {planner: ratio.to_json() for planner, ratio in each.held.items()},
                }
                for each in self.sensitivity
            ],
            "scaling": [cell.to_json() for cell in self.scaling],
        }

    def to_text(self) -> str:
        """Tables in columns."""
        parts = []
        for title, head, body in self._tables():
            parts.append(f"\n{title}" + (f"\n{format_table(head, body)}" if body else ""))
        return "\n".join([*parts, "", *self._footnotes()])

    def to_markdown(self) -> str:
        """A document with a table for each cell."""
        parts = ["# Planners compared (estimated)", "", *(f"- {line}" for line in "\n".join(self.about).split("\n"))]
        for title, head, body in self._tables():
            parts += ["", f"## {title}" if body else title]
            if body:
                parts += ["", format_markdown(head, body)]
        return "\n".join([*parts, "", *self._footnotes()])

    def _tables(self) -> list[tuple[str, Sequence[str], list[list[str]]]]:
        tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
        for cell in self.cells:
            if cell.why_not:
                tables.append((f"{cell.name}: nothing fits: {cell.why_not}", (), []))
            else:
                tables.append((cell.name, _CELL_HEAD, _cell_rows(cell)))
        for name in dict.fromkeys(each.cell for each in self.sensitivity):
            rows = [row for each in self.sensitivity if each.cell == name for row in _change_rows(each)]
            tables.append((f"{name}: if the profile is wrong", _CHANGE_HEAD, rows))
        for kind in dict.fromkeys(cell.name.rpartition(", ")[0] for cell in self.scaling):
            rows = [row for cell in self.scaling if cell.name.startswith(kind) for row in _scale_rows(cell)]
            tables.append((f"{kind}: other numbers of hosts, as many tokens for each rank", _SCALE_HEAD, rows))
        return tables

    def _footnotes(self) -> list[str]:
        notes = [
            "All times are estimated. Best static: the one degree that is best in hindsight and fits each batch. "
            "Over: ratio of total times, with its 95 % bootstrap interval over batches."
        ]
        if any(not cell.why_not and cell.best_static_degree is None for cell in (*self.cells, *self.scaling)):
            notes.append("Where no degree fits each batch there is no best static, and no ratio over it.")
        if self.sensitivity:
            notes.append("Plans made before: time of plans made for the given profile, over that of new ones.")
        return notes


def _cell_rows(cell: Cell) -> list[list[str]]:
    degree = cell.best_static_degree
    first = f"best static: {degree}"
    rows = [[first, "no degree fits each batch"] if degree is None else _cell_row(first, BEST_STATIC, cell)]
    return rows + [_cell_row(planner, planner, cell) for planner in cell.planned]


def _cell_row(label: str, planner: str, cell: Cell) -> list[str]:
    times, rows, gaps = cell.times_s(planner), cell.rows(planner), cell.gaps(planner)
    assert rows is not None
    if times is None or gaps is None:
        unfit = [row.why_not for row in rows if row.timeline is None]
        return [label, f"no plan of {len(unfit)} of {len(rows)} batches: {unfit[0]}"]
    timelines = [row.timeline for row in rows if row.timeline is not None]
    return [
        label,
        format_seconds(float(np.mean(times))),
        _ratio(cell.speedup(planner, BEST_STATIC)),
        _ratio(cell.speedup(planner, ADAPTIVE)),
        f"+{np.mean(gaps):.1%}",
        f"+{max(gaps):.1%}",
        f"{np.mean([t.exposed for t in timelines]):.1%}",
        f"{np.mean([t.imbalance for t in timelines]):.1%}",
        format_seconds(float(np.mean([row.planning_s for row in rows]))),
    ]


def _change_rows(each: Sensitivity) -> list[list[str]]:
    rows = []
    if each.changed.why_not:
        return [[each.change, f"nothing fits: {each.changed.why_not}"]]
    for planner in each.changed.planned:
        times = each.changed.times_s(planner)
        if times is None:
            rows.append([each.change, planner, "no plan of every batch"])
            continue
        rows.append(
            [
                each.change,
                planner,
                format_seconds(float(np.mean(times))),
                _ratio(each.changed.speedup(planner, BEST_STATIC)),
                _ratio(each.changed.speedup(planner, ADAPTIVE)),
                f"{each.held[planner].value:.3f} x" if planner in each.held else "-",
            ]
        )
    return rows


def _scale_rows(cell: Cell) -> list[list[str]]:
    ranks = format_count(cell.cost.tree.num_ranks)
    if cell.why_not:
        return [[ranks, f"nothing fits: {cell.why_not}"]]
    rows = []
    for planner in cell.planned:
        times, gaps = cell.times_s(planner), cell.gaps(planner)
        if times is None or gaps is None:
            rows.append([ranks, planner, "no plan of every batch"])
            continue
        rows.append(
            [
                ranks,
                planner,
                format_count(round(np.mean([batch.num_sequences for batch in cell.batches]))),
                format_seconds(float(np.mean(times))),
                _ratio(cell.speedup(planner, BEST_STATIC)),
                _ratio(cell.speedup(planner, ADAPTIVE)),
                f"+{np.mean(gaps):.1%}",
                format_seconds(float(np.mean([row.planning_s for row in cell.planned[planner]]))),
            ]
        )
    return rows


def _ratio(ratio: Ratio | None) -> str:
    return "-" if ratio is None else str(ratio)
