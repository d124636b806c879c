from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from nestsp.train.reports import RankReport, exchange_reports, fragmented_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_every_field_comes_back_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    report = RankReport(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, stop=False, save=True, saved=False)
    other = dataclasses.replace(report, loss_sum=-1.0, fragmented_bytes=0.0, stop=True, saved=True)

    def gather(into: torch.Tensor, mine: torch.Tensor) -> None:
        into[: len(mine)] = mine
        into[len(mine) :] = torch.tensor([float(number) for number in dataclasses.astuple(other)])

    monkeypatch.setattr(dist, "all_gather_single", gather)
    assert exchange_reports(report, CPU, 2) == (report, other)


def test_G26_what_the_allocator_holds_beyond_the_tensors_peak_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70)
    assert fragmented_bytes(GPU) == 30
    assert fragmented_bytes(CPU) == 0
