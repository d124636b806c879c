"""``torch.compile`` for the blocks of decoder layers: norms, what is before and after attention, feed-forward blocks.

Each block is compiled on its own, with its number of tokens left open, so that steps of new lengths compile nothing.
Attention itself stays outside: its exchanges follow the Schedule, which no compiler may reorder; a compiled attention
block is two pieces around it. Outside stay, too, FSDP's hooks and recomputation, which see a block as one call; blocks
of experts, whose routers are watched in Python and whose sizes differ from expert to expert; embedding, head and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestsp.errors import ModelError
from nestsp.model.adapter import decoder_layers

__all__ = ["Compiled", "check_compiler", "install_compiler"]

# Variants of one class's code that may be compiled: with and without gradients, of frozen and trained layers, with and
# without windows. What comes after them runs uncompiled, which is slower and no less right.
_MOST_VARIANTS = 32

Backend = str | Callable[..., Any]


class Compiled:
    """A block's forward by compiled code, which all blocks of its class share."""

    def __init__(self, block: nn.Module, code: Callable[..., Any]) -> None:
        self.block, self.code = block, code
        self.forward: Callable[..., Any] = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, Tensor) and x.ndim > 1]
        num_tokens = tensors[0].shape[1] if tensors else 0  # [1, T, ...]: hidden states, positions, angles
        if num_tokens < 2:  # a filler token, for which the compiler would make code of its own
            return self.forward(*args, **kwargs)
        for tensor in tensors:
            if tensor.shape[1] == num_tokens:
                torch._dynamo.mark_dynamic(tensor, 1)
        return self.code(self.block, *args, **kwargs)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def install_compiler(model: nn.Module, backend: Backend = "inductor") -> int:
    """Let the blocks of a model's decoder layers be compiled, each class of them when it first runs.

    Args:
        model: Before it is sharded, and before `nestsp.model.mini_sequence` slices its blocks.
        backend: Of ``torch.compile``.

    Returns:
        The number of blocks.
    """
    blocks = [block for layer in decoder_layers(model) for block in layer.children() if _is_compiled(block)]
    codes = {
        forward: torch.compile(  # type: ignore[call-overload]
            forward, backend=backend, recompile_limit=_MOST_VARIANTS, isolate_recompiles=True
        )
        for forward in {type(block).forward for block in blocks}
    }
    for block in blocks:
        block.__dict__["forward"] = Compiled(block, codes[type(block).forward])
    return len(blocks)


def check_compiler(device: torch.device) -> None:
    """Compile something small, which needs what all else needs: a C++ compiler on CPUs, Triton on GPUs.

    Raises:
        ModelError: It does not work here.
    """
    try:
        torch.compile(_small, dynamic=True)(torch.ones(2, 8, device=device))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        raise ModelError(
            f"train.compile is true, but torch.compile does not work on this {device.type} host ({reason}); install "
            f"{needs}, or set train.compile: false"
        ) from None


def _small(x: Tensor) -> Tensor:
    return F.silu(x) * x


def _is_compiled(block: nn.Module) -> bool:
    """Whether it computes anything, and has no experts: neither a list of modules nor weights of three dimensions."""
    parameters = list(block.parameters())
    experts = any(isinstance(module, nn.ModuleList) for module in block.modules())
    return bool(parameters) and not experts and all(parameter.ndim <= 2 for parameter in parameters)
