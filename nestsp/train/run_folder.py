"""Run folders: ``<runs_dir>/<name>-<n>``, each made once and never written over."""

from __future__ import annotations

import re
from pathlib import Path

from nestsp.errors import CheckpointError, ConfigError

__all__ = ["latest_run_folder", "new_run_folder"]


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


def latest_run_folder(runs_dir: Path, name: str) -> Path:
    """The run of this name with the highest number.

    Raises:
        CheckpointError: There is none.
    """
    numbers = _numbers(runs_dir, name) if runs_dir.is_dir() else []
    if not numbers:
        raise CheckpointError(
            f"--resume is auto, but there is no run {name}-<n> in {str(runs_dir)!r}; begin one without --resume"
        )
    return runs_dir / f"{name}-{max(numbers)}"


def _numbers(runs_dir: Path, name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"-([1-9][0-9]*)")
    found = (pattern.fullmatch(entry.name) for entry in runs_dir.iterdir())
    return [int(match.group(1)) for match in found if match]
