"""Fit the attention surface of the H100 preset to published kernel measurements, and print what it leaves unexplained.

The surface (see `nestsp.cost.compute`) gives the seconds of one kernel call over packed sequences as

    launch + FLOPs × (1 + half_length / length) / peak,

where ``length`` is the mean length of the pack weighted by tokens. The published packs state only that they hold real
lengths, each at most a quarter of the total; their weighted mean is taken from packs drawn the same way from a
Wikipedia corpus (200 packs for each total, seed 0).

    python benchmarks/profiles/fit_attention_surface.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

HEADS, HEAD_DIM = 64, 128
TOTALS = np.array([1024, 2048, 4096, 8192, 16384, 32768], float)
# TFLOP/s of FlashAttention-3, bf16, causal, 64 query and 8 key/value heads of 128, H100.
PUBLISHED = {
    "forward": ((283, 584, 662, 657, 672, 680), (60, 219, 357, 484, 544, 584)),
    "backward": ((208, 353, 462, 517, 562, 586), (53, 114, 206, 319, 375, 426)),
}
# Sum of squared lengths over sum of lengths, of packs of Wikipedia lengths up to a quarter of the total.
PACKED_LENGTHS = np.array([151, 278, 497, 819, 1466, 2285], float)
PASSES = {"forward": 1.0, "backward": 2.5}  # matrix products of a pass over those of the forward pass


def kernel_s(length: Array, passes: float, peak: float, half_length: float, launch_s: float) -> Array:
    """Seconds of one call over `TOTALS` tokens of sequences whose weighted mean length is ``length``."""
    return launch_s + passes * flops(length) * (1 + half_length / length) / peak


def flops(length: Array) -> Array:
    """Forward FLOPs: two products over half of each sequence's square."""
    return 2 * HEADS * HEAD_DIM * TOTALS * length


def residuals(which: str, peak: float, half_length: float, launch_s: float) -> Array:
    """Logarithm of modelled over published rate, of the single sequences, then of the packs."""
    parts = []
    for lengths, rates in zip((TOTALS, PACKED_LENGTHS), PUBLISHED[which], strict=True):
        passes = PASSES[which]
        modelled = passes * flops(lengths) / kernel_s(lengths, passes, peak, half_length, launch_s)
        parts.append(np.log(modelled / (np.array(rates) * 1e12)))
    return np.concatenate(parts)


def fit(which: str) -> tuple[float, float, float]:
    """Peak, half length and launch time with the least squared residuals, on a grid refined six times."""
    grids: list[Sequence[float]] = [
        tuple(np.linspace(400e12, 800e12, 11)),
        tuple(np.linspace(0, 1000, 11)),
        tuple(np.linspace(0, 80e-6, 11)),
    ]
    best = (0.0, 0.0, 0.0)
    for _ in range(6):
        points = [(peak, half, launch) for peak, half, launch in itertools.product(*grids)]
        best = min(points, key=lambda p: float((residuals(which, *p) ** 2).sum()))
        widths = [(grid[1] - grid[0]) for grid in grids]
        grids = [tuple(np.linspace(max(0, b - w), b + w, 9)) for b, w in zip(best, widths, strict=True)]
    return best


def main() -> None:
    """Print the fit and its residuals."""
    for which in PUBLISHED:
        peak, half_length, launch_s = fit(which)
        error = residuals(which, peak, half_length, launch_s)
        print(f"{which}: peak {peak / 1e12:.0f} TFLOP/s, half length {half_length:.0f} tokens, {launch_s * 1e6:.0f} µs")
        print(f"  single sequences, modelled / published: {np.round(np.exp(error[:6]), 2)}")
        print(f"  packs of real lengths:                  {np.round(np.exp(error[6:]), 2)}")
        print(f"  root mean square {np.sqrt((error**2).mean()):.3f}, largest {np.abs(error).max():.3f}")


if __name__ == "__main__":
    main()
