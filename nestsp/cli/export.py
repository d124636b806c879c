"""``nestsp export``: from any checkpoint to the files that Transformers' ``from_pretrained`` reads, without its run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from nestsp.errors import CheckpointError, ConfigError
from nestsp.model.lora import merge_adapters
from nestsp.train.checkpoint import read_model
from nestsp.train.console import Screen
from nestsp.train.export import refuse_to_replace, write_hugging_face
from nestsp.train.manifest import find_checkpoint, read_progress

__all__ = ["export_checkpoint"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_checkpoint(checkpoint: Path, out: Path, dtype: str, tokenizer: Path | None) -> None:
    """Write a checkpoint's model in Hugging Face format.

    Args:
        checkpoint: A checkpoint's folder, or a run's, whose latest is taken.
        out: Where to; its name must be free or an export's.
        dtype: Of the exported numbers.
        tokenizer: A tokenizer's folder, whose files are copied along.

    Raises:
        NestspError: A subclass that names what is wrong.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}, but it must be {' or '.join(_DTYPES)}; choose one")
    refuse_to_replace(out)
    found = find_checkpoint(checkpoint)
    screen = Screen()
    with screen.progress("exporting", None):
        keys, tensors = read_model(found)
        tensors.pop("router_counts", None)  # of the run's routers, not the model's
        if (lora := read_progress(found).settings.get("train.lora")) is not None:
            tensors = merge_adapters(tensors, lora["alpha"] / lora["rank"])
        converted = {name: tensor.to(_DTYPES[dtype]) for name, tensor in tensors.items()}
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)  # no remote code, whatever the keys say
        try:
            write_hugging_face(config, converted, out, tokenizer=tokenizer)
        except OSError as error:
            raise CheckpointError(f"{out} could not be exported: {error.strerror}; free space or mend it") from None
    screen.say(f"{found} is exported to {out} (AutoModelForCausalLM.from_pretrained reads it)")
