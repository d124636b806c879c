"""Bytes of the tensors that are alive: every storage that an operation makes, until nothing refers to it any more.

Exact and the same on every machine: it asks no allocator. It sees what Python or autograd holds, also what a saved
tensor or a view keeps alive; not what a kernel takes and gives back inside one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        known: Tensors that were there before and are not counted: parameters, gradients.

    Attributes:
        now: Bytes alive.
        peak: The most since it was entered, or last set.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]  # held, so that their names stay theirs
        self._alive = {id(storage) for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, num_bytes = id(storage), storage.nbytes()
        if name in self._alive:
            return
        self._alive.add(name)
        weakref.finalize(storage, self._drop, name, num_bytes)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _drop(self, name: int, num_bytes: int) -> None:
        self._alive.discard(name)
        self.now -= num_bytes
