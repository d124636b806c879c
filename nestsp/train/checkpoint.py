"""Saved state of a run: a folder that is whole or is not there, and that another number of ranks can resume.

- Tensors go through PyTorch Distributed Checkpoint (DCP): every rank writes the shards it holds and reads the parts it
  needs. Nothing is gathered. Names are those of the Hugging Face model: ``model.<name>``, ``optimizer.<name>.exp_avg``.
  Values are the sharded float32 masters, so what is restored is bit-equal.
- All ranks write into ``.saving-step-<n>``. Rank 0 adds the manifest (sizes, checksums, whose checkpoint it is), syncs,
  and renames once. A killed run leaves a ``.saving-`` folder, which is never read and which the next save removes.
- How each piece of work went is collected over a CPU group before the next begins, so a full disk on one rank is a
  `CheckpointError` on all, not a hang.
- Nothing that is read can run code. DCP's ``.metadata`` is a pickle, which DCP reads with a plain ``pickle.load``; here
  only the value classes it consists of can be named in it. DCP would unpickle entries that are no tensors; a
  checkpoint with such an entry is refused. Tensors are read with ``weights_only``, the rest is JSON and safetensors.

Learning rate, weight decay and the like are no part of it: they follow from the config and the step.

Price: 4 bytes a parameter and 8 for AdamW's moments, over all ranks. Every file is read once more for its CRC-32
(4 GB/s a core, SHA-256 1.7 GB/s, on this project's shared 2 cores, Python 3.11): when saved by the rank that wrote it,
when loaded dealt over the ranks. CRC-32 finds damage; it does not tell who wrote the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from transformers import PreTrainedConfig

from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError, NestspError
from nestsp.train.random_state import get_random_state, seed_everything, set_random_state

__all__ = [
    "Manifest",
    "Progress",
    "RunIdentity",
    "RunState",
    "Staging",
    "find_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "model_digest",
    "named_parameters",
    "on_all_ranks",
    "prepare_folder",
    "publish_folder",
    "read_manifest",
    "read_model",
    "read_progress",
    "remove_old_checkpoints",
    "run_state",
    "save_checkpoint",
    "validate_checkpoint",
]

T = TypeVar("T")

FORMAT = 1
"""Rises when an older nestsp could not read, or would misread, what this one writes."""

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_METADATA = ".metadata"
_SAVING = ".saving-"
_REPLACED = ".replaced-"
_OLD = ".old-"
_MODEL = "model.json"

# Keys of a Transformers config that change neither what a model computes nor its sizes. All others count, also those
# that nobody has thought of: a needless refusal is a sentence, a wrong resume is a wrong model.
_NO_MATHEMATICS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# All that DCP's metadata consists of (torch 2.13), dtypes aside. Constructors of plain values; none opens or runs
# anything.
_METADATA_GLOBALS = frozenset(
    {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


# --- Values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a checkpoint belongs to. Digests decide; names are for messages.

    Attributes:
        corpus: Digest of the token store.
        model: See `model_digest`.
        corpus_name: What the user calls the corpus.
        model_name: What the user calls the model.
    """

    corpus: str
    model: str
    corpus_name: str = ""
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a trainer needs besides tensors.

    Attributes:
        step: Optimizer steps done.
        data: Where the next batch begins.
        settings: What must stay the same for the step and the data's place to mean the same; plain JSON.
    """

    step: int
    data: DataState
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "data": asdict(self.data), "settings": dict(self.settings)}

    @staticmethod
    def from_json(data: Any) -> Progress:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        match data:
            case {
                "step": int(step),
                "data": {"epoch": int(epoch), "position": int(position)},
                "settings": dict(settings),
            }:
                return Progress(step, DataState(epoch, position), settings)
        raise ValueError(f"{_PROGRESS} has not the keys step, data and settings")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is made of.

    Attributes:
        step: Optimizer steps done.
        num_ranks: Ranks that saved it.
        identity: Whose it is.
        files: Name, size in bytes and CRC-32 of every file but the manifest.
    """

    step: int
    num_ranks: int
    identity: RunIdentity
    files: tuple[tuple[str, int, int], ...]


