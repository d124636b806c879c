"""TensorBoard and Weights & Biases, for runs that ask for them: opened by rank 0 alone, one run folder one run there.

Both are optional packages. What they get is what `metrics.jsonl` gets.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nestsp.config import RunConfig, TrainConfig
from nestsp.errors import ConfigError

__all__ = ["Tracker", "check_trackers", "open_trackers"]


class Tracker(Protocol):
    """Takes the figures of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's figures; steps come in rising order."""

    def close(self) -> None:
        """Write what is not written yet."""


def check_trackers(config: TrainConfig) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: It is not.
    """
    wanted = {"train.tensorboard": ("tensorboard", config.tensorboard), "train.wandb": ("wandb", config.wandb)}
    for setting, (package, asked) in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{setting} is set, but {package} is not installed; install nestsp[{package}], or leave it out"
            )


def open_trackers(config: RunConfig, folder: Path, last_step: int) -> tuple[Tracker, ...]:
    """Open the trackers that the run asks for. Called by rank 0 alone.

    Args:
        config: The run.
        folder: The run's.
        last_step: Steps done; later ones that a tracker already has are run again.

    Raises:
        ConfigError: A tracker cannot be opened.
    """
    trackers: list[Tracker] = []
    if config.train.tensorboard:
        trackers.append(_TensorBoard(folder / "tensorboard", last_step))
    if config.train.wandb is not None:
        try:
            trackers.append(_WandB(config, config.train.wandb, folder))
        except Exception as error:  # no key, no network, a project that is not theirs
            raise ConfigError(
                f"train.wandb is {config.train.wandb!r}, but no run can be opened there: "
                f"{' '.join(str(error).split())}; mend that, or set train.wandb_offline = true"
            ) from None
    return tuple(trackers)


class _TensorBoard:
    def __init__(self, folder: Path, last_step: int) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(folder), purge_step=last_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """One run a run folder. Its steps are a figure of ours: its own counter drops steps that are run again."""

    def __init__(self, config: RunConfig, project: str, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        note = folder / ".wandb-id"
        if not note.exists():
            note.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run = wandb.init(
            project=project,
            id=note.read_text(encoding="utf-8"),
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            resume="allow",
            mode="offline" if config.train.wandb_offline else "online",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
