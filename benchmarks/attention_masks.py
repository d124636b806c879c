"""Soft caps and windows on CPUs, which no flash kernel has there: our blocks of plain operators against a dense mask.

    python -m benchmarks.attention_masks

Ours is the whole path of one layer's attention on one rank, as in `benchmarks.attention`. The rival is what
Transformers' ``eager`` attention does with a pack: Gemma 2's own function, and a mask of all pairs of tokens. Compared
are CPU seconds of the process, one thread, forward and backward, and the most bytes alive beyond the inputs
(`benchmarks.live`; the rival's mask counts). One head, so that the dense scores fit into 24 GiB; both grow with heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from benchmarks.attention import HEAD_DIM, inputs, make_context, timed
from benchmarks.common import interleave, ratio, where
from benchmarks.live import LiveBytes
from nestsp.attention.streaming import attend_groups

__all__ = ["CELLS", "dense", "ours"]

CELLS: dict[str, tuple[tuple[int, ...], int | None, float | None]] = {
    "cap of 50, one sequence": ((16_384,), None, 50.0),
    "cap of 50, a long tail": ((8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1), None, 50.0),
    "window of 4,096, one sequence": ((16_384,), 4096, None),
    "both, one sequence": ((16_384,), 4096, 50.0),
}
"""Lengths, window, soft cap."""
NUM_PAIRS = 3


def ours(
    lengths: tuple[int, ...], window: int | None, softcap: float | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention [T, N, H] through nestsp."""
    context = make_context(lengths, q.shape[1], k.shape[1])
    return attend_groups(context, 0, HEAD_DIM**-0.5, q, k, v, window=window, softcap=softcap)


def dense(
    lengths: tuple[int, ...], window: int | None, softcap: float | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention [T, N, H] with every pair of the pack's tokens."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    module: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=True)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return eager_attention_forward(module, q, k, v, mask, scaling=HEAD_DIM**-0.5, softcap=softcap)[0][0]


def peak_bytes(attention: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> int:
    """The most bytes alive in one forward and backward pass, inputs left out."""
    for leaf in leaves:
        leaf.grad = None
    live = LiveBytes([*leaves, dout])
    with live:
        attention().backward(dout)
    return live.peak


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"attention of one layer, forward and backward, 1 head of {HEAD_DIM}, float32; {where()}")
    for name, (lengths, window, softcap) in CELLS.items():
        leaves = inputs(sum(lengths), 1, 1)
        dout = torch.randn(sum(lengths), 1, HEAD_DIM)
        sides = [partial(side, lengths, window, softcap, *leaves) for side in (ours, dense)]
        peaks = [peak_bytes(side, leaves, dout) for side in sides]
        mine, theirs = (timed(side, leaves, dout) for side in sides)
        a, b = interleave(mine, theirs, NUM_PAIRS)
        both = f"{np.median(a):.2f} and {np.median(b):.2f} s"
        mib = f"{peaks[0] / 2**20:.0f} and {peaks[1] / 2**20:,.0f} MiB"
        print(f"{name}: {both}, ratio {ratio(a, b)}; {mib}, ratio {peaks[0] / peaks[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
