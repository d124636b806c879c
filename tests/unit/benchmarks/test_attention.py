from __future__ import annotations

import pytest
import torch

from benchmarks.attention import PACKS, inputs, make_context, ours, rival


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_both_sides_of_the_comparison_give_the_same_output_and_gradients(lengths: tuple[int, ...]) -> None:
    lengths = tuple(-(-length // 16) for length in lengths)
    leaves = inputs(sum(lengths))
    results = []
    for out in (ours(make_context(lengths), *leaves), rival(lengths, *leaves)):
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
