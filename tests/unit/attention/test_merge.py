"""Outputs over parts of the keys, merged, are the output over all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nestsp.attention.merge import Rows, merge_into, merge_sinks, sink_gradients, wide


def softmax_over(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("qnh,knh->nqk", q, k)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5), torch.tensor([1, 3, 4])], ids=["all", "slice", "indices"])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_merged_parts_are_the_whole(rows: Rows, size: float) -> None:
    """Also with scores in the thousands, whose exponentials overflow."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 3, 4, dtype=torch.float64) for n in (6, 11, 11))
    q = q * size
    out, lse = softmax_over(q, k[:4], v[:4])
    wanted, wanted_lse = out.clone(), lse.clone()
    for keys in (slice(4, 7), slice(7, 11)):
        part, part_lse = softmax_over(q[rows], k[keys], v[keys])
        merge_into(out, lse, rows, part, part_lse)
    wanted[rows], wanted_lse[:, rows] = softmax_over(q[rows], k, v)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-13)
    assert torch.allclose(lse, wanted_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("height", [-50.0, 0.0, 50.0])
def test_E6_a_sink_is_a_key_without_a_value(height: float) -> None:
    """Sinks that take nothing, a share, and almost all."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(n, 3, 4, dtype=torch.float64) for n in (6, 11, 11, 6))
    sinks = (torch.randn(3, dtype=torch.float64) + height).requires_grad_()
    scores = torch.cat([torch.einsum("qnh,knh->nqk", q, k), sinks[:, None, None].expand(3, 6, 1)], -1)
    wanted = torch.einsum("nqk,knh->qnh", scores.softmax(-1)[..., :-1], v)
    plain, plain_lse = softmax_over(q, k, v)
    out, lse = merge_sinks(plain, plain_lse, sinks.detach())
    assert torch.allclose(out, wanted, rtol=1e-12, atol=0)
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    (wanted_gradient,) = torch.autograd.grad(wanted, sinks, dout)
    assert torch.allclose(sink_gradients(dout, out, lse, sinks.detach()), wanted_gradient, rtol=1e-11, atol=0)


def test_sinks_keep_the_dtype_of_the_output_and_sum_their_gradients_wide() -> None:
    out, lse, sinks = torch.randn(5, 2, 4).bfloat16(), torch.randn(2, 5), torch.randn(2).bfloat16()
    merged, after = merge_sinks(out, lse, sinks)
    assert (merged.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert sink_gradients(merged, merged, after, sinks).dtype == torch.float32


def test_sums_are_wide() -> None:
    assert wide(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert wide(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
