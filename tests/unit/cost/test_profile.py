from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nestsp.cost.profile import load_profile, preset_for_device, preset_names
from nestsp.errors import ConfigError

GPUS = ("a100-40g", "a100-80g", "a800", "b200", "h100", "h20", "h200", "h800")


def preset_data(name: str) -> dict[str, dict[str, dict[str, object]]]:
    path = Path(__file__).parents[3] / "nestsp" / "cost" / "presets" / f"{name}.yaml"
    data: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(path.read_text())
    return data


def write(folder: Path, data: object) -> str:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def exchange(data: dict[str, dict[str, dict[str, object]]], parts: dict[object, object]) -> None:
    data["figures"]["network_exchange_efficiency"].update(value=parts)


def test_there_is_a_preset_for_every_common_device_and_the_cpu() -> None:
    assert set(preset_names()) == {*GPUS, "cpu"}


@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_every_figure_of_a_preset_has_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert all(len(source) > 10 for source in profile.sources.values())
    assert len(profile.sources) == len(preset_data(name)["figures"])


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("Something new", "cpu"),
    ],
)
def test_a_device_has_its_preset(device: str, name: str) -> None:
    assert preset_for_device(device) == name


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        load_profile("h10")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.pop("figures"), "no figures"),
        (lambda d: d["figures"].pop("launch_s"), "no value and source of launch_s"),
        (lambda d: d["figures"]["launch_s"].pop("source"), "no value and source of launch_s"),
        (lambda d: d["figures"].update(lunch_s={"value": 1, "source": "x"}), "did you mean 'launch_s'"),
        (lambda d: d["figures"]["memory_bytes"].update(value=0), "must be a finite number above 0"),
        (lambda d: d["figures"]["memory_bytes"].update(value=float("nan")), "must be a finite number above 0"),
        (lambda d: d["figures"]["memory_bytes"].update(value=True), "memory_bytes True, but it must be a finite numb"),
        (lambda d: d["figures"]["memory_bytes"].update(value=10**400), "memory_bytes inf, but it must be a finite num"),
        (lambda d: d["figures"]["launch_s"].update(value=-(10**400)), "launch_s -inf, but it must be a finite number"),
        (lambda d: d["figures"]["launch_s"].update(value="soon"), "must be a finite number 0 or more"),
        (lambda d: d["figures"]["network_exchange_efficiency"].update(value={}), "must map hosts"),
        (lambda d: exchange(d, {1.2: 0.5}), r"efficiency at a number of hosts of 1\.2, but it must be a whole number"),
        (
            lambda d: exchange(d, {"two": 0.5}),
            "efficiency at a number of hosts of 'two', but it must be a whole number",
        ),
        (
            lambda d: exchange(d, {2: 0.5, 4: 3}),
            "efficiency at 4 hosts of 3, but it must be a fraction above 0 and at m",
        ),
        (lambda d: exchange(d, {2: 0}), "efficiency at 2 hosts of 0, but it must be a fraction above 0 and at most 1"),
        (
            lambda d: d["figures"]["network_ring_efficiency"].update(value=1.1),
            "efficiency 1.1, but it must be a fraction",
        ),
        (
            lambda d: d["figures"]["ranks_per_host"].update(value=0.5),
            r"ranks_per_host 0\.5, but it must be a whole numb",
        ),
        (lambda d: d["figures"].update({5: {"value": 1, "source": "x"}}), "has 5, which is no figure"),
        (lambda d: d.update(device_names=None), "device_names None, but it must be a list of texts; correct it"),
        (lambda d: d.update(device_names=5), "device_names 5, but it must be a list of texts"),
        (
            lambda d: d.update(device_names=["NVIDIA H100", 5]),
            r"device_names \['NVIDIA H100', 5\], but it must be a list",
        ),
        (lambda d: d.update(device_names="NVIDIA H100"), "device_names 'NVIDIA H100', but it must be a list of texts"),
        (lambda d: d.update(name=3), "no name and hardware"),
    ],
)
def test_a_damaged_profile_is_one_clear_sentence(tmp_path: Path, change: object, rule: str) -> None:
    data = preset_data("h100")
    assert callable(change)
    change(data)
    with pytest.raises(ConfigError, match=rule):
        load_profile(write(tmp_path, data))


@pytest.mark.parametrize("text", ["a: [", "a: " + "1" * 5000, "a: 2026-13-01"], ids=["open", "digits", "month"])
def test_text_that_is_no_yaml_is_one_clear_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_profile(str(path))


def test_a_copy_of_a_preset_reads_as_the_preset(tmp_path: Path) -> None:
    assert load_profile(write(tmp_path, preset_data("h800"))) == load_profile("h800")


def test_numbers_may_be_written_in_any_way_that_keeps_their_value(tmp_path: Path) -> None:
    data = preset_data("h100")
    exchange(data, {4.0: "7e-1", 2: 1})
    data["figures"]["ranks_per_host"].update(value="8.0")
    profile = load_profile(write(tmp_path, data))
    assert profile.network_exchange_efficiency == ((2, 1.0), (4, 0.7))
    assert repr(profile.ranks_per_host) == "8"


def test_exchange_efficiency_falls_with_hosts_and_stays_beyond_what_was_measured() -> None:
    profile = load_profile("h100")
    values = [profile.exchange_efficiency(hosts) for hosts in (1, 2, 3, 4, 6, 8, 9, 1000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == values[-2] == profile.network_exchange_efficiency[-1][1]


def test_scaling_changes_rates_and_nothing_else() -> None:
    profile = load_profile("h100")
    scaled = profile.scaled(compute=2.0, bandwidth=0.5)
    assert scaled.linear_flops_per_s == 2 * profile.linear_flops_per_s
    assert scaled.attention_backward_flops_per_s == 2 * profile.attention_backward_flops_per_s
    assert scaled.network_bytes_per_s == profile.network_bytes_per_s / 2
    assert scaled.memory_bytes == profile.memory_bytes
    assert profile.scaled() == profile
