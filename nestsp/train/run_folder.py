"""Run folders: ``<runs_dir>/<name>-<n>``, each made once, written by one job at a time, and never written over."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nestsp.config import RunConfig, parse_config, to_yaml
from nestsp.errors import ConfigError
from nestsp.train.manifest import CHECKPOINTS, find_checkpoint

__all__ = [
    "EVALUATIONS",
    "METRICS",
    "PLANS",
    "REFERENCE",
    "STOP",
    "latest_run_folder",
    "new_run_folder",
    "open_run_folder",
    "run_folder_of_job",
]

METRICS = "metrics.jsonl"
PLANS = "plans.jsonl"
EVALUATIONS = "evaluations.jsonl"
REFERENCE = "reference.npy"
STOP = "stop"
"""A file of this name in a run's folder asks the run to save and to end."""

_JOB = ".job"


def new_run_folder(runs_dir: Path, name: str) -> Path:
    """Make the folder with the next free number.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(runs_dir, name), default=0) + 1
        while True:
            folder = runs_dir / f"{name}-{number}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took it meanwhile
                number += 1
            else:
                return folder
    except OSError as error:
        raise ConfigError(
            f"runs_dir is {str(runs_dir)!r}, but no folder can be made there ({error.strerror}); set it to a folder "
            "that can be written"
        ) from None


def latest_run_folder(runs_dir: Path, name: str) -> Path | None:
    """The run of this name with the highest number; None if there is none."""
    numbers = _numbers(runs_dir, name) if runs_dir.is_dir() else []
    return runs_dir / f"{name}-{max(numbers)}" if numbers else None


def run_folder_of_job(runs_dir: Path, name: str, job: str) -> Path | None:
    """The latest run of this name that a job of the launcher's has written to; None if there is none."""
    for number in sorted(_numbers(runs_dir, name) if runs_dir.is_dir() else [], reverse=True):
        note = runs_dir / f"{name}-{number}" / _JOB
        if note.is_file() and note.read_text(encoding="utf-8") == job:
            return note.parent
    return None


def _numbers(runs_dir: Path, name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"-([1-9][0-9]*)")
    found = (pattern.fullmatch(entry.name) for entry in runs_dir.iterdir())
    return [int(match.group(1)) for match in found if match]


def open_run_folder(
    config: RunConfig, checkpoint: Path | None, step: int, job: str, locks: list[FileLock]
) -> tuple[Path, tuple[str, ...]]:
    """The run's folder with its settings in it: the one that a checkpoint is the latest of, else a new one.

    The folder is locked, so that two jobs never write into one. Settings of an earlier start stay beside the new ones.

    From an older checkpoint, or one that lies elsewhere, a new run begins, with the records up to there, if any: what
    the first run wrote after it stays as it is.

    Args:
        config: The run's settings, complete.
        checkpoint: What the run goes on from; None for a new one.
        step: Steps done.
        job: The launcher's name for this job; see `run_folder_of_job`.
        locks: Gets the folder's lock, to be held until the process ends.

    Returns:
        The folder, and what was set otherwise at the start before, as ``key old → new``.
    """
    old = None if checkpoint is None or checkpoint.parent.name != CHECKPOINTS else checkpoint.parent.parent
    if old is not None and find_checkpoint(old) == checkpoint:
        folder = old
    else:
        folder = new_run_folder(Path(config.runs_dir), config.name)
    changes: tuple[str, ...] = ()
    try:
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise ConfigError(
                f"the run's folder is {folder}, but another job is training in it; end that one first, or begin a new "
                "run without --resume"
            ) from None
        locks.append(lock)
        for name in (METRICS, PLANS, EVALUATIONS, REFERENCE) if old not in (None, folder) else ():
            if old is not None and (old / name).exists():
                shutil.copyfile(old / name, folder / name)
        before = (old or folder) / "config.yaml"
        if before.exists():
            changes = _changed(before.read_text(encoding="utf-8"), config)
            if changes and old == folder:
                shutil.copyfile(before, folder / f"config-before-step-{step + 1:06d}.yaml")
        (folder / _JOB).write_text(job, encoding="utf-8")
        written = folder / ".config.yaml"
        written.write_text(to_yaml(config), encoding="utf-8")
        written.replace(folder / "config.yaml")
    except OSError as error:
        raise ConfigError(
            f"the run's folder is {folder}, but it cannot be written: {error.strerror}; make room, or set runs_dir to "
            "another folder"
        ) from None
    return folder, changes


def _changed(before: str, config: RunConfig) -> tuple[str, ...]:
    """Settings that differ from those of an earlier start, as ``key old → new``."""
    try:
        old = parse_config(before)
    except ConfigError:  # of another version
        return ("config.yaml of the start before is of another version",)
    was, now = _flat(old.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    return tuple(f"{key} {was.get(key)} → {now.get(key)}" for key in {**was, **now} if was.get(key) != now.get(key))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
