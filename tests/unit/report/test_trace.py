from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import Plan
from nestsp.report.measured import TimedTurn, attention_s, waited_s
from nestsp.report.trace import measured_events, write_trace
from nestsp.schedule import Pass, Schedule, make_schedule
from nestsp.simulate import simulate


def test_a_trace_has_a_process_for_each_rank_and_says_what_each_group_works_on(tmp_path: Path) -> None:
    cost = make_cost_model(known_model("qwen3-0.6b"), Cluster(2, 2), load_profile("h100"))
    tree = cost.tree
    batch = SequenceBatch((70, 80, 90), (30_000, 4_000, 100))
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): [0], tree.group(1, 2): [1], tree.group(2, 3): [2]}], "test")
    timeline = simulate(make_schedule(plan), cost, record=True)
    path = tmp_path / "trace.json"
    write_trace(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    labels = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert labels == {rank: f"rank {rank}" for rank in range(4)}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"computation", "host links", "network"}
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.makespan_s * 1e6, abs=0.01)
    of_group = {(e["pid"], tuple(e["args"]["sequences"])) for e in spans if e["args"].get("degree") == 2}
    assert of_group == {(2, (80,)), (3, (80,))}
    roots = [e for e in spans if e["args"].get("degree") == 4]
    assert {e["pid"] for e in roots} == set(range(4))
    assert {tuple(e["args"]["sequences"]) for e in roots} == {(70,)}
    network = [e for e in roots if e["tid"] == 2]
    layers = cost.shape.num_layers
    assert len(network) == 4 * 6 * layers  # two exchanges in each of forward, recompute and backward
    assert {e["args"]["layer"] for e in roots} == set(range(layers))


def timed(schedule: Schedule, rank: int, num_layers: int) -> list[TimedTurn]:
    """A measurement in which every wait takes 1 s, every turn 2 s, and everything between layers 3 s."""
    turns, now = [], 0.0
    passes = [(layer, Pass.FORWARD) for layer in range(num_layers)]
    passes += [(layer, which) for layer in reversed(range(num_layers)) for which in (Pass.RECOMPUTE, Pass.BACKWARD)]
    for layer, which in passes:
        for turn in schedule.turns(0, rank, which):
            arrived = now + (turn.number > 0)
            turns.append(TimedTurn(0, layer, which, turn.level, turn.number, now, arrived, arrived + 2))
            now = arrived + 2
        now += 3
    return turns


def test_measured_and_estimated_steps_have_the_same_names_and_lie_side_by_side(tmp_path: Path) -> None:
    cost = make_cost_model(known_model("qwen3-0.6b"), Cluster(2, 2), load_profile("h100"))
    tree, num_layers = cost.tree, cost.shape.num_layers
    batch = SequenceBatch((70, 80, 90), (30_000, 4_000, 2_000))
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): [0], tree.group(1, 2): [1], tree.group(2, 3): [2]}], "test")
    schedule = make_schedule(plan)
    measured = {rank: timed(schedule, rank, num_layers) for rank in range(4)}
    path = tmp_path / "trace.json"
    write_trace(simulate(schedule, cost, record=True), path, measured)
    events = json.loads(path.read_text())["traceEvents"]
    labels = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [labels[process] for process in sorted(labels)] == [
        f"rank {rank}, {kind}" for rank in range(4) for kind in ("measured", "estimated")
    ]
    spans = [event for event in events if event["ph"] == "X" and "degree" in event["args"]]

    def steps(process: int) -> set[tuple[str, int, bool]]:
        """(name, layer, whether it is an exchange)"""
        return {
            (e["name"], e["args"]["layer"], e["tid"] > 0)
            for e in spans
            if e["pid"] == process and not e["name"].startswith("waiting for ")
        }

    for rank in range(4):
        # A first turn that only packs takes no time in some rows of the estimate: exchanges are what both must have.
        ours, theirs = steps(2 * rank), steps(2 * rank + 1)
        assert {step for step in ours if step[2]} == {step for step in theirs if step[2]} != set()
        assert theirs <= ours


def test_every_second_of_a_measured_rank_is_a_turn_a_wait_or_between_layers() -> None:
    cost = make_cost_model(known_model("qwen3-0.6b"), Cluster(1, 2), load_profile("h100"))
    batch = SequenceBatch((7, 8), (3_000, 400))
    plan = Plan.of_groups(cost.tree, batch, [{cost.tree.group(0, 0): [0], cost.tree.group(1, 1): [1]}], "test")
    turns = timed(make_schedule(plan), 1, 2)
    events = [e for e in measured_events(plan, {1: turns}) if e["ph"] == "X"]
    on_rank = [e for e in events if e["tid"] == 0]
    assert sum(e["dur"] for e in on_rank) == pytest.approx(turns[-1].ended_s * 1e6)
    waits = sum(e["dur"] for e in on_rank if e["name"].startswith("waiting for "))
    between = sum(e["dur"] for e in on_rank if e["name"] == "outside attention")
    assert waits == pytest.approx(waited_s(turns) * 1e6)
    assert between == pytest.approx(5 * 3e6)  # between six passes
    assert waits + between + attention_s(turns) * 1e6 - waits == pytest.approx(turns[-1].ended_s * 1e6)
    exchanges = [e for e in events if e["tid"] > 0]
    assert len(exchanges) == 2 * 3 * 2  # two in each pass of each layer
    assert TimedTurn.from_json(turns[3].to_json()) == turns[3]
