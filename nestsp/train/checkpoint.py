"""Saved state of a run: a folder that is whole or is not there, and that another number of ranks can resume.

- Tensors go through PyTorch Distributed Checkpoint (DCP): every rank writes the shards it holds and reads the parts it
  needs. Nothing is gathered. Names are those of the Hugging Face model: ``model.<name>``, ``optimizer.<name>.exp_avg``.
  Values are the sharded float32 masters, so what is restored is bit-equal.
- All ranks write into ``.saving-step-<n>``. Rank 0 adds the manifest (sizes, checksums, whose checkpoint it is), syncs,
  and renames once. A killed run leaves a ``.saving-`` folder, which is never read and which the next save removes.
- How each piece of work went is collected over a CPU group before the next begins, so a full disk on one rank is a
  `CheckpointError` on all, not a hang.
- Nothing that is read can run code: see `nestsp.train.dcp`. Tensors are read with ``weights_only``; the rest is JSON
  and safetensors.

Learning rate, weight decay and the like are no part of it: they follow from the config and the step.

Price: 4 bytes a parameter and 8 for AdamW's moments, over all ranks. Every file is read once more for its CRC-32
(4 GB/s a core, SHA-256 1.7 GB/s, on this project's shared 2 cores, Python 3.11): when saved by the rank that wrote it,
when loaded dealt over the ranks. CRC-32 finds damage; it does not tell who wrote the file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from nestsp.errors import CheckpointError
from nestsp.train.agreement import one_sentence, together
from nestsp.train.dcp import METADATA, Reader, Writer, dcp_sentence, read_metadata, refuse_other_tensors
from nestsp.train.folders import OLD, SAVING, crc32_of, prepare_folder, publish_folder, write_synced
from nestsp.train.manifest import (
    ANOTHER,
    CHECKPOINTS,
    MANIFEST,
    PROGRESS,
    Manifest,
    Progress,
    RunIdentity,
    check_sizes,
    check_sums,
    manifest_json,
    read_manifest,
    validate_checkpoint,
    whole_checkpoints,
)
from nestsp.train.random_state import seed_everything, set_random_state
from nestsp.train.run_state import RunState, device_of, run_tensors

__all__ = ["load_checkpoint", "read_model", "remove_old_checkpoints", "save_checkpoint"]

MODEL = "model.json"


def save_checkpoint(
    run_dir: Path,
    state: RunState,
    identity: RunIdentity,
    *,
    control_group: dist.ProcessGroup,
    model: str | None = None,
    keep: int | None = None,
) -> Path:
    """Save a run's state as ``run_dir/checkpoints/step-<n>``. All ranks call it.

    Args:
        run_dir: On a file system that all ranks share.
        state: Of this rank.
        identity: What `validate_checkpoint` will compare.
        control_group: A CPU group of all ranks that nothing else uses meanwhile.
        model: The Transformers config as JSON, so that the checkpoint can be exported without its run.
        keep: Checkpoints of this run that are left, this one among them; the oldest go. None for all.

    Returns:
        The checkpoint's folder. A checkpoint of the same step is replaced once the new one is whole.

    Raises:
        CheckpointError: It failed on some rank; then nothing has changed.
    """
    rank, num_ranks = dist.get_rank(control_group), dist.get_world_size(control_group)
    progress = state.progress
    target = run_dir / CHECKPOINTS / f"step-{progress.step:06d}"
    saving = target.with_name(SAVING + target.name)
    task = f"{target} could not be saved"
    remedy = "free space or mend the folder and resume; older checkpoints are whole"
    said = one_sentence(task, remedy)

    def prepare() -> None:
        if rank == 0:
            for left_over in sorted((*target.parent.glob(f"{SAVING}step-*"), *target.parent.glob(f"{OLD}step-*"))):
                shutil.rmtree(left_over)
            prepare_folder(target)

    def write_own() -> list[tuple[str, int, int]]:
        write_synced(saving / _random_file(rank), safetensors.torch.save(dict(state.random)))
        names = [_random_file(rank), *(path.name for path in saving.glob(f"__{rank}_*"))]
        if rank == 0:
            write_synced(saving / PROGRESS, json.dumps(progress.to_json(), indent=2).encode())
            names += [PROGRESS, METADATA]
            if model is not None:
                write_synced(saving / MODEL, model.encode())
                names.append(MODEL)
        return [(name, (saving / name).stat().st_size, crc32_of(saving / name)) for name in sorted(names)]

    def publish() -> None:
        if rank != 0:
            return
        for writer, written in enumerate(files_by_rank):
            for name, size, _ in written:
                path = saving / name
                if not path.exists() or path.stat().st_size != size:
                    raise CheckpointError(
                        f"{target} could not be saved: rank {writer} wrote {name}, but rank 0 does not see it whole; "
                        "put the run folder on a file system that all hosts share"
                    )
        manifest = Manifest(
            progress.step, num_ranks, identity, tuple(sorted(itertools.chain.from_iterable(files_by_rank)))
        )
        write_synced(saving / MANIFEST, json.dumps(manifest_json(manifest), indent=2).encode())
        publish_folder(saving, target)

    def remove_old() -> None:
        if rank == 0 and keep is not None:
            remove_old_checkpoints(target.parent, keep)

    try:
        together(control_group, said(prepare))
        with dcp_sentence(task, remedy):
            dcp_save(dict(state.tensors), storage_writer=Writer(saving), process_group=control_group)
        files = together(control_group, said(write_own))
        files_by_rank: list[list[tuple[str, int, int]]] = [[] for _ in range(num_ranks)]
        dist.gather_object(files, files_by_rank if rank == 0 else None, group=control_group, group_dst=0)
        together(control_group, said(publish))
    except CheckpointError:
        if rank == 0:  # all ranks have agreed that it failed, so none is still writing
            shutil.rmtree(saving, ignore_errors=True)
        raise
    together(control_group, one_sentence(f"checkpoints older than {target} could not be removed", remedy)(remove_old))
    return target


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Leave the whole checkpoints of the highest steps. Called by one rank.

    Each is renamed first, so that one whose removal is cut short is no checkpoint any more; the next save removes it.
    """
    saved = whole_checkpoints(folder)
    for step in sorted(saved)[:-keep]:
        doomed = folder / f"{OLD}step-{step:06d}"
        saved[step].rename(doomed)
        shutil.rmtree(doomed)