def model_digest(config: PreTrainedConfig) -> str:
    """A digest of what decides a model's mathematics and sizes; paths, versions and implementations do not count.

    Returns:
        16 hexadecimal digits.
    """
    keys = {key: value for key, value in config.to_dict().items() if key not in _NO_MATHEMATICS}
    text = json.dumps(_plain(keys), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The same value however it was written: 10000 and 10000.0 are one number, a tuple is a list."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# --- Finding and judging: no collective, no GPU --------------------------------------------------


def find_checkpoint(where: Path) -> Path:
    """The checkpoint that a path means: a run folder's latest, or the path itself.

    Raises:
        CheckpointError: There is none.
    """
    if not where.exists():
        raise CheckpointError(
            f"the checkpoint is {where}, but there is no such folder; give a run's folder or one of its checkpoints"
        )
    if where.name.startswith((_SAVING, _REPLACED, _OLD)):
        raise CheckpointError(
            f"the checkpoint is {where}, but that folder is left over from a save that did not end; give the run's "
            "folder"
        )
    if (where / MANIFEST).is_file():
        return where
    if re.fullmatch(r"step-\d+", where.name) and where.is_dir():
        raise CheckpointError(f"{where} has no {MANIFEST}, so it is no whole checkpoint; give another one")
    latest = latest_checkpoint(where)
    if latest is None:
        raise CheckpointError(
            f"the checkpoint is {where}, but it holds no whole checkpoint; give a run's folder that has one "
            f"in '{CHECKPOINTS}'"
        )
    return latest


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint of the highest step in a run's folder; None if there is none."""
    saved = _whole_checkpoints(run_dir / CHECKPOINTS)
    return saved[max(saved)] if saved else None


def _whole_checkpoints(folder: Path) -> dict[int, Path]:
    """By step."""
    saved: dict[int, Path] = {}
    for path in sorted(folder.glob("*")):  # '.replaced-' sorts before 'step-', which wins
        match = re.fullmatch(rf"(?:{re.escape(_REPLACED)})?step-(\d+)", path.name)
        if match and (path / MANIFEST).is_file():
            saved[int(match[1])] = path
    return saved


def read_manifest(path: Path) -> Manifest:
    """Read what a checkpoint says it is.

    Raises:
        CheckpointError: It says nothing, nonsense, or has another format.
    """
    try:
        data = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no readable {MANIFEST} ({_short(error)}); give another checkpoint") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} has format {data.get('format')!r}, but this nestsp reads format {FORMAT}; resume with the "
            "version that saved it"
        )
    try:
        files = tuple((str(name), int(size), int(crc)) for name, (size, crc) in data["files"].items())
        manifest = Manifest(int(data["step"]), int(data["num_ranks"]), RunIdentity(**data["identity"]), files)
        sound = data["crc32"] == _manifest_json(manifest)["crc32"] and all(Path(f[0]).name == f[0] for f in files)
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not fit its own checksum; {_ANOTHER}")
    return manifest


def read_progress(path: Path) -> Progress:
    """Read a checkpoint's progress alone, before its tensors; checksums come with loading.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return Progress.from_json(json.loads((path / _PROGRESS).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _PROGRESS} cannot be read ({_short(error)}); {_ANOTHER}") from None


def validate_checkpoint(path: Path, identity: RunIdentity) -> Manifest:
    """Check that a checkpoint is this run's and that every file is there in full length; checksums come with loading.

    Args:
        path: From `find_checkpoint`.
        identity: Of the run that wants to resume.

    Raises:
        CheckpointError: It is another run's, or a file is missing or has another size.
    """
    manifest = read_manifest(path)
    saved = manifest.identity
    if saved.corpus != identity.corpus:
        raise CheckpointError(
            f"{path.name} was saved from corpus {_named(saved.corpus_name, saved.corpus)}, but this run reads "
            f"{_named(identity.corpus_name, identity.corpus)}; go back to the corpus, tokenizer and limits it was "
            "saved with, or start anew without resume"
        )
    if saved.model != identity.model:
        raise CheckpointError(
            f"{path.name} was saved from model {_named(saved.model_name, saved.model)}, but this run trains "
            f"{_named(identity.model_name, identity.model)}; go back to the model config it was saved with, or start "
            "anew without resume"
        )
    _check_sizes(path, manifest)
    return manifest


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for name, size, _ in manifest.files:
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read ({_short(error)}); {_ANOTHER}") from None
        if found != size:
            raise CheckpointError(f"{path / name} has {found:,} bytes, but {size:,} were saved; {_ANOTHER}")


def _check_sums(path: Path, files: Iterable[tuple[str, int, int]]) -> None:
    for name, _, crc in files:
        if _crc32(path / name) != crc:
            raise CheckpointError(f"{path / name} has changed since it was saved: its checksum differs; {_ANOTHER}")


_ANOTHER = "give an older checkpoint, or copy this one again"


def _named(name: str, digest: str) -> str:
    return f"'{name}' (digest {digest[:8]})" if name else f"with digest {digest[:8]}"


def _short(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return (text if len(text) <= 300 else text[:297] + "...") or type(error).__name__


# --- One outcome for all ranks ------------------------------------------------------------------


def on_all_ranks(control_group: dist.ProcessGroup, task: str, work: Callable[[], T], *, remedy: str) -> T:
    """Do some work on every rank, and fail on every rank if it failed on one.

    Args:
        control_group: A CPU group of all ranks.
        task: Subject and verb of the error's sentence, such as ``step-000003 could not be saved``.
        work: This rank's work; may do no collectives.
        remedy: What the user can do; not used where the work raised a sentence of its own.

    Returns:
        This rank's own result.

    Raises:
        CheckpointError: The work failed on some rank; says how on the first one.
    """
    box: list[T] = []
    problem: str | None = None
    try:
        box.append(work())
    except NestspError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{task} on rank {dist.get_rank(control_group)}: {_short(error)}; {remedy}"
    problems: list[str | None] = [None] * dist.get_world_size(control_group)
    dist.all_gather_object(problems, problem, group=control_group)
    for first in filter(None, problems):
        raise _on_every_rank(first)
    return box[0]


def _on_every_rank(sentence: str) -> CheckpointError:
    error = CheckpointError(sentence)
    error.raised_on_all_ranks = True
    return error


@contextlib.contextmanager
def _one_sentence(task: str, remedy: str) -> Iterator[None]:
    """DCP raises the same on all ranks, with the stacks of those that failed; keep the first one's reason."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise _on_every_rank(f"{task} on rank {rank}: {_short(reason)}; {remedy}") from error


