"""Where a run goes on from, and whether it may."""

from __future__ import annotations

from pathlib import Path

from nestsp.config import RunConfig
from nestsp.errors import CheckpointError
from nestsp.train.manifest import Progress, RunIdentity, find_checkpoint, latest_checkpoint, validate_checkpoint
from nestsp.train.prepare import Prepared
from nestsp.train.run_folder import latest_run_folder, run_folder_of_job
from nestsp.train.world import World

__all__ = ["find_resumed", "lasting_settings", "refuse_other_settings"]


def find_resumed(config: RunConfig, resume: str | None, identity: RunIdentity, world: World) -> Path | None:
    """The checkpoint to go on from, known to be whole and of this run; None to begin a new run.

    When torchrun has restarted the ranks, the job's own run goes on from its last checkpoint, whatever was asked at the
    first start; without one it is begun again as it was then.

    Args:
        config: The settings.
        resume: ``auto`` for the latest run of this name, which begins a new one where it has no checkpoint yet; or the
            path of a run's folder or of a checkpoint.
        identity: Of this run.
        world: This rank.

    Raises:
        CheckpointError: There is none at the path, or it is damaged, or of another run.
    """
    found: Path | None = None
    if world.num_restarts:
        own = run_folder_of_job(Path(config.runs_dir), config.name, world.job)
        found = None if own is None else latest_checkpoint(own)
    if found is None and resume is not None:
        found = _asked_for(config, resume)
    if found is not None:
        validate_checkpoint(found, identity)
    return found


def _asked_for(config: RunConfig, resume: str) -> Path | None:
    if resume == "auto":
        latest = latest_run_folder(Path(config.runs_dir), config.name)
        return None if latest is None else latest_checkpoint(latest)
    where = Path(resume)
    if where.name in ("", ".."):  # its parents are not in the path
        where = where.resolve()
    if not where.exists():
        raise CheckpointError(
            f"--resume is {resume}, but there is nothing there; give a run's folder, a checkpoint's, or auto"
        )
    return find_checkpoint(where)


def lasting_settings(config: RunConfig) -> dict[str, object]:
    """Settings that must stay the same for a resumed run to see the same batches."""
    data = config.data
    return {
        "data.seed": data.seed,
        "data.tokens_per_step": data.tokens_per_step,
        "data.sequences_per_step": data.sequences_per_step,
        "data.samples_together": data.samples_together if data.samples_together > 1 else None,
        "train.lora": None if config.train.lora is None else config.train.lora.model_dump(mode="json"),
        "train.reference": True if config.train.reference else None,
    }


# What of a checkpoint a setting gives its meaning.
_MEANINGLESS = {
    "data.seed": "its place in the data means",
    "data.tokens_per_step": "its place in the data means",
    "data.sequences_per_step": "its place in the data means",
    "data.samples_together": "its place in the data means",
    "train.lora": "its weights and their optimizer's state fit",
    "train.reference": "the loss that it was trained by means",
}


def refuse_other_settings(checkpoint: Path, start: Progress, config: RunConfig, prepared: Prepared) -> None:
    """Refuse a checkpoint whose place in the data or whose step means nothing in this run.

    Raises:
        CheckpointError: It was saved with other settings, or the run has ended there.
    """
    for key, value in lasting_settings(config).items():
        saved = start.settings.get(key)
        if saved != value:
            raise CheckpointError(
                f"{checkpoint.name} was saved with {key} = {saved}, but this run has {value}, so {_MEANINGLESS[key]} "
                "nothing here; set it back, or begin a new run without --resume"
            )
    if start.step >= prepared.num_steps:
        raise CheckpointError(
            f"{checkpoint.name} is at step {start.step}, but the run ends at step {prepared.num_steps}; raise train."
            f"{'epochs' if config.train.steps is None else 'steps'} to go on"
        )