def load_checkpoint(
    path: Path,
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    identity: RunIdentity,
    control_group: dist.ProcessGroup,
) -> Progress:
    """Restore a run's state in place, on any number of ranks. All ranks call it, before the first step.

    Parameters and optimizer state become bit-equal to the saved ones. On as many ranks as saved it, so does each rank's
    random state; on another number every rank gets a fresh one that follows from progress and rank.

    Args:
        path: From `find_checkpoint`.
        root: Made as the saved one was, sharded over any number of ranks.
        optimizer: Over the root's parameters.
        identity: Of this run.
        control_group: A CPU group of all ranks.

    Raises:
        CheckpointError: It is another run's, incomplete or damaged, or has something in it that could run code.
    """
    rank, num_ranks = dist.get_rank(control_group), dist.get_world_size(control_group)
    task = f"{path} could not be loaded"
    said = one_sentence(task, ANOTHER)

    def check() -> Manifest:
        manifest = validate_checkpoint(path, identity)
        check_sums(path, manifest.files[rank::num_ranks])
        return manifest

    manifest = together(control_group, said(check))

    def read() -> tuple[Progress, Metadata, dict[str, Tensor] | None]:
        progress = Progress.from_json(json.loads((path / PROGRESS).read_text()))
        metadata = read_metadata(path, {name for name, _, _ in manifest.files})
        refuse_other_tensors(path, run_tensors(root, optimizer, metadata), metadata)
        same_ranks = manifest.num_ranks == num_ranks
        return progress, metadata, safetensors.torch.load_file(path / _random_file(rank)) if same_ranks else None

    progress, metadata, random_state = together(control_group, said(read))
    with dcp_sentence(task, ANOTHER):
        dcp_load(
            run_tensors(root, optimizer, metadata), storage_reader=Reader(path, metadata), process_group=control_group
        )

    def restore_random() -> None:
        if random_state is not None:
            set_random_state(random_state, device_of(root))
        else:
            _seed_anew(progress, rank)

    together(control_group, said(restore_random))
    return progress


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model in a checkpoint: its Transformers config as JSON, and its whole tensors by Hugging Face names.

    Needs no process group and no GPU; takes the model once in memory.

    Raises:
        CheckpointError: It is incomplete or damaged, or has something in it that could run code.
    """
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    check_sums(path, manifest.files)
    names = {name for name, _, _ in manifest.files}
    if MODEL not in names:
        raise CheckpointError(f"{path} has no {MODEL}, but an export needs it; resume the run and save it again")
    metadata = read_metadata(path, names)
    prefix = "model."
    tensors: dict[str, Tensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if name.startswith(prefix):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with dcp_sentence(f"{path} could not be read", ANOTHER), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant
        dcp_load(tensors, storage_reader=Reader(path, metadata), no_dist=True)
    config = json.loads((path / MODEL).read_text(encoding="utf-8"))
    return config, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _random_file(rank: int) -> str:
    return f"random-{rank}.safetensors"


def _seed_anew(progress: Progress, rank: int) -> None:
    digest = hashlib.sha256(f"{json.dumps(progress.to_json(), sort_keys=True)},{rank}".encode()).digest()
    seed_everything(int.from_bytes(digest[:8], "little"))
