"""Export of a trained model to the files that Transformers' ``from_pretrained`` reads.

Transformers' own ``save_pretrained`` writes them, so conversions such as those of experts' weights are Transformers'.
Parameters are gathered one at a time and kept by rank 0 alone, on the CPU: price, the whole model in float32 in rank
0's memory, and one parameter at a time on every device.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as hf_logging

from nestsp.config import LoraConfig
from nestsp.errors import CheckpointError
from nestsp.model.lora import merge_adapters, write_adapter
from nestsp.train.agreement import one_sentence, together
from nestsp.train.folders import prepare_folder, publish_folder
from nestsp.train.run_state import named_parameters

__all__ = ["export_adapter", "export_hugging_face", "refuse_to_replace", "write_hugging_face"]

# What a tokenizer's folder may hold of it (Transformers 5).
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def export_hugging_face(
    root: nn.Module,
    config: PreTrainedConfig,
    folder: Path,
    *,
    rank: int,
    control_group: dist.ProcessGroup,
    tokenizer: Path | None = None,
    lora: LoraConfig | None = None,
) -> Path:
    """Write a model as Hugging Face safetensors and ``config.json``, float32. All ranks call it.

    The folder is whole or not there; an earlier export in it is replaced once the new one is whole.

    Args:
        root: A `nestsp.model.root.LossRoot`, sharded or not.
        config: The model's; not changed.
        folder: Where to; its name must be free or an export's.
        rank: This one.
        control_group: A CPU group of all ranks.
        tokenizer: A tokenizer's folder, whose files are copied along.
        lora: Of the adapters that the model has, which are merged into its weights; None if it has none.

    Returns:
        The folder.

    Raises:
        CheckpointError: It failed; then nothing has changed.
    """
    said = one_sentence(f"{folder} could not be exported", "free space or mend the folder; the checkpoints are whole")

    def prepare() -> None:
        if rank == 0:
            _prepare(folder)

    together(control_group, said(prepare))
    tensors = _gather(root, keep=rank == 0)
    if lora is not None:
        tensors = merge_adapters(tensors, lora.alpha / lora.rank)

    def write() -> None:
        if rank == 0:
            write_hugging_face(config, tensors, folder, tokenizer=tokenizer)

    together(control_group, said(write))
    return folder


def write_hugging_face(
    config: PreTrainedConfig, tensors: Mapping[str, Tensor], folder: Path, *, tokenizer: Path | None = None
) -> None:
    """Write whole tensors as Hugging Face safetensors and ``config.json``. Called by one process.

    The folder is whole or not there; an earlier export in it is replaced once the new one is whole.

    Args:
        config: The model's; not changed.
        tensors: By Hugging Face names, on the CPU, all of one dtype, which becomes the model's.
        folder: Where to; its name must be free or an export's.
        tokenizer: A tokenizer's folder, whose files are copied along.

    Raises:
        CheckpointError: The folder holds something else, or the tokenizer's folder none.
    """

    def write(saving: Path) -> None:
        _write_model(config, dict(tensors), saving)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, saving)

    _publish(_prepare(folder), folder, write)


def _publish(saving: Path, folder: Path, write: Callable[[Path], None]) -> None:
    """Write into one folder, which then takes the place of another; if that fails, it is gone and the other stays."""
    try:
        write(saving)
        for path in saving.iterdir():
            _sync(path)
        publish_folder(saving, folder)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise


def refuse_to_replace(folder: Path) -> None:
    """Refuse a place where there is something else than an export.

    Raises:
        CheckpointError: There is.
    """
    if folder.exists() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is there and is no exported model, but an export would replace it; give another folder"
        )


def _prepare(folder: Path) -> Path:
    refuse_to_replace(folder)
    return prepare_folder(folder)


def export_adapter(
    root: nn.Module,
    settings: LoraConfig,
    folder: Path,
    *,
    rank: int,
    control_group: dist.ProcessGroup,
    base: str | None = None,
) -> Path:
    """Write a model's adapters as PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``. All ranks call it.

    Args:
        root: A `nestsp.model.root.LossRoot` with adapters, sharded or not.
        settings: The adapters'.
        folder: Where to; what is in it is replaced.
        rank: This one.
        control_group: A CPU group of all ranks.
        base: Where the model's own weights lie, for readers.

    Returns:
        The folder.

    Raises:
        CheckpointError: It failed; then nothing has changed.
    """
    said = one_sentence(f"{folder} could not be written", "free space or mend the folder; the checkpoints are whole")

    def prepare() -> None:
        if rank == 0:
            prepare_folder(folder)

    together(control_group, said(prepare))
    tensors = _gather(root, keep=rank == 0, only_trained=True)

    def write() -> None:
        if rank == 0:
            _publish(prepare_folder(folder), folder, lambda saving: write_adapter(tensors, settings, base, saving))

    together(control_group, said(write))
    return folder


def _gather(root: nn.Module, *, keep: bool, only_trained: bool = False) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face names, float32 on the CPU of the rank that keeps them. All ranks call it."""
    tensors = {}
    for name, parameter in named_parameters(root).items():
        if only_trained and not parameter.requires_grad:
            continue
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if keep:
            tensors[name] = whole.to("cpu", torch.float32, copy=True)
    return tensors


def _write_model(config: PreTrainedConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    # A model without memory of its own, to whose class save_pretrained belongs. Its config is a copy: saving notes
    # things in it, and its attention is the one that every family has.
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    dtype = next(iter(tensors.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would write over ours
    try:
        model.save_pretrained(folder, state_dict=tensors)
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _copy_tokenizer(source: Path, folder: Path) -> None:
    present = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not present:
        raise CheckpointError(
            f"the tokenizer's folder is {source}, but it has no tokenizer file; export without a tokenizer, or "
            "give its folder"
        )
    for name in present:
        shutil.copyfile(source / name, folder / name)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
