"""What plans are made for, decided once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestsp.train.limits import Limits, _decide, free_memory_bytes
from tests.e2e.runs import tiny

GIB = 2**30


def decide(*overrides: str, saved: dict[str, Any] | None = None, device: str = "cpu", ranks: int = 4) -> Limits:
    return _decide(tiny(*overrides), saved or {}, f"{ranks} x {device} a host", device, 20 * GIB, ranks)


def test_ranks_without_gpus_share_seven_tenths_of_what_is_free() -> None:
    limits = decide()
    assert (limits.profile, limits.memory_per_rank_bytes) == ("cpu", int(0.7 * 20 * GIB / 4))
    assert limits.source == "70% of the 20.0 GiB that were free, over 4 ranks"


def test_a_gpu_gives_nine_tenths_of_what_is_free_and_its_preset() -> None:
    limits = decide(device="NVIDIA H200")
    assert (limits.profile, limits.memory_per_rank_bytes) == ("h200", 18 * GIB)
    assert decide(device="Unheard-of").profile == "cpu"


def test_what_is_set_is_taken() -> None:
    limits = decide("cluster.profile=h100", "cluster.memory_per_rank=3GiB")
    assert (limits.profile, limits.memory_per_rank_bytes, limits.source) == ("h100", 3 * GIB, "as set")


def test_a_resumed_run_takes_what_was_decided_unless_it_is_set_anew() -> None:
    saved = decide("cluster.profile=a800", "cluster.memory_per_rank=2GiB").to_settings()
    again = decide(saved=saved)
    assert (again.profile, again.memory_per_rank_bytes, again.source) == ("a800", 2 * GIB, "as the run began")
    assert decide("cluster.memory_per_rank=1GiB", saved=saved).memory_per_rank_bytes == GIB
    assert decide("cluster.profile=cpu", saved=saved).profile == "cpu"


@pytest.mark.parametrize("changed", [{"ranks": 2}, {"device": "NVIDIA H100"}])
def test_on_other_devices_or_ranks_it_is_decided_anew(changed: dict[str, Any]) -> None:
    saved = decide("cluster.profile=a800", "cluster.memory_per_rank=2GiB").to_settings()
    assert decide(saved=saved, **changed) == decide(**changed)


def test_checkpoints_of_before_have_no_decision() -> None:
    assert decide(saved={"data.seed": 0}) == decide()


def test_the_decision_is_written_into_the_settings() -> None:
    assert decide().resolved(tiny()) == tiny(
        "cluster.profile=cpu", f"cluster.memory_per_rank={int(0.7 * 20 * GIB / 4)}"
    )


def test_this_host_says_what_is_free() -> None:
    assert free_memory_bytes(torch.device("cpu")) > 0
