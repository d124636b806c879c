"""Published weights straight into shards: a model without memory of its own, filled slice by slice from safetensors.

- The model is made on the meta device; only its buffers are real, computed anew, since files do not hold them.
- Each rank then reads the rows of each tensor that its shard holds, and no others. What Transformers converts when it
  loads (single experts, which become one tensor) is converted by its own operations, one tensor at a time; experts are
  rows, so a rank reads its experts only.
- A name or shape that does not fit is refused before the first collective. Nothing is left at random values.

Price: a rank's peak is its shards and one tensor (of a converted one, all its sources).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from nestsp.errors import ModelError
from nestsp.model.adapter import build_model
from nestsp.model.lora import own_name

__all__ = ["Source", "empty_model", "fill_parameters", "find_sources"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Buffers that older files hold and that are computed now; Transformers leaves them out as well.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.position_ids)$")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a parameter's values lie.

    Attributes:
        tensors: (pattern, name in the files) of each tensor that it is made of, in order.
        files: The open file of each name.
        converter: Transformers' conversion; None where the tensor is the parameter.
        by_rows: The conversion makes row i of the i-th tensor of each pattern, so rows can be read alone.
    """

    tensors: tuple[tuple[str, str], ...]
    files: Mapping[str, Any]
    converter: WeightConverter | None = None
    by_rows: bool = False

    def read(self, name: str, start: int, stop: int, model: PreTrainedModel) -> Tensor:
        """Rows start to stop - 1 of the parameter of this name, on the CPU, in the dtype of the files."""
        if self.converter is None:
            [(_, key)] = self.tensors
            part = self.files[key].get_slice(key)
            rows: Tensor = part[start:stop] if part.get_shape() else part[...]
            return rows
        converter = copy.deepcopy(self.converter)
        numbers: dict[str, int] = {}
        for pattern, key in self.tensors:
            row = numbers[pattern] = numbers.get(pattern, -1) + 1
            if not self.by_rows or start <= row < stop:
                converter.add_tensor(name, key, pattern, self.files[key].get_tensor(key))
        converted: Mapping[str, Tensor] = converter.convert(name, model=model, config=model.config)
        return converted[name] if self.by_rows else converted[name][start:stop]


