"""``torch.compile`` for the blocks of decoder layers: norms, what is before and after attention, feed-forward blocks.

Each block is compiled on its own, with its number of tokens left open, so that steps of new lengths compile nothing.
Attention itself stays outside: its exchanges follow the Schedule, which no compiler may reorder; a compiled attention
block is two pieces around it. Outside stay, too, FSDP's hooks and recomputation, which see a block as one call; blocks
of experts, whose routers are watched in Python and whose sizes differ from expert to expert; embedding, head and loss.

Measured (Qwen3, 3 layers of 256, 530 to 720 tokens, one CPU thread, inductor; eager / compiled processor time of a
step): 1.06. Compiling whole layers around attention was as fast (1.08), and only where gradients are made, since that
is where Transformers has a seam around a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestsp.errors import ModelError
from nestsp.model.adapter import decoder_layers

__all__ = ["check_compiler", "install_compiler"]

# Variants of one block's code that may be compiled before it is run uncompiled: kinds of layers × with and without
# gradients × one token or several × inputs with and without gradients.
_MOST_VARIANTS = 64

Backend = str | Callable[..., Any]


def install_compiler(model: nn.Module, backend: Backend = "inductor") -> int:
    """Let the blocks of a model's decoder layers be compiled, each when it first runs.

    Args:
        model: Before it is sharded, and before `nestsp.model.mini_sequence` slices its blocks.
        backend: Of ``torch.compile``.

    Returns:
        The number of blocks.
    """
    blocks = [block for layer in decoder_layers(model) for block in layer.children() if _is_compiled(block)]
    for block in blocks:
        block.__dict__["forward"] = torch.compile(
            block.forward, backend=backend, dynamic=True, recompile_limit=_MOST_VARIANTS
        )
    return len(blocks)


def check_compiler(device: torch.device) -> None:
    """Compile something small, which needs what all else needs: a C++ compiler on CPUs, Triton on GPUs.

    Raises:
        ModelError: It does not work here.
    """
    try:
        torch.compile(_small, dynamic=True)(torch.ones(2, 8, device=device))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
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
