"""A run between two steps as tensors by name, each rank its own part of them; and copies that outlive the next step.

Names are those of the Hugging Face model: ``model.<name>``, ``optimizer.<name>.exp_avg``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from nestsp.train.manifest import Progress
from nestsp.train.random_state import get_random_state

__all__ = ["RunState", "Staging", "device_of", "named_parameters", "run_state", "run_tensors"]


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
    return RunState(run_tensors(root, optimizer), get_random_state(device_of(root)), progress)


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


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a `nestsp.model.root.LossRoot` by their Hugging Face names, sharded; a tied one once."""
    root.state_dict()  # FSDP's hook: units that are still gathered go back to their shards
    prefix = "model."
    named = dict(root.named_parameters())
    assert all(name.startswith(prefix) for name in named), sorted(named)
    return {name.removeprefix(prefix): parameter for name, parameter in named.items()}


def run_tensors(root: nn.Module, optimizer: torch.optim.Optimizer, saved: Metadata | None = None) -> dict[str, Tensor]:
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


def device_of(root: nn.Module) -> torch.device:
    """Where a model computes."""
    return next(root.parameters()).device
