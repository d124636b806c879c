"""What a run's plans are made for: cost profile and memory limit, decided once and then kept.

Both follow from the machine when the settings leave them out: the profile from the device's name, the limit from what
is free when the run begins. What is free changes, and plans must not; so the decision is written into the run's
``config.yaml`` and into each checkpoint, and a resumed run takes it from there. A run that is resumed on other devices,
or on another number of ranks a host, decides anew: there its plans change in any case.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nestsp.config import RunConfig
from nestsp.cost.profile import preset_for_device
from nestsp.errors import ConfigError
from nestsp.train.world import World
from nestsp.units import format_bytes, plural

__all__ = ["Limits", "decide_limits", "free_memory_bytes"]

_FREE_GPU_FRACTION = 0.9
_FREE_CPU_FRACTION = 0.7


@dataclass(frozen=True, slots=True)
class Limits:
    """The decision.

    Attributes:
        profile: Name of a preset, or path of a profile.
        memory_per_rank_bytes: Hard limit, the same on all ranks.
        source: Where the limit comes from, for people.
        device: Where it was decided: the device's name and the ranks of a host.
    """

    profile: str
    memory_per_rank_bytes: int
    source: str
    device: str

    def resolved(self, config: RunConfig) -> RunConfig:
        """The run's settings with the decision in them."""
        decided = {"profile": self.profile, "memory_per_rank": self.memory_per_rank_bytes}
        return config.model_copy(update={"cluster": config.cluster.model_copy(update=decided)})

    def to_settings(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; `decide_limits` reads it."""
        return {
            "cluster.profile": self.profile,
            "cluster.memory_per_rank": self.memory_per_rank_bytes,
            "device": self.device,
        }


def decide_limits(config: RunConfig, world: World, saved: Mapping[str, Any]) -> Limits:
    """Decide what plans are made for; every rank must call it, and all get the same.

    Args:
        config: The settings; what they give is taken.
        world: This rank.
        saved: Settings of the checkpoint that the run goes on from; empty for a new run.
    """
    name = "cpu" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    ranks = world.cluster.ranks_per_host
    free = min(world.gather(free_memory_bytes(world.device)))
    where = f"{ranks} x {name} a host"
    return world.first(lambda: _decide(config, saved, where, name, free, ranks))


def _decide(config: RunConfig, saved: Mapping[str, Any], device: str, name: str, free: int, ranks: int) -> Limits:
    kept = saved if saved.get("device") == device else {}
    profile = config.cluster.profile or kept.get("cluster.profile") or preset_for_device(name)
    given, before = config.cluster.memory_per_rank, kept.get("cluster.memory_per_rank")
    if given is not None:
        assert isinstance(given, int), "settings are in bytes once they are read"
        return Limits(profile, given, "as set", device)
    if isinstance(before, int):
        return Limits(profile, before, "as the run began", device)
    if name == "cpu":
        share = f"{_FREE_CPU_FRACTION:.0%} of the {format_bytes(free)} that were free, over {plural(ranks, 'rank')}"
        return Limits(profile, int(_FREE_CPU_FRACTION * free / ranks), share, device)
    share = f"{_FREE_GPU_FRACTION:.0%} of the {format_bytes(free)} that were free"
    return Limits(profile, int(_FREE_GPU_FRACTION * free), share, device)


def free_memory_bytes(device: torch.device) -> int:
    """What a new program could use: of a GPU its own memory, of a CPU the host's.

    Raises:
        ConfigError: The system does not tell.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    found = [number for number in (_available(), _left_in_cgroup()) if number is not None]
    if not found:
        raise ConfigError(
            "cluster.memory_per_rank is not set, but this system does not say how much memory is free; set it, such as "
            "8GiB"
        )
    return min(found)


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _left_in_cgroup() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such files, or no limit ("max")
        return None
