"""The measured coefficients of one kind of hardware: a versioned file that names it and the source of every figure.

Presets lie in ``presets/``; a path reads any other file. A figure whose source says *assumption* was not measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from nestsp.errors import ConfigError, did_you_mean

__all__ = ["CostProfile", "load_profile", "preset_for_device", "preset_names"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostProfile:
    """What one kind of cluster costs.

    Attributes:
        name: The profile's name.
        hardware: What was measured, for people.
        device_names: Beginnings of the device names that it stands for, as the driver prints them.
        ranks_per_host: Ranks of a usual host.
        memory_bytes: Memory of one rank's device.
        memory_bytes_per_s: Bandwidth of that memory.
        linear_flops_per_s: Rate of a decoder layer outside attention, its element-wise parts included.
        expert_flops_per_s: Rate of the experts' grouped products.
        attention_forward_flops_per_s: Rate of the forward attention kernel on endless sequences.
        attention_forward_half_length: Length, in tokens, at which it has half of that rate.
        attention_forward_launch_s: Seconds of one call besides.
        attention_backward_flops_per_s: The same of the backward kernel.
        attention_backward_half_length: The same of the backward kernel.
        attention_backward_launch_s: The same of the backward kernel.
        attention_parallel_head_tokens: Heads × tokens of a sequence below which one call cannot fill the device.
        launch_s: Seconds of one small kernel, such as a copy, besides its bytes.
        host_bytes_per_s: What one rank sends to the others of its host in a collective of all of them.
        host_latency_s: Seconds of the smallest collective inside a host.
        network_bytes_per_s: Line rate of a host's network cards together.
        network_ring_efficiency: Fraction of it that gathers and reductions reach.
        network_exchange_efficiency: Fraction of it that all-to-alls reach, by the number of hosts they span.
        network_latency_s: Seconds of the smallest collective between hosts.
        peer_latency_s: What each further member adds to an all-to-all.
        communicator_bytes: Device memory of one communicator.
        margin_bytes: Device memory that no term below explains: contexts, fragments.
        peak_flops_per_s: What the maker states for dense bfloat16 products; None where nobody does. Nothing is planned
            by it: the share of it that a run reaches is told.
        sources: Where each figure comes from, by its name.
    """

    name: str
    hardware: str
    device_names: tuple[str, ...]
    ranks_per_host: int
    memory_bytes: float
    memory_bytes_per_s: float
    linear_flops_per_s: float
    expert_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_forward_half_length: float
    attention_forward_launch_s: float
    attention_backward_flops_per_s: float
    attention_backward_half_length: float
    attention_backward_launch_s: float
    attention_parallel_head_tokens: float
    launch_s: float
    host_bytes_per_s: float
    host_latency_s: float
    network_bytes_per_s: float
    network_ring_efficiency: float
    network_exchange_efficiency: tuple[tuple[int, float], ...]
    network_latency_s: float
    peer_latency_s: float
    communicator_bytes: float
    margin_bytes: float
    peak_flops_per_s: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def exchange_efficiency(self, num_hosts: int) -> float:
        """Fraction of the network's line rate that an all-to-all over so many hosts reaches.

        Between two measured numbers of hosts it is interpolated over their logarithms; beyond them it stays.
        """
        points = self.network_exchange_efficiency
        if num_hosts <= points[0][0]:
            return points[0][1]
        for (few, high), (many, low) in itertools.pairwise(points):
            if num_hosts <= many:
                return high + (low - high) * math.log(num_hosts / few) / math.log(many / few)
        return points[-1][1]

    def scaled(self, *, compute: float = 1.0, bandwidth: float = 1.0) -> CostProfile:
        """The same hardware with other speeds, to see how far a result depends on them.

        Args:
            compute: Factor on every rate of computation and on the memory's bandwidth.
            bandwidth: Factor on both link classes.
        """
        computing = (name for name in _FIGURES if name.endswith("flops_per_s") and name not in _OPTIONAL)
        rates = ("memory_bytes_per_s", *computing)
        links = ("host_bytes_per_s", "network_bytes_per_s")
        changed = {name: getattr(self, name) * compute for name in rates}
        return dataclasses.replace(self, **changed, **{name: getattr(self, name) * bandwidth for name in links})


_TEXTS = ("name", "hardware", "device_names", "sources")
_OPTIONAL = ("peak_flops_per_s",)
_FIGURES = tuple(field.name for field in dataclasses.fields(CostProfile) if field.name not in _TEXTS)
_MAY_BE_ZERO = ("_half_length", "_head_tokens", "_latency_s", "launch_s", "communicator_bytes", "margin_bytes")

_ZERO_OR_MORE, _ABOVE_ZERO = "a finite number 0 or more", "a finite number above 0"
_WHOLE, _FRACTION = "a whole number above 0", "a fraction above 0 and at most 1"
_RULES: dict[str, Callable[[float], bool]] = {
    _ZERO_OR_MORE: lambda number: 0.0 <= number < math.inf,
    _ABOVE_ZERO: lambda number: 0.0 < number < math.inf,
    _WHOLE: lambda number: 0.0 < number < math.inf and number.is_integer(),
    _FRACTION: lambda number: 0.0 < number <= 1.0,
}


def preset_names() -> tuple[str, ...]:
    """Names of the presets that come with the package."""
    names = (entry.name for entry in resources.files(__package__).joinpath("presets").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def preset_for_device(device_name: str) -> str:
    """The preset whose hardware has this device, or ``cpu``.

    >>> preset_for_device("NVIDIA H200"), preset_for_device("NVIDIA H20"), preset_for_device("AMD EPYC")
    ('h200', 'h20', 'cpu')
    """
    known = {device: name for name in preset_names() for device in load_profile(name).device_names}
    matching = [device for device in known if device_name.startswith(device)]
    return known[max(matching, key=len)] if matching else "cpu"


def load_profile(name_or_path: str) -> CostProfile:
    """Read a preset by its name, or a profile by the path of its file.

    Raises:
        ConfigError: There is no such preset or file, or the file is damaged.
    """
    if name_or_path in preset_names():
        file = resources.files(__package__).joinpath("presets").joinpath(f"{name_or_path}.yaml")
        return _parse(file.read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"the cost profile is {name_or_path!r}, but the presets are {', '.join(preset_names())}, and there is no "
            f"such file{did_you_mean(name_or_path, preset_names()) or '; give its path from the folder you are in'}"
        )
    try:
        return _parse(path.read_text(encoding="utf-8"), name_or_path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cost profile {name_or_path} cannot be read: {error}") from None


def _parse(text: str, where: str) -> CostProfile:
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter of a number of thousands of digits, or a 13th month
        raise ConfigError(f"the cost profile {where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not isinstance(data.get("figures"), dict):
        raise ConfigError(f"the cost profile {where} has no figures, but needs them; see the presets")
    if data.get("format") != _FORMAT:
        raise ConfigError(
            f"the cost profile {where} has format {data.get('format')!r}, but this version reads {_FORMAT}; "
            "measure it again"
        )
    figures = data["figures"]
    for name in figures:
        if name not in _FIGURES:
            raise ConfigError(
                f"the cost profile {where} has {name!r}, which is no figure{did_you_mean(str(name), _FIGURES)}"
            )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in _FIGURES:
        entry = figures.get(name)
        if entry is None and name in _OPTIONAL:
            continue
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise ConfigError(f"the cost profile {where} has no value and source of {name}, but needs both; add them")
        values[name], sources[name] = _figure(name, entry["value"], where), entry["source"]
    texts: list[Any] = [data.get("name"), data.get("hardware")]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"the cost profile {where} has no name and hardware, but needs both; add them")
    devices = data.get("device_names", [])
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise ConfigError(
            f"the cost profile {where} has device_names {devices!r}, but it must be a list of texts; correct it"
        )
    return CostProfile(texts[0], texts[1], tuple(devices), **values, sources=sources)


def _figure(name: str, value: Any, where: str) -> Any:
    if name == "ranks_per_host":
        return int(_number(name, value, where, _WHOLE))
    if name == "network_ring_efficiency":
        return _number(name, value, where, _FRACTION)
    if name == "network_exchange_efficiency":
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"the cost profile {where} has {name} {value!r}, but it must map hosts to a fraction")
        points = []
        for hosts, part in value.items():
            num_hosts = int(_number(f"{name} at a number of hosts of", hosts, where, _WHOLE))
            points.append((num_hosts, _number(f"{name} at {num_hosts} hosts of", part, where, _FRACTION)))
        return tuple(sorted(points))
    return _number(name, value, where, _ZERO_OR_MORE if name.endswith(_MAY_BE_ZERO) else _ABOVE_ZERO)


def _number(named: str, value: Any, where: str, rule: str) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):  # YAML 1.1 reads 1e9 as text
        try:
            number = float(value)
        except ValueError:
            pass
        except OverflowError:  # hundreds of digits, which nobody wants to read again
            value = math.inf if int(value) > 0 else -math.inf
    if not _RULES[rule](number):
        raise ConfigError(f"the cost profile {where} has {named} {value!r}, but it must be {rule}; correct it")
    return number
