"""Float64 throughout, for comparisons: a model's own float32 steps would hide errors of one part in a million.

Transformers computes normalisations, routers and the eager attention's softmax in float32 whatever the model's dtype.
Two ways to sum the same numbers then differ by 1e-7, and a router's choice may flip.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["all_float64"]


def all_float64() -> AbstractContextManager[Any]:
    """Inside, whoever asks for float32 gets float64: in this thread, in backward and recomputation too."""
    return _AllFloat64()  # type: ignore[no-untyped-call]


class _AllFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **named)
