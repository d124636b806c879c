"""What a checkpoint says it is, where the newest one lies, and whether it is this run's: no collective, no GPU.

Its values are plain JSON. The manifest comes last into a checkpoint's folder, so a folder without one is none.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError
from nestsp.train.agreement import reason
from nestsp.train.folders import OLD, REPLACED, SAVING, crc32_of

__all__ = [
    "ANOTHER",
    "CHECKPOINTS",
    "MANIFEST",
    "PROGRESS",
    "Manifest",
    "Progress",
    "RunIdentity",
    "check_sizes",
    "check_sums",
    "find_checkpoint",
    "latest_checkpoint",
    "manifest_json",
    "model_digest",
    "read_manifest",
    "read_progress",
    "validate_checkpoint",
    "whole_checkpoints",
]

FORMAT = 1
"""Rises when an older nestsp could not read, or would misread, what this one writes."""

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
ANOTHER = "give an older checkpoint, or copy this one again"

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
        raise ValueError(f"{PROGRESS} has not the keys step, data and settings")


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


def find_checkpoint(where: Path) -> Path:
    """The checkpoint that a path means: a run folder's latest, or the path itself.

    Raises:
        CheckpointError: There is none.
    """
    if not where.exists():
        raise CheckpointError(
            f"the checkpoint is {where}, but there is no such folder; give a run's folder or one of its checkpoints"
        )
    if where.name.startswith((SAVING, REPLACED, OLD)):
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
    saved = whole_checkpoints(run_dir / CHECKPOINTS)
    return saved[max(saved)] if saved else None


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """By step."""
    saved: dict[int, Path] = {}
    for path in sorted(folder.glob("*")):  # '.replaced-' sorts before 'step-', which wins
        match = re.fullmatch(rf"(?:{re.escape(REPLACED)})?step-(\d+)", path.name)
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
        raise CheckpointError(f"{path} has no readable {MANIFEST} ({reason(error)}); give another checkpoint") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} has format {data.get('format')!r}, but this nestsp reads format {FORMAT}; resume with the "
            "version that saved it"
        )
    try:
        files = tuple((str(name), int(size), int(crc)) for name, (size, crc) in data["files"].items())
        manifest = Manifest(int(data["step"]), int(data["num_ranks"]), RunIdentity(**data["identity"]), files)
        sound = data["crc32"] == manifest_json(manifest)["crc32"] and all(Path(f[0]).name == f[0] for f in files)
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not fit its own checksum; {ANOTHER}")
    return manifest


def read_progress(path: Path) -> Progress:
    """Read a checkpoint's progress alone, before its tensors; checksums come with loading.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return Progress.from_json(json.loads((path / PROGRESS).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / PROGRESS} cannot be read ({reason(error)}); {ANOTHER}") from None


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
    check_sizes(path, manifest)
    return manifest


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Check that every file of a checkpoint is there in full length.

    Raises:
        CheckpointError: One is not.
    """
    for name, size, _ in manifest.files:
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read ({reason(error)}); {ANOTHER}") from None
        if found != size:
            raise CheckpointError(f"{path / name} has {found:,} bytes, but {size:,} were saved; {ANOTHER}")


def check_sums(path: Path, files: Iterable[tuple[str, int, int]]) -> None:
    """Check some of a manifest's files against their checksums.

    Raises:
        CheckpointError: One has changed.
    """
    for name, _, crc in files:
        if crc32_of(path / name) != crc:
            raise CheckpointError(f"{path / name} has changed since it was saved: its checksum differs; {ANOTHER}")


def _named(name: str, digest: str) -> str:
    return f"'{name}' (digest {digest[:8]})" if name else f"with digest {digest[:8]}"


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """What is written of a manifest, its own checksum included."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "identity": asdict(manifest.identity),
        "files": {name: [size, crc] for name, size, crc in manifest.files},
    }
    return content | {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}
