"""Plans of the costed planners and timelines of plans made by hand, kept as reviewed JSON, and how to make them again.

``python -m tests.golden.timelines`` writes every file anew. Do that after a change that is meant to alter plans or what
they cost, and read the difference: ``drawing`` shows what sits where, ``ranks`` what each rank does, and ``events``, of
the plans made by hand, every turn and exchange in µs. All figures are estimated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.bound import lower_bound
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import GatherTurns, Plan
from nestsp.planners import make_planner
from nestsp.planners.ground import cost_ground
from nestsp.report.placement import placement_tree
from nestsp.schedule import make_schedule
from nestsp.shape import ModelShape
from nestsp.simulate import Timeline, simulate
from tests.golden.text import to_text

FOLDER = Path(__file__).parent / "timelines"

# Two layers of Qwen3-0.6B: small enough to read every event.
TWO_LAYERS = ModelShape.for_planning(
    {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 32768,
        "tie_word_embeddings": True,
    }
)
SMALL = make_cost_model(TWO_LAYERS, Cluster(2, 2), load_profile("h100"))
ROOT, LEFT, RIGHT = SMALL.tree.group(0, 0), SMALL.tree.group(1, 0), SMALL.tree.group(1, 2)
RANKS = [SMALL.tree.group(2, rank) for rank in range(4)]

BY_HAND: Mapping[str, tuple[SequenceBatch, list[dict[Any, list[int]]]]] = {
    # Each rank works for three groups: one group's exchange is hidden behind another's attention.
    "nested-2x2": (
        SequenceBatch((70, 71, 72, 73, 74), (32_768, 16_384, 16_384, 8_192, 8_192)),
        [{ROOT: [0], LEFT: [1], RIGHT: [2], RANKS[0]: [3], RANKS[2]: [4]}],
    ),
    # The right half is done early and waits for the root's exchange, whose other members are still busy.
    "early-finish-2x2": (
        SequenceBatch((70, 71, 72), (8_192, 65_536, 256)),
        [{ROOT: [0], LEFT: [1], RANKS[3]: [2]}],
    ),
    # All on one group, nothing to hide behind, then a microbatch in which three ranks have no token.
    "one-group-2x2": (SequenceBatch((70, 71), (32_768, 512)), [{ROOT: [0]}, {RANKS[0]: [1]}]),
}

BATCH = SequenceBatch.of_lengths(
    [98_304, 40_000, 22_000, 17_000, 9_000, 8_000, 7_000, 6_500, *[4_000] * 6, *[1_500] * 20, *[300] * 40, 2, 1]
)
BY_PLANNER: Mapping[str, tuple[CostModel, SequenceBatch, str]] = {
    f"{planner}-{name}": (cost, BATCH, planner)
    for name, cost in {
        "2x4-h100": make_cost_model(known_model("qwen3-8b"), Cluster(2, 4), load_profile("h100")),
        "3x2-a100": make_cost_model(known_model("qwen3-1.7b"), Cluster(3, 2), load_profile("a100-40g")),
    }.items()
    for planner in ("batch-adaptive", "basp", "disjoint", "nsp")
}

CASES = (*BY_HAND, *BY_PLANNER)


def reviewed(name: str) -> dict[str, Any]:
    """What the file of a case must hold."""
    if name in BY_HAND:
        batch, groups = BY_HAND[name]
        plan, cost = Plan.of_groups(SMALL.tree, batch, groups, "by hand"), SMALL
        plan = dataclasses.replace(plan, gathers=GatherTurns(1, 1, 1))  # after the exchanges that cross hosts
    else:
        cost, batch, planner = BY_PLANNER[name]
        plan = make_planner(planner, cost_ground(cost)).judge(batch).plan
    timeline = simulate(make_schedule(plan), cost, record=name in BY_HAND)
    bound = lower_bound(batch, cost)
    return {
        "drawing": placement_tree(plan).splitlines(),
        "makespan_ms": _rounded(timeline.makespan_s * 1e3),
        "bound_ms": _rounded(bound.makespan_s * 1e3),
        "ideal_ms": _rounded(bound.ideal_s * 1e3),
        "microbatch_ms": [_rounded(seconds * 1e3) for seconds in timeline.microbatch_s],
        "exposed": _rounded(timeline.exposed),
        "ranks": [_rank(timeline, rank) for rank in range(cost.tree.num_ranks)],
        **({"events": _events(timeline)} if name in BY_HAND else {}),
        "digest": plan.digest,
        "plan": plan.to_json(),
    }


def _rank(timeline: Timeline, rank: int) -> str:
    times = (timeline.computing_s, timeline.exchanging_s, timeline.waiting_s)
    computing, exchanging, waiting = (f"{float(each[rank]) * 1e3:.2f} ms" for each in times)
    peak = f"{timeline.peak_bytes[rank] / 2**30:.2f} GiB"
    return f"rank {rank}: computing {computing}, exchanging {exchanging}, waiting {waiting}, peak {peak}"


def _events(timeline: Timeline) -> list[str]:
    """A line for each event of each rank, by rank, stream and start."""
    rows = []
    for event in timeline.events:
        where = "outside" if event.layer < 0 else f"layer {event.layer}"
        for rank, start, end in zip(event.ranks.tolist(), event.starts_s.tolist(), event.ends_s.tolist(), strict=True):
            rows.append((rank, event.track, start, end, f"microbatch {event.microbatch}, {where}: {event.name}"))
    return [
        f"rank {rank} {track:11} {start * 1e6:8.0f} - {end * 1e6:8.0f}  {what}"
        for rank, track, start, end, what in sorted(rows)
    ]


def _rounded(value: float) -> float:
    """Six digits: what follows may differ between machines."""
    return float(f"{value:.6g}")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(to_text(reviewed(case)) + "\n", encoding="utf-8")
