"""Trackers get what the JSON lines get; a run folder is one run there, however often it is resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nestsp.config import RunConfig, parse_config
from nestsp.errors import ConfigError
from nestsp.train.trackers import check_trackers, open_trackers

TEXT = """
model: {config: {model_type: llama}}
data: {tokens_per_step: 64}
train: {steps: 3}
"""


def config(*overrides: str) -> RunConfig:
    return parse_config(TEXT, overrides)


def test_a_run_that_asks_for_none_has_none(tmp_path: Path) -> None:
    assert open_trackers(config(), tmp_path, 0) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(config().train)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(config().train)
    with pytest.raises(ConfigError, match=r"train\.tensorboard is set, but tensorboard is not installed; install nest"):
        check_trackers(config("train.tensorboard=true").train)
    with pytest.raises(ConfigError, match=r"train\.wandb is set, but wandb is not installed; install nestsp\[wandb\]"):
        check_trackers(config("train.wandb=mine").train)


def test_tensorboard_has_each_step_once_after_steps_were_run_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for last, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        [tracker] = open_trackers(config("train.tensorboard=true"), tmp_path, last)
        for step in steps:
            tracker.log(step, {"loss": 10.0 * step + last})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 10.0), (2, 21.0), (3, 31.0)]


@pytest.mark.slow  # its service process takes ten seconds to start and to end
def test_wandb_offline_is_one_run_in_the_run_folder(tmp_path: Path) -> None:
    """G31."""
    pytest.importorskip("wandb")
    settings = config("train.wandb=mine", "train.wandb_offline=true")
    for last in (0, 1):
        [tracker] = open_trackers(settings, tmp_path, last)
        tracker.log(last + 1, {"loss": 1.0})
        tracker.close()
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    identity = (tmp_path / ".wandb-id").read_text()
    assert runs
    assert {name.rpartition("-")[2] for name in runs} == {identity}
