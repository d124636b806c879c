"""Charts of a simulation, drawn by matplotlib, which is an extra: ``pip install 'nestsp[charts]'``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from nestsp.errors import ConfigError
from nestsp.report.comparison import ADAPTIVE, BEST_STATIC, Cell
from nestsp.report.simulation import Simulation

__all__ = ["check_chart", "draw_chart"]

_SUFFIXES = (".png", ".svg", ".pdf")
# Lines of kinds of cells; beyond these no one could tell them apart.
_STYLES = ("-", ":", "--", "-.")
# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def check_chart(path: Path) -> None:
    """Refuse, before anything is computed, a chart that could not be written.

    Raises:
        ConfigError: The suffix is not known, the folder is missing, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--chart is {path}, but a chart is one of {', '.join(_SUFFIXES)}; end its name so")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--chart is {path}, but there is no folder {path.absolute().parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--chart is {path}, but charts need matplotlib, which is not installed; pip install 'nestsp[charts]', or "
            "take --json and draw it yourself"
        )


def draw_chart(simulation: Simulation, path: Path) -> None:
    """Draw the speed-ups of all cells, and, if there is any, how they scale.

    Args:
        simulation: What was computed.
        path: Where; its suffix chooses the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    planners = list(dict.fromkeys(p for cell in (*simulation.cells, *simulation.scaling) for p in cell.planned))
    num_bars = max(1, len(simulation.cells) * (len(planners) + 1))
    widths = [1] if not simulation.scaling else [1, 1]
    figure = Figure(figsize=(7 * len(widths), 1.6 + 0.3 * num_bars + 0.3 * bool(simulation.scaling)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(widths), squeeze=False)[0]
    _draw_cells(axes[0], simulation, planners)
    if simulation.scaling:
        _draw_scaling(axes[1], simulation, planners)
    figure.tight_layout()
    figure.savefig(path)


def _draw_cells(axes: Any, simulation: Simulation, planners: list[str]) -> None:
    """A bar for each planner of each cell, over best static, or over batch-adaptive where no degree fits."""
    place, ticks, labels = 0.0, [], []
    for cell in simulation.cells:
        over = BEST_STATIC if cell.best_static_degree is not None else ADAPTIVE
        basis = (
            f"best static: {cell.best_static_degree}" if over == BEST_STATIC else "no degree fits: batch-adaptive is 1"
        )
        basis = "nothing fits" if cell.why_not else basis
        axes.text(0.01, place, f"{cell.name} ({basis})", va="center", fontsize=8, fontweight="bold")
        for planner in () if cell.why_not else planners:
            place += 1
            ticks.append(place)
            labels.append(planner)
            ratio = cell.speedup(planner, over) if planner in cell.planned else None
            if ratio is None:
                axes.text(0.02, place, "no plan of every batch", va="center", fontsize=7)
                continue
            errors = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
            colour = _COLOURS[planners.index(planner) % len(_COLOURS)]
            axes.barh(place, ratio.value, 0.8, xerr=errors, color=colour, capsize=2)
            axes.text(ratio.high, place, f"  {ratio.value:.2f} x", va="center", fontsize=7)
        place += 1.4
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_ylim(place - 0.6, -0.8)
    axes.set_xlim(0, max(1.1, axes.get_xlim()[1] * 1.06))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over best static, 95 % interval over batches")
    axes.set_title("Estimated speed-up", fontsize=10)


def _draw_scaling(axes: Any, simulation: Simulation, planners: list[str]) -> None:
    """Speed-up over best static for each number of ranks, a line for each planner and kind of cell."""
    kinds: dict[str, list[Cell]] = {}
    for cell in simulation.scaling:
        kinds.setdefault(cell.name.rpartition(", ")[0], []).append(cell)
    for style, (kind, cells) in zip(_STYLES, kinds.items(), strict=False):
        for planner in planners:
            points = [
                (cell.cost.tree.num_ranks, ratio.value)
                for cell in cells
                if not cell.why_not and (ratio := cell.speedup(planner, BEST_STATIC)) is not None
            ]
            colour = _COLOURS[planners.index(planner) % len(_COLOURS)]
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=f"{planner}, {kind}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({cell.cost.tree.num_ranks for cell in simulation.scaling}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("ranks, as many tokens for each")
    axes.set_ylabel("speed-up over best static")
    if axes.lines:
        axes.legend(fontsize=7)
    left = f", the first {len(_STYLES)} of {len(kinds)} kinds" if len(kinds) > len(_STYLES) else ""
    axes.set_title(f"Estimated, other numbers of hosts{left}", fontsize=10)
