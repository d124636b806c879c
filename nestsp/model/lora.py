"""Low-rank adapters (LoRA) by PEFT, in place: the model keeps its class and its layers; its own weights are frozen.

PEFT makes the layers and says what they compute. Their initial values are nestsp's: PEFT's distributions, drawn from
the seed and each parameter's name alone, so that they depend neither on ranks nor on how the weights are loaded. There
is no dropout: its random numbers would depend on the plan. Price: 16 bytes for each number of the adapters and 4 for
each of the model, over all shards.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from nestsp.config import LoraConfig
from nestsp.errors import ModelError

__all__ = [
    "add_adapters",
    "draw_adapters",
    "merge_adapters",
    "num_adapter_parameters",
    "own_name",
    "write_adapter",
]

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Give a model adapters, in place, and freeze all else.

    Raises:
        ModelError: PEFT is not installed, the model has no such layers, or they are no linear layers within it.
    """
    peft = _peft()
    try:
        targets = _linear_layers(model) if settings.targets is None else settings.targets
        with warnings.catch_warnings():  # of patterns for experts that PEFT makes itself; experts are refused below
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            peft.inject_adapter_in_model(_peft_config(settings, targets), model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ModelError(
            f"train.lora.targets is {settings.targets}, but PEFT refuses it for {type(model).__name__}: "
            f"{' '.join(str(error).split())}; name linear layers of the model"
        ) from None
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) and (
            type(module) is not peft.tuners.lora.Linear or module is head
        ):
            raise ModelError(
                f"train.lora.targets is {settings.targets}, which gives {name} an adapter, but nestsp trains adapters "
                "of linear layers alone, without the head; name others"
            )


def num_adapter_parameters(model: nn.Module) -> int:
    """Numbers that are trained of a model with adapters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def draw_adapters(model: nn.Module, seed: int, *, second_factor: bool = False) -> None:
    """Set the initial values: the first factor uniform as a linear layer's, the second 0, so nothing changes yet.

    Args:
        model: Sharded or not; no collective.
        seed: Of all adapters.
        second_factor: Draw it, too, as the first: adapters then change what the model computes, and both factors have
            gradients.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if ".lora_B." in name and not second_factor:
                local.zero_()
                continue
            digest = hashlib.sha256(f"{seed},{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            start = 0
            if isinstance(parameter, DTensor):
                _, (start, _) = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            local.copy_(whole[start : start + len(local)])


def own_name(name: str) -> str | None:
    """The name that a parameter has in the model without adapters; None for an adapter's.

    >>> own_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    >>> own_name("model.layers.0.self_attn.q_proj.lora_A.default.weight") is None
    True
    """
    return None if ".lora_" in name else name.replace(_BASE, ".")


def merge_adapters(tensors: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same: each own weight + scaling × B A.

    Args:
        tensors: Whole tensors of a model, by name; without adapters they are returned as they are.
        scaling: Alpha / rank.
    """
    merged = {}
    for name, tensor in tensors.items():
        plain = own_name(name)
        if plain is None:
            continue
        stem, base, _ = name.partition(_BASE)
        if base and name.endswith(".weight"):
            a, b = (tensors[f"{stem}.lora_{factor}.{_ADAPTER}.weight"] for factor in "AB")
            tensor = tensor + scaling * (b @ a)
        merged[plain] = tensor
    return merged


def write_adapter(tensors: Mapping[str, Tensor], settings: LoraConfig, base: str | None, folder: Path) -> None:
    """Write what PEFT's ``from_pretrained`` reads, into a folder that is there.

    Args:
        tensors: Whole tensors of a model, by name.
        settings: The adapters'.
        base: Where the model's own weights lie, for readers.
        folder: Where to.
    """
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors if own_name(name) is None}
    config = _peft_config(settings, tuple(sorted(layers)))
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    kept = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in tensors.items()
        if own_name(name) is None
    }
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError(
            "train.lora is set, but PEFT is not installed; install nestsp[lora], or leave train.lora out"
        ) from None
    return peft


def _linear_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """The last part of the names of all linear layers but the head. PEFT's "all-linear" takes experts, too."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return tuple(sorted({name.rpartition(".")[2] for name in linear}))


def _peft_config(settings: LoraConfig, targets: tuple[str, ...]) -> Any:
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
