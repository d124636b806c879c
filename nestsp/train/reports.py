"""What every rank tells all others at the end of a step, in one exchange: its sums, its memory, its wishes.

Wishes travel with the loss, so that all ranks save or end after the same step without a collective for it.
Price: 8 bytes a field and rank, to every rank.
"""

from __future__ import annotations

import dataclasses
import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["RankReport", "exchange_reports", "fragmented_bytes", "peak_memory_bytes"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's step.

    Attributes:
        loss_sum: Over the targets that it held.
        attention_s: Seconds in attention, waiting for exchanges included.
        waited_s: Seconds of them that it waited for exchanges.
        load_s: Seconds that it read tokens and made tensors.
        peak_memory_bytes: The most that it has held until now.
        fragmented_bytes: See `fragmented_bytes`.
        stop: It was asked to save and end.
        save: It was asked to save and go on.
        saved: A save in the background has ended here.
    """

    loss_sum: float
    attention_s: float
    waited_s: float
    load_s: float
    peak_memory_bytes: float
    fragmented_bytes: float
    stop: bool = False
    save: bool = False
    saved: bool = False


def exchange_reports(report: RankReport, device: torch.device, num_ranks: int) -> tuple[RankReport, ...]:
    """Give every rank's report to all ranks, by rank; every rank must call it.

    Args:
        report: This rank's.
        device: Of the job's collectives.
        num_ranks: Ranks of the job.
    """
    mine = torch.tensor([float(number) for number in dataclasses.astuple(report)], dtype=torch.float64, device=device)
    everyones = mine.new_empty(num_ranks * len(mine))
    dist.all_gather_single(everyones, mine)
    return tuple(
        RankReport(*numbers[:6], *(wish > 0 for wish in numbers[6:]))
        for numbers in everyones.view(num_ranks, -1).tolist()
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held so far: of a GPU what tensors took of its memory, of a CPU all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fragmented_bytes(device: torch.device) -> int:
    """What the allocator has taken of a GPU's memory beyond the most that tensors held; 0 for a CPU.

    Grows where freed blocks of one step do not fit the tensors of the next. Memory that a limit leaves free covers it.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device)
