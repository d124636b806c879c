"""A run's folder: locked while a job trains in it, and honest about settings that changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from nestsp.config import RunConfig, parse_config, to_yaml
from nestsp.errors import ConfigError
from nestsp.train.manifest import CHECKPOINTS
from nestsp.train.run_folder import _changed, open_run_folder

TEXT = """
model: {config: {model_type: llama}}
data: {tokens_per_step: 64}
planner: {max_tokens_per_rank: 64}
train: {steps: 3}
"""


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return parse_config(TEXT, (f"runs_dir={tmp_path}", *overrides))


def test_settings_that_changed_are_named_with_both_values(tmp_path: Path) -> None:
    before = to_yaml(config(tmp_path))
    assert _changed(before, config(tmp_path)) == ()
    after = config(tmp_path, "train.learning_rate=0.5", "model.config.hidden_size=8")
    assert set(_changed(before, after)) == {"train.learning_rate 0.001 → 0.5", "model.config.hidden_size None → 8"}


def test_a_second_job_in_one_run_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[FileLock] = []
    folder, changes = open_run_folder(config(tmp_path), None, 0, "job", locks)
    assert changes == ()
    checkpoint = folder / CHECKPOINTS / "step-000001"
    monkeypatch.setattr("nestsp.train.run_folder.find_checkpoint", lambda run: checkpoint)
    with pytest.raises(ConfigError, match="another job is training in it"):
        open_run_folder(config(tmp_path), checkpoint, 1, "job", [])
    locks[0].release()
    again, changes = open_run_folder(config(tmp_path, "train.seed=7"), checkpoint, 1, "job", [])
    assert again == folder
    assert changes == ("train.seed 0 → 7",)
    assert "seed: 0" in (folder / "config-before-step-000002.yaml").read_text()
