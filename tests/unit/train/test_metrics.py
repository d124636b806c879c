"""Records of steps: lines for people, JSON that survives a crash, the speed of the first two steps."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

from nestsp.train.metrics import JsonLines, SpeedMeter, StepMetrics

RECORD = StepMetrics(
    step=7, epoch=1, loss=2.5, lr=3e-3, grad_norm=1.25, num_sequences=5, num_tokens=8000, num_targets=7995,
    tokens_per_s=4000.0, tokens_per_s_per_rank=1000.0, flops_per_s_per_rank=4e14, mfu=None,
    step_s=2.0, estimated_s=None, makespan_s=1.0, gap_to_bound=0.25, planning_s=0.01, attention_s=0.5, exposed=0.034,
    wait_s=0.0, save_s=0.0, load_s=0.01, peak_memory_bytes=2**30, peak_memory_rank=3, fragmented_bytes=0,
    imbalance=0.0125, num_microbatches=2, num_sequences_by_degree={1: 3, 4: 2},
)  # fmt: skip


def test_a_line_has_every_figure_of_the_step() -> None:
    assert RECORD.line(60) == (
        "step  7/60  loss 2.5000  lr 3.00e-03  grad norm 1.250  4,000 tokens/s  2.00 s  imbalance 1.2%  "
        "exposed 3.4%  microbatches 2  sequences by degree 1:3 4:2"
    )
    assert "  2.00 s (estimated 1.50 s)  " in replace(RECORD, estimated_s=1.5).line(60)
    assert "  4,000 tokens/s  MFU 40.4%  2.00 s  " in replace(RECORD, mfu=0.404).line(60)
    assert "  1.4 tokens/s  " in replace(RECORD, tokens_per_s=1.4).line(60)


def test_the_docs_say_what_every_figure_of_a_step_is_and_name_no_other() -> None:
    text = (Path(__file__).parents[3] / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text[text.index("| figure | meaning |") :].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert named == {field.name for field in fields(StepMetrics)}


def test_trackers_get_every_figure_that_there_is() -> None:
    values = RECORD.values()
    assert values["loss"] == 2.5
    assert values["num_sequences_by_degree/4"] == 2
    assert not {"mfu", "estimated_s", "step"} & values.keys()


def test_a_step_without_a_target_says_so() -> None:
    line = replace(RECORD, loss=None, grad_norm=None, num_targets=0).line(60)
    assert "  no target, nothing changed  " in line
    assert "None" not in line
    assert "loss" not in line


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(RECORD)
    lines.write({"step": 8})
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before it is closed: a run can be watched
    assert json.loads(first)["loss"] == 2.5
    assert json.loads(first)["estimated_s"] is None
    assert json.loads(second) == {"step": 8}
    lines.close()


def test_a_resumed_file_keeps_the_steps_up_to_the_checkpoint_and_drops_what_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    lines = JsonLines.resume(path, last_step=2)
    lines.write({"step": 3, "again": True})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "again": true}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_file_that_is_not_there_begins_empty(tmp_path: Path) -> None:
    lines = JsonLines.resume(tmp_path / "metrics.jsonl", last_step=2)
    lines.write({"step": 3})
    lines.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3}\n'


def test_the_speed_is_the_higher_of_the_first_two_steps_and_stays() -> None:
    meter = SpeedMeter()
    seen = [meter.estimate_s(10.0)]
    for step_s in (5.0, 3.0, 0.1):
        meter.add(makespan_s=2.0, step_s=step_s)
        seen.append(meter.estimate_s(10.0))
    assert seen == [None, None, 15.0, 15.0]


def test_a_plan_like_that_of_the_faster_step_is_estimated_to_take_the_time_of_that_step() -> None:
    meter = SpeedMeter()
    meter.add(makespan_s=3.0, step_s=60.0)
    meter.add(makespan_s=2.0, step_s=4.0)
    assert meter.estimate_s(2.0) == 4.0
    assert meter.estimate_s(3.0) == 6.0
