"""Timelines as Chrome traces (chrome://tracing, Perfetto): a process for each rank, a track for each stream.

Every event carries its microbatch and layer; what belongs to a group also carries its degree, its ranks and the ids of
its sequences. Where a step was measured too, each rank has two processes, measured and estimated, one below the other:
turns and exchanges have the same names in both. The measured one has a track for each level's exchanges, since several
are in flight at once; it knows nothing of gathers, and of the layers only that they ran between two attentions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from nestsp.plan import Placement, Plan
from nestsp.report.measured import TimedTurn
from nestsp.schedule import turn_name
from nestsp.simulate import Timeline

__all__ = ["measured_events", "trace_events", "write_trace"]

_TRACKS = ("computation", "host links", "network")
Placed = list[dict[tuple[int, int], Placement]]


def write_trace(timeline: Timeline, path: Path, measured: Mapping[int, Sequence[TimedTurn]] | None = None) -> None:
    """Write a recorded timeline as a trace file.

    Args:
        timeline: Made by ``simulate(..., record=True)``.
        path: The file; it is written anew.
        measured: What each rank measured of the same plan, to stand beside it.
    """
    assert timeline.events, "the timeline was not recorded"
    events = trace_events(timeline) if measured is None else _side_by_side(timeline, measured)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def _side_by_side(timeline: Timeline, measured: Mapping[int, Sequence[TimedTurn]]) -> Iterator[dict[str, Any]]:
    yield from measured_events(timeline.schedule.plan, measured, first=0, every=2)
    yield from trace_events(timeline, first=1, every=2, title=", estimated")


def trace_events(timeline: Timeline, *, first: int = 0, every: int = 1, title: str = "") -> Iterator[dict[str, Any]]:
    """Yield the events of a recorded timeline in Chrome's trace format, times in µs.

    Args:
        timeline: Made by ``simulate(..., record=True)``.
        first: Number of rank 0's process.
        every: How much higher that of the next rank is.
        title: Follows the rank in its process's name.
    """
    plan = timeline.schedule.plan
    for rank in range(plan.tree.num_ranks):
        yield from _labels(first + every * rank, f"rank {rank}{title}", _TRACKS)
    placed = _placed(plan)
    for event in timeline.events:
        shared: dict[str, Any] = {"microbatch": event.microbatch}
        if event.layer >= 0:
            shared["layer"] = event.layer
        columns = (event.ranks.tolist(), event.starts_s.tolist(), event.ends_s.tolist())
        for rank, start, end in zip(*columns, strict=True):
            details = shared
            if event.level >= 0:
                details = {**shared, **_of_group(plan, placed[event.microbatch], event.level, rank)}
            yield _span(event.name, first + every * rank, _TRACKS.index(event.track), start, end, details)


def measured_events(
    plan: Plan, measured: Mapping[int, Sequence[TimedTurn]], *, first: int = 0, every: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield what the ranks measured of a plan in Chrome's trace format, times in µs; see `trace_events`."""
    placed = _placed(plan)
    degrees = [plan.tree.degree(level) for level in range(plan.tree.num_levels)]
    exchanging = [degree for degree in degrees if degree > 1]
    tracks = ("computation", *(f"exchanges of degree {degree}" for degree in exchanging))
    for rank, turns in sorted(measured.items()):
        process = first + every * rank
        yield from _labels(process, f"rank {rank}, measured", tracks)
        arrivals = {_key(turn, turn.number): turn.arrived_s for turn in turns}
        for turn in turns:
            name = turn_name(degrees[turn.level], turn.which, turn.number)
            details = {
                "microbatch": turn.microbatch,
                "layer": turn.layer,
                **_of_group(plan, placed[turn.microbatch], turn.level, rank),
            }
            if turn.arrived_s > turn.began_s:
                before = turn_name(degrees[turn.level], turn.which, turn.number - 1)
                yield _span(f"waiting for {before}", process, 0, turn.began_s, turn.arrived_s, details)
            yield _span(name, process, 0, turn.arrived_s, turn.ended_s, details)
            arrival = arrivals.get(_key(turn, turn.number + 1))
            if arrival is not None:
                yield _span(name, process, 1 + turn.level, turn.ended_s, arrival, details)
        for one, other in pairwise(sorted(turns, key=lambda turn: turn.began_s)):
            if (one.microbatch, one.layer, one.which) != (other.microbatch, other.layer, other.which):
                details = {"microbatch": other.microbatch}
                yield _span("outside attention", process, 0, one.ended_s, other.began_s, details)


def _key(turn: TimedTurn, number: int) -> tuple[Any, ...]:
    return turn.microbatch, turn.layer, turn.which, turn.level, number


def _placed(plan: Plan) -> Placed:
    return [{(p.group.level, p.group.first_rank): p for p in microbatch.placements} for microbatch in plan.microbatches]


def _of_group(plan: Plan, placed: Mapping[tuple[int, int], Placement], level: int, rank: int) -> dict[str, Any]:
    degree = plan.tree.degree(level)
    placement = placed[level, rank - rank % degree]
    ids = [plan.batch.ids[s] for s in placement.sequences]
    return {"degree": degree, "group": str(placement.group), "sequences": ids}


def _span(name: str, process: int, track: int, start_s: float, end_s: float, details: Any) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": round(start_s * 1e6, 3),
        "dur": round((end_s - start_s) * 1e6, 3),
        "args": details,
    }


def _labels(process: int, name: str, tracks: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield _label("process_name", process, 0, name=name)
    yield _label("process_sort_index", process, 0, sort_index=process)
    for number, track in enumerate(tracks):
        yield _label("thread_name", process, number, name=track)


def _label(kind: str, process: int, track: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": values}
