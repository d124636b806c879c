"""Timelines as Chrome traces (chrome://tracing, Perfetto): a process for each rank, a track for each stream.

Every event carries its microbatch and layer; what belongs to a group also carries its degree, its ranks and the ids of
its sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestsp.plan import Placement
from nestsp.simulate import Timeline

__all__ = ["trace_events", "write_trace"]

_TRACKS = ("computation", "host links", "network")


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a recorded timeline in Chrome's trace format, times in µs."""
    plan = timeline.schedule.plan
    for rank in range(plan.tree.num_ranks):
        yield _label("process_name", rank, 0, name=f"rank {rank}")
        yield _label("process_sort_index", rank, 0, sort_index=rank)
        for number, track in enumerate(_TRACKS):
            yield _label("thread_name", rank, number, name=track)
    placed: list[dict[tuple[int, int], Placement]] = [
        {(p.group.level, p.group.first_rank): p for p in microbatch.placements} for microbatch in plan.microbatches
    ]
    for event in timeline.events:
        shared: dict[str, Any] = {"microbatch": event.microbatch}
        if event.layer >= 0:
            shared["layer"] = event.layer
        degree = plan.tree.degree(event.level) if event.level >= 0 else 0
        columns = (event.ranks.tolist(), event.starts_s.tolist(), event.ends_s.tolist())
        for rank, start, end in zip(*columns, strict=True):
            details = shared
            if degree:
                placement = placed[event.microbatch][event.level, rank - rank % degree]
                ids = [plan.batch.ids[s] for s in placement.sequences]
                details = {**shared, "degree": degree, "group": str(placement.group), "sequences": ids}
            yield {
                "name": event.name,
                "ph": "X",
                "pid": rank,
                "tid": _TRACKS.index(event.track),
                "ts": round(start * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
                "args": details,
            }


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a recorded timeline as a trace file.

    Args:
        timeline: Made by ``simulate(..., record=True)``.
        path: The file; it is written anew.
    """
    assert timeline.events, "the timeline was not recorded"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(timeline)))
        file.write("\n]}\n")


def _label(kind: str, rank: int, track: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": values}
