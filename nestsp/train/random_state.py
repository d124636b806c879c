"""The state of every global random generator of a process, as plain tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["get_random_state", "seed_everything", "set_random_state"]


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """State of every global generator of this process, as plain tensors."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached_gauss, dtype=torch.float64),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from what `get_random_state` gave."""
    gauss = state["python_gauss"].tolist()
    *keys, position, has_gauss = state["numpy"].tolist()
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def seed_everything(seed: int) -> None:
    """Begin every global generator anew.

    Args:
        seed: 0 to 2**64 - 1.
    """
    torch.manual_seed(seed)  # of the devices' generators too
    random.seed(seed)
    np.random.seed(seed % 2**32)
