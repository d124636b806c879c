from __future__ import annotations

import pytest
import torch

from benchmarks.attention import inputs
from benchmarks.attention_masks import CELLS, dense, ours, peak_bytes


@pytest.mark.parametrize(("lengths", "window", "softcap"), CELLS.values(), ids=CELLS.keys())
def test_both_sides_of_the_comparison_give_the_same_output_and_gradients(
    lengths: tuple[int, ...], window: int | None, softcap: float | None
) -> None:
    lengths, window = tuple(-(-n // 64) for n in lengths), None if window is None else window // 64
    leaves = inputs(sum(lengths), 2, 1)
    results = []
    for side in (ours, dense):
        out = side(lengths, window, softcap, *leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, theirs in zip(*results, strict=True):
        largest = theirs.abs().max()
        torch.testing.assert_close(mine / largest, theirs / largest, rtol=0, atol=1e-5)


def test_ours_never_holds_all_pairs_of_tokens() -> None:
    leaves = inputs(4096, 1, 1)
    dout = torch.randn(4096, 1, leaves[0].shape[2])
    pairs = 4096 * 4096 * 4
    assert peak_bytes(lambda: dense((4096,), None, 50.0, *leaves), leaves, dout) > 4 * pairs
    assert peak_bytes(lambda: ours((4096,), None, 50.0, *leaves), leaves, dout) < pairs