# --- Folders that are whole or not there ---------------------------------------------------------


def prepare_folder(target: Path) -> Path:
    """An empty folder beside a target, to be filled and then published; what an earlier try left there goes.

    Called by one rank. If an earlier replacement was cut short between its two renames, what it replaced is put back.
    """
    saving, replaced = target.with_name(_SAVING + target.name), target.with_name(_REPLACED + target.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)
    if saving.exists():
        shutil.rmtree(saving)
    saving.mkdir()
    return saving


def publish_folder(saving: Path, target: Path) -> None:
    """Rename a filled folder to its target; only then does a target that was there before go. Called by one rank."""
    _sync_folder(saving)
    replaced = target.with_name(_REPLACED + target.name)
    if target.exists():
        target.rename(replaced)
    try:
        saving.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


# --- Saving -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """All that a rank must write of a run that stands between two steps.

    Attributes:
        tensors: Model and optimizer by name, sharded.
        random: See `nestsp.train.random_state`.
        progress: Rank 0's is saved.
    """

    tensors: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    progress: Progress


def run_state(root: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> RunState:
    """The state as it is: the tensors are the run's own, and the next step changes them.

    Args:
        root: A `nestsp.model.root.LossRoot`, sharded or not.
        optimizer: Over the root's parameters; its state must be tensors, as AdamW's is.
        progress: Where the run stands.
    """
    return RunState(_tensors(root, optimizer), get_random_state(_device(root)), progress)


class Staging:
    """Copies of a run's state on the CPU, for a save that goes on beside the next steps.

    The memory is taken once and used again: 12 bytes a parameter over all ranks with AdamW, pinned for a GPU's.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: RunState) -> RunState:
        """A state of its own; the one before it is overwritten."""
        copies: dict[str, Tensor] = {}
        on_gpu = False
        for name, tensor in state.tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local, non_blocking=True)
            on_gpu |= local.is_cuda
            copies[name] = _like(tensor, buffer)
        if on_gpu:
            torch.cuda.synchronize()
        return RunState(copies, state.random, state.progress)


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    """A rank's part of a tensor in another place, as a part of that tensor."""
    if not isinstance(tensor, DTensor):
        return local
    # Not DTensor.from_local: it would move the part to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


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
    saving = target.with_name(_SAVING + target.name)
    task = f"{target} could not be saved"
    remedy = "free space or mend the folder and resume; older checkpoints are whole"

    def prepare() -> None:
        if rank == 0:
            for left_over in sorted((*target.parent.glob(f"{_SAVING}step-*"), *target.parent.glob(f"{_OLD}step-*"))):
                shutil.rmtree(left_over)
            prepare_folder(target)

    def write_own() -> list[tuple[str, int, int]]:
        _write(saving / _random_file(rank), safetensors.torch.save(dict(state.random)))
        names = [_random_file(rank), *(path.name for path in saving.glob(f"__{rank}_*"))]
        if rank == 0:
            _write(saving / _PROGRESS, json.dumps(progress.to_json(), indent=2).encode())
            names += [_PROGRESS, _METADATA]
            if model is not None:
                _write(saving / _MODEL, model.encode())
                names.append(_MODEL)
        return [(name, (saving / name).stat().st_size, _crc32(saving / name)) for name in sorted(names)]

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
        _write(saving / MANIFEST, json.dumps(_manifest_json(manifest), indent=2).encode())
        publish_folder(saving, target)

    def remove_old() -> None:
        if rank == 0 and keep is not None:
            remove_old_checkpoints(target.parent, keep)

    try:
        on_all_ranks(control_group, task, prepare, remedy=remedy)
        with _one_sentence(task, remedy):
            dcp_save(dict(state.tensors), storage_writer=_Writer(saving), process_group=control_group)
        files = on_all_ranks(control_group, task, write_own, remedy=remedy)
        files_by_rank: list[list[tuple[str, int, int]]] = [[] for _ in range(num_ranks)]
        dist.gather_object(files, files_by_rank if rank == 0 else None, group=control_group, group_dst=0)
        on_all_ranks(control_group, task, publish, remedy=remedy)
    except CheckpointError:
        if rank == 0:  # all ranks have agreed that it failed, so none is still writing
            shutil.rmtree(saving, ignore_errors=True)
        raise
    on_all_ranks(control_group, f"checkpoints older than {target} could not be removed", remove_old, remedy=remedy)
    return target


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Leave the whole checkpoints of the highest steps. Called by one rank.

    Each is renamed first, so that one whose removal is cut short is no checkpoint any more; the next save removes it.
    """
    saved = _whole_checkpoints(folder)
    for step in sorted(saved)[:-keep]:
        doomed = folder / f"{_OLD}step-{step:06d}"
        saved[step].rename(doomed)
        shutil.rmtree(doomed)


class _Writer(FileSystemWriter):
    """Leaves this machine's path, which DCP would note, out of the metadata, and says why a write failed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # On a full disk torch.save ends in "unexpected pos 704 vs 598"; the reason stands behind it, and would be
            # lost on the way to other ranks.
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__context__
            raise reason or error from None

    def storage_meta(self) -> StorageMeta | None:
        return None


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "identity": asdict(manifest.identity),
        "files": {name: [size, crc] for name, size, crc in manifest.files},
    }
    return content | {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


# --- Loading ------------------------------------------------------------------------------------


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

    def check() -> Manifest:
        manifest = validate_checkpoint(path, identity)
        _check_sums(path, manifest.files[rank::num_ranks])
        return manifest

    manifest = on_all_ranks(control_group, task, check, remedy=_ANOTHER)

    def read() -> tuple[Progress, Metadata, dict[str, Tensor] | None]:
        progress = Progress.from_json(json.loads((path / _PROGRESS).read_text()))
        metadata = _read_metadata(path, {name for name, _, _ in manifest.files})
        _refuse_other_tensors(path, _tensors(root, optimizer, metadata), metadata)
        same_ranks = manifest.num_ranks == num_ranks
        return progress, metadata, safetensors.torch.load_file(path / _random_file(rank)) if same_ranks else None

    progress, metadata, random_state = on_all_ranks(control_group, task, read, remedy=_ANOTHER)
    with _one_sentence(task, _ANOTHER):
        dcp_load(
            _tensors(root, optimizer, metadata), storage_reader=_Reader(path, metadata), process_group=control_group
        )

    def restore_random() -> None:
        if random_state is not None:
            set_random_state(random_state, _device(root))
        else:
            _seed_anew(progress, rank)

    on_all_ranks(control_group, task, restore_random, remedy=_ANOTHER)
    return progress


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model in a checkpoint: its Transformers config as JSON, and its whole tensors by Hugging Face names.

    Needs no process group and no GPU; takes the model once in memory.

    Raises:
        CheckpointError: It is incomplete or damaged, or has something in it that could run code.
    """
    manifest = read_manifest(path)
    _check_sizes(path, manifest)
    _check_sums(path, manifest.files)
    names = {name for name, _, _ in manifest.files}
    if _MODEL not in names:
        raise CheckpointError(f"{path} has no {_MODEL}, but an export needs it; resume the run and save it again")
    metadata = _read_metadata(path, names)
    prefix = "model."
    tensors: dict[str, Tensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if name.startswith(prefix):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with _one_sentence(f"{path} could not be read", _ANOTHER), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant
        dcp_load(tensors, storage_reader=_Reader(path, metadata), no_dist=True)
    config = json.loads((path / _MODEL).read_text(encoding="utf-8"))
    return config, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """Reads tensors by metadata that `_read_metadata` has checked; never DCP's own unpickling."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _read_metadata(path: Path, files: set[str]) -> Metadata:
    """Which tensor lies where, by the restricted unpickler.

    Raises:
        CheckpointError: It is damaged, names something else than the classes it needs, an entry that is no tensor
            (DCP would unpickle it), or a file that the manifest does not have.
    """
    try:
        with (path / _METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"{path / _METADATA} is refused: {_short(error)}; {_ANOTHER}") from None
    sound = (
        isinstance(metadata, Metadata)
        and isinstance(metadata.state_dict_metadata, dict)
        and isinstance(metadata.storage_data, dict)
        and all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
        and all(
            isinstance(part, _StorageInfo) and part.relative_path in files and not part.transform_descriptors
            for part in metadata.storage_data.values()
        )
    )
    if not sound:
        raise CheckpointError(
            f"{path / _METADATA} is refused: it has entries that are no tensors in the checkpoint's own files; "
            f"{_ANOTHER}"
        )
    return cast(Metadata, metadata)


def _refuse_other_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """The model's digest makes a difference unlikely; a changed Transformers could still name or shape things anew."""
    saved = metadata.state_dict_metadata
    for name in sorted(tensors.keys() ^ saved.keys()):
        where, other = ("this run", path.name) if name in tensors else (path.name, "this run")
        raise CheckpointError(f"{where} has {name}, but {other} has not; resume with the versions that saved it")
    for name, tensor in tensors.items():
        entry = saved[name]
        assert isinstance(entry, TensorStorageMetadata)
        here, there = (tuple(tensor.shape), tensor.dtype), (tuple(entry.size), entry.properties.dtype)
        if here != there:
            raise CheckpointError(
                f"{path.name} has {name} as {there[1]} {list(there[0])}, but this run's is {here[1]} {list(here[0])}; "
                "resume with the config and versions that saved it"
            )


# --- Names of tensors ---------------------------------------------------------------------------


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a `nestsp.model.root.LossRoot` by their Hugging Face names, sharded; a tied one once."""
    root.state_dict()  # FSDP's hook: units that are still gathered go back to their shards
    prefix = "model."
    named = dict(root.named_parameters())
    assert all(name.startswith(prefix) for name in named), sorted(named)
    return {name.removeprefix(prefix): parameter for name, parameter in named.items()}


def _tensors(root: nn.Module, optimizer: torch.optim.Optimizer, saved: Metadata | None = None) -> dict[str, Tensor]:
    """All tensors of a run by name, as they are: writing into them restores the run.

    Args:
        root: Its persistent buffers are among the model's tensors.
        optimizer: State of parameters that have had no step is missing.
        saved: If given, the optimizer gets the state that it has there, zeros, to be written into.
    """
    parameters = named_parameters(root)
    aliases = {name.removeprefix("model.") for name, _ in root.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, value in root.state_dict().items():
        if name.removeprefix("model.") not in aliases:
            tensors[f"model.{name.removeprefix('model.')}"] = value
    if saved is not None:
        _make_optimizer_state(parameters, optimizer, saved)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert isinstance(value, Tensor), f"optimizer state {key} is {type(value).__name__}, not a tensor"
            tensors[f"optimizer.{names[parameter]}.{key}"] = value
    return tensors


def _make_optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: Metadata
) -> None:
    keys: dict[str, list[str]] = {}
    for full_name in saved.state_dict_metadata:
        if full_name.startswith("optimizer."):
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(name, []).append(key)
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")  # where AdamW counts its steps
        members = {id(parameter) for parameter in group["params"]}
        for name, parameter in parameters.items():
            if id(parameter) not in members:
                continue
            wanted, state = keys.get(name, []), optimizer.state[parameter]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key in wanted:
                entry = saved.state_dict_metadata[f"optimizer.{name}.{key}"]
                assert isinstance(entry, TensorStorageMetadata)
                if key in state:
                    continue
                dtype = entry.properties.dtype
                if entry.size == parameter.shape:
                    state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    device = parameter.device if on_device else torch.device("cpu")
                    state[key] = torch.zeros(entry.size, dtype=dtype, device=device)
            if not state:
                del optimizer.state[parameter]


def _random_file(rank: int) -> str:
    return f"random-{rank}.safetensors"


def _device(root: nn.Module) -> torch.device:
    return next(root.parameters()).device


def _seed_anew(progress: Progress, rank: int) -> None:
    digest = hashlib.sha256(f"{json.dumps(progress.to_json(), sort_keys=True)},{rank}".encode()).digest()
    seed_everything(int.from_bytes(digest[:8], "little"))
