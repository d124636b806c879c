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
from nestsp.report.trace import write_trace
from nestsp.schedule import make_schedule
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
