"""PyTorch Distributed Checkpoint (DCP), held to what nestsp promises: nothing that is read can run code.

DCP's ``.metadata`` is a pickle, which DCP reads with a plain ``pickle.load``; here only the value classes it consists
of can be named in it. DCP would unpickle entries that are no tensors; a checkpoint with such an entry is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nestsp.errors import CheckpointError
from nestsp.train.agreement import everywhere, reason
from nestsp.train.manifest import ANOTHER

__all__ = ["METADATA", "Reader", "Writer", "dcp_sentence", "read_metadata", "refuse_other_tensors"]

METADATA = ".metadata"

# All that DCP's metadata consists of (torch 2.13), dtypes aside. Constructors of plain values; none opens or runs
# anything.
_GLOBALS = frozenset(
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


class Writer(FileSystemWriter):
    """Leaves this machine's path, which DCP would note, out of the metadata, and says why a write failed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # On a full disk torch.save ends in "unexpected pos 704 vs 598"; the reason stands behind it, and would be
            # lost on the way to other ranks.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None

    def storage_meta(self) -> StorageMeta | None:
        return None


@contextmanager
def dcp_sentence(task: str, remedy: str) -> Iterator[None]:
    """Say what DCP could not do: it raises the same on all ranks, with the stacks of those that failed.

    Args:
        task: Subject and verb, such as ``step-000003 could not be saved``.
        remedy: What the user can do.

    Raises:
        CheckpointError: With the first rank's reason, on all ranks.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise everywhere(CheckpointError(f"rank {rank}: {task}: {reason(cause)}; {remedy}")) from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class Reader(FileSystemReader):
    """Reads tensors by metadata that `read_metadata` has checked; never DCP's own unpickling."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(path: Path, files: set[str]) -> Metadata:
    """Which tensor lies where, by the restricted unpickler.

    Raises:
        CheckpointError: It is damaged, names something else than the classes it needs, an entry that is no tensor
            (DCP would unpickle it), or a file that the manifest does not have.
    """
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"{path / METADATA} is refused: {reason(error)}; {ANOTHER}") from None
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
            f"{path / METADATA} is refused: it has entries that are no tensors in the checkpoint's own files; {ANOTHER}"
        )
    return cast(Metadata, metadata)


def refuse_other_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
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