def empty_model(config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """A model whose parameters have no memory yet; its buffers have their values.

    Args:
        config: A config that `nestsp.model.adapter.model_config` accepted.
        **kwargs: As of `nestsp.model.adapter.build_model`.

    Raises:
        ModelError: A buffer's values cannot be computed from the config.
    """
    with torch.device("meta"):
        model = build_model(config, seed=0, **kwargs)
    for path, module in model.named_modules():
        if not module._buffers:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                unset = torch.empty_like(buffer, device="cpu")
                module._buffers[name] = unset.fill_(torch.nan) if unset.is_floating_point() else unset.fill_(-1)
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[no-untyped-call]  # of parameters without memory it sets nothing
        for name, buffer in module._buffers.items():
            if buffer is not None and bool((buffer.isnan() if buffer.is_floating_point() else buffer < 0).any()):
                raise ModelError(
                    f"the model's buffer {path}.{name} is in no file and cannot be computed from the config, but it "
                    "must have values; take a model of Transformers' own"
                )
    return model


def find_sources(model: PreTrainedModel, folder: Path) -> dict[str, Source]:
    """Where each parameter's values lie, by its name; a tied one once. Reads names and shapes alone.

    Args:
        model: From `empty_model`, not sharded.
        folder: A Hugging Face model's.

    Raises:
        ModelError: Tensors are missing, unknown or of another shape, or are no plain numbers.
    """
    files = _open_files(folder)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = model.state_dict()
    wanted = dict(model.named_parameters())
    found: dict[str, list[tuple[str | None, str]]] = {}
    unknown = []
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name in known:
            found.setdefault(name, []).append((pattern, key))
        elif not _COMPUTED.search(key):
            unknown.append(key)
    aliases: dict[Tensor, str] = {parameter: name for name, parameter in wanted.items()}
    sources: dict[str, Source] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = aliases[parameter]
        if alias in found and (alias == name or name not in found):  # a tied one may be in the files by either name
            sources[name] = _source(found[alias], files, by_pattern)
    missing = sorted(wanted.keys() - sources.keys(), key=dot_natural_key)
    where = f"the weights in {folder}"
    if missing:
        raise ModelError(
            f"{where} lack {_some(missing)}, but the model's config asks for them; take the config.json that belongs "
            "to these files"
        )
    if unknown:
        raise ModelError(
            f"{where} have {_some(unknown)}, but {type(model).__name__} has no such parameter; take the config.json "
            "that belongs to these files"
        )
    for name, source in sources.items():
        _check(name, source, wanted[name], where)
    return sources


def fill_parameters(model: PreTrainedModel, sources: Mapping[str, Source], device: torch.device) -> None:
    """Give parameters memory and values; no collective.

    Args:
        model: From `empty_model`, sharded or not; parameters keep their identity, tied ones stay tied. Those of
            adapters get memory, but no values.
        sources: From `find_sources`.
        device: Where they go.

    Raises:
        ModelError: A file cannot be read, or a converted tensor has another shape.
    """
    for full_name, parameter in model.named_parameters():
        _allocate(parameter, device)
        name = own_name(full_name)
        if name is None:  # an adapter's, which is in no file
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        start, rows = 0, len(local) if local.ndim else 1
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = offset[0]
        if not local.numel():
            continue
        try:
            values = sources[name].read(name, start, start + rows, model)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"the weights of {name} cannot be read: {' '.join(str(error).split())}; mend or copy the files again"
            ) from None
        if values.shape != local.shape:
            raise ModelError(
                f"{name} becomes {list(values.shape)} when it is converted, but this rank's part is "
                f"{list(local.shape)}; take the config.json that belongs to these files"
            )
        with torch.no_grad():
            local.copy_(values)


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give memory to a parameter on the meta device, in place, so that all who hold it see it."""
    if isinstance(parameter, DTensor):
        local = torch.empty_like(parameter.to_local(), device=device)
        filled: Tensor = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        filled = torch.empty_like(parameter, device=device)
    torch.utils.swap_tensors(parameter, nn.Parameter(filled, requires_grad=parameter.requires_grad))  # type: ignore[no-untyped-call]


def _open_files(folder: Path) -> dict[str, Any]:
    """The open file of each tensor; mapped into memory, so what is not read costs nothing.

    Raises:
        ModelError: There are none, or one that the index names is not there.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(key): folder / str(value) for key, value in named.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} is no index of safetensors; copy it again") from None
        if any(path.parent != folder for path in files.values()):
            raise ModelError(f"{index} names files outside its folder, but weights lie beside it; copy it again")
    elif (folder / _SINGLE).is_file():
        files = dict.fromkeys(_open(folder / _SINGLE).keys(), folder / _SINGLE)
    else:
        raise ModelError(
            f"model.path is {folder}, but there is no {_SINGLE} and no {_INDEX} in it; give the folder of a model with "
            "safetensors (other formats can run code when they are read)"
        )
    opened = {path: _open(path) for path in sorted(set(files.values()))}
    there = {path: set(file.keys()) for path, file in opened.items()}
    for key, path in files.items():
        if key not in there[path]:
            raise ModelError(f"{path} has no tensor {key}, but {index.name} says so; copy the files again")
    return {key: opened[path] for key, path in files.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())}; copy it again") from None


def _source(
    tensors: Sequence[tuple[str | None, str]], files: Mapping[str, Any], by_pattern: Mapping[str, WeightConverter]
) -> Source:
    converter = by_pattern.get(tensors[0][0] or "")
    ops = [] if converter is None else converter.operations
    by_rows = (
        bool(ops)
        and isinstance(ops[0], MergeModulelist)
        and ops[0].dim == 0
        and all(isinstance(op, Concatenate) and op.dim != 0 for op in ops[1:])
    )
    return Source(tuple((pattern or "", key) for pattern, key in tensors), files, converter, by_rows)


def _check(name: str, source: Source, parameter: Tensor, where: str) -> None:
    """Refuse what is no plain number, and the shapes that can be known before anything is read."""
    if source.converter is None and len(source.tensors) != 1:
        raise ModelError(f"{where} have {_some([key for _, key in source.tensors])} for {name}, but one must be enough")
    for _, key in source.tensors:
        part = source.files[key].get_slice(key)
        dtype, shape = part.get_dtype(), part.get_shape()
        if dtype not in _DTYPES:
            raise ModelError(
                f"{where} have {key} as {dtype}, but nestsp loads {', '.join(sorted(_DTYPES))}; take weights that are "
                "not quantised"
            )
        if source.converter is None and list(shape) != list(parameter.shape):
            raise ModelError(
                f"{where} have {key} as {list(shape)}, but the model's config makes it {list(parameter.shape)}; take "
                "the config.json that belongs to these files"
            )
    if source.by_rows:
        counts: dict[str, int] = {}
        for pattern, _ in source.tensors:
            counts[pattern] = counts.get(pattern, 0) + 1
        assert source.converter is not None
        for pattern in source.converter.source_patterns:
            if counts.get(pattern, 0) != len(parameter):
                raise ModelError(
                    f"{where} have {counts.get(pattern, 0)} tensors {pattern} for {name}, but the model's config makes "
                    f"them {len(parameter)}; take the config.json that belongs to these files"
                )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
