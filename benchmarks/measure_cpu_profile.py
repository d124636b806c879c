"""Measure the ``cpu`` cost profile on this machine and write it as a preset file.

All ranks measure at the same time, each with its part of the cores, as they do in a run. Every figure is the least of
several repetitions, since whatever else runs on the machine only adds; attention is fitted as
``launch + FLOPs × (1 + half_length / length) / peak``, the exchanges as ``latency + bytes / bandwidth``. Nothing on
one machine crosses hosts, so the network's figures are the host's.

    python benchmarks/measure_cpu_profile.py --ranks 2 --out nestsp/cost/presets/cpu.yaml
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing.spawn as mp

HEADS, HEAD_DIM = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048)


def least_s(work: Callable[[], object], repetitions: int = 15) -> float:
    """Least seconds of a call, after one that is not counted; all ranks start together."""
    work()
    times = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def linear_flops_per_s() -> float:
    """Rate of a gated feed-forward block of 256 × 1,024 on 1,024 tokens, its element-wise part included."""
    x, up, down = torch.randn(1024, 256), torch.randn(2048, 256), torch.randn(256, 1024)

    def block() -> torch.Tensor:
        gate, value = torch.nn.functional.linear(x, up).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)

    return 2 * 1024 * (2048 * 256 + 256 * 1024) / least_s(block)


def expert_flops_per_s() -> float:
    """Rate of the grouped product of 8 experts of 256 × 512 on 1,024 tokens."""
    x, weights = torch.randn(1024, 256), torch.randn(8, 256, 512)
    ends = torch.arange(128, 1025, 128, dtype=torch.int32)
    grouped = getattr(torch, "_grouped_mm", None)

    def loop() -> list[torch.Tensor]:
        return [part @ weight for part, weight in zip(x.split(128), weights, strict=True)]

    work = loop if grouped is None else lambda: grouped(x, weights, offs=ends)
    return 2 * 1024 * 256 * 512 / least_s(work)


def attention(backward: bool) -> tuple[float, float, float]:
    """Peak, half length and launch of PyTorch's flash kernel for CPUs, by least squares of relative errors."""
    rows, times = [], []
    products = 2.5 if backward else 1.0
    for length in LENGTHS:
        q, k, v, dout = (torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(4))
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(q, k, v, 0.0, True)
        reverse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        if backward:
            seconds = least_s(lambda: reverse(dout, q, k, v, out, lse, 0.0, True))  # noqa: B023
        else:
            seconds = least_s(lambda: forward(q, k, v, 0.0, True))  # noqa: B023
        flops = products * 2 * HEAD_DIM * HEADS * length
        rows.append(np.array([1.0, flops, flops * length]) / seconds)
        times.append(1.0)
    matrix, ones = np.array(rows), np.array(times)
    # launch, seconds per FLOP-token of overhead, seconds per FLOP; none below 0
    kept = [0, 1, 2]
    solution = np.zeros(3)
    while True:
        part, *_ = np.linalg.lstsq(matrix[:, kept], ones, rcond=None)
        if (part >= 0).all():
            solution[kept] = part
            break
        kept.remove(kept[int(part.argmin())])
    launch, overhead, per_flop = solution
    return 1 / per_flop, overhead / per_flop, float(launch)


def exchange(ranks: int) -> tuple[float, float]:
    """Latency of an all-to-all and what one rank sends in a second."""
    sizes = (ranks * 16, ranks * 2**20)
    times = []
    for size in sizes:
        source, target = torch.zeros(size), torch.zeros(size)
        times.append(least_s(lambda: dist.all_to_all_single(target, source), 21))  # noqa: B023
    sent = [4 * size * (ranks - 1) / ranks for size in sizes]
    return times[0], (sent[1] - sent[0]) / max(times[1] - times[0], 1e-9)


def measure(rank: int, ranks: int, port: int, out: str, hardware: str) -> None:
    """One rank's part; rank 0 writes the file."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    threads = torch.get_num_threads()
    here = f"measured by benchmarks/measure_cpu_profile.py, torch {torch.__version__}, {datetime.date.today()}"
    buffer = torch.zeros(2**24)
    copy_s = least_s(lambda: buffer.clone())
    forward, backward = attention(False), attention(True)
    latency_s, bytes_per_s = exchange(ranks)
    launch_s = least_s(lambda: torch.zeros(1).add_(1), 101)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kernel = f"{here}: flash kernel for CPUs, float32, {HEADS} heads of {HEAD_DIM}, {LENGTHS[0]}-{LENGTHS[-1]} tokens"
    links = f"{here}: gloo all-to-all of {ranks} ranks on one machine"
    alike = "; nothing on one machine crosses hosts, so it is the host's"
    figures: dict[str, tuple[Any, str]] = {
        "ranks_per_host": (ranks, "the ranks of this measurement"),
        "memory_bytes": (memory // ranks, f"{here}: physical memory over the ranks"),
        "memory_bytes_per_s": (2 * 4 * 2**24 / copy_s, f"{here}: copy of 64 MiB, read and written"),
        "linear_flops_per_s": (linear_flops_per_s(), f"{here}: gated feed-forward block, float32, {threads} thread(s)"),
        "expert_flops_per_s": (expert_flops_per_s(), f"{here}: grouped product of 8 experts, float32"),
        "attention_forward_flops_per_s": (forward[0], kernel),
        "attention_forward_half_length": (forward[1], kernel),
        "attention_forward_launch_s": (forward[2], kernel),
        "attention_backward_flops_per_s": (backward[0], kernel),
        "attention_backward_half_length": (backward[1], kernel),
        "attention_backward_launch_s": (backward[2], kernel),
        "attention_parallel_head_tokens": (0, "one thread works head by head: nothing to fill"),
        "launch_s": (launch_s, f"{here}: the smallest operation"),
        "host_bytes_per_s": (bytes_per_s, links),
        "host_latency_s": (latency_s, links),
        "network_bytes_per_s": (bytes_per_s * ranks, links + alike),
        "network_ring_efficiency": (1, links + alike),
        "network_exchange_efficiency": ({2: 1}, links + alike),
        "network_latency_s": (latency_s, links + alike),
        "peer_latency_s": (0, "part of the latency"),
        "communicator_bytes": (0, "gloo keeps no buffers of note"),
        "margin_bytes": (2**29, "assumption, not measured: interpreter, libraries and fragments"),
    }
    if rank == 0:
        lines = ["format: 1", "name: cpu", f'hardware: "{hardware}"', "device_names: []", "figures:"]
        for name, (value, source) in figures.items():
            number = f"{value:.4g}" if isinstance(value, float) else str(value)
            if isinstance(value, float) and "e" in number and "." not in number:
                number = number.replace("e", ".0e")
            lines += [f"  {name}:", f"    value: {number}", f'    source: "{source}"']
        Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29519)
    parser.add_argument("--out", default="nestsp/cost/presets/cpu.yaml")
    given = parser.parse_args()
    hardware = f"{os.cpu_count()} cores ({platform.machine()}), {given.ranks} ranks on one machine, gloo"
    mp.spawn(measure, (given.ranks, given.port, given.out, hardware), nprocs=given.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
