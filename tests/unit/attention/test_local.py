"""Kernels against a softmax written here: forward, log-sum-exp and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.overrides
from torch import Tensor

from nestsp.attention.kernels import CpuFlash, MathKernel
from nestsp.attention.local import Kernel, Mask, Segments, attend, attend_backward
from nestsp.attention.merge import merge_into, wide
from nestsp.shape import head_shares

CPU = torch.device("cpu")
# Of the largest element: rounding of the dtype, with room for sums over a hundred keys.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
LENGTHS = (7, 1, 2, 33, 1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, kv_of_query: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp, head by head and sequence by sequence, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    start = 0
    for length in lengths:
        s = slice(start, start + length)
        for head, kv in enumerate(kv_of_query):
            scores = q[s, head] @ k[s, kv].T * scale
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            out[s, head] = scores.softmax(-1) @ v[s, kv]
            lse[head, s] = scores.logsumexp(-1)
        start += length
    return out, lse


def draw(num_heads: int, num_kv: int, size: int, dtype: torch.dtype, tokens: int = sum(LENGTHS)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (num_heads, num_kv, num_kv, num_heads)
    ]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


KERNELS: dict[str, Kernel] = {
    "flash": CpuFlash(),
    "math": MathKernel(),
    "math in blocks of 1": MathKernel(block=1),
    "math in blocks of 4": MathKernel(block=4),
    "math in blocks of 11": MathKernel(block=11),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
@pytest.mark.parametrize("size", [3, 5, 8, 40, 256])
def test_E15_kernels_agree_with_a_plain_softmax(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    """Grouped-query layouts, regular and not: what a member gets of heads that do not divide by ranks."""
    for kv_of_query in ((0,), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1)):
        compare_with_plain(kernel, dtype, size, kv_of_query)


def compare_with_plain(kernel: Kernel, dtype: torch.dtype, size: int, kv_of_query: tuple[int, ...]) -> None:
    q, k, v, dout = draw(len(kv_of_query), kv_of_query[-1] + 1, size, dtype)
    mask, scale = Mask.causal(Segments.of(LENGTHS, CPU)), 0.7 * size**-0.5
    out, lse = attend(kernel, q, k, v, mask, scale, kv_of_query)
    inputs = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = plain(inputs[0], inputs[1], inputs[2], LENGTHS, scale, kv_of_query)
    tolerance = TOLERANCES[dtype]
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(out, expected.detach(), tolerance)
    assert_close(lse, expected_lse.detach(), min(tolerance, 2e-5))
    grads = attend_backward(kernel, dout, q, k, v, out, lse, mask, scale, kv_of_query)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs, dout.double()), strict=True):
        assert grad.dtype == dtype
        assert_close(grad, wanted, 2 * tolerance)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_one_sequence_does_not_see_another(kernel: Kernel) -> None:
    q, k, v, dout = draw(4, 2, 8, torch.float64)
    mask = Mask.causal(Segments.of(LENGTHS, CPU))
    out, lse = kernel.forward(q, k, v, mask, 0.3)
    grads = kernel.backward(dout, q, k, v, out, lse, mask, 0.3)
    for s in mask.queries.slices():
        alone = Mask.causal(Segments.of((s.stop - s.start,), CPU))
        out_alone, lse_alone = kernel.forward(q[s], k[s], v[s], alone, 0.3)
        assert torch.equal(out[s], out_alone)
        assert torch.equal(lse[:, s], lse_alone)
        grads_alone = kernel.backward(dout[s], q[s], k[s], v[s], out_alone, lse_alone, alone, 0.3)
        for whole, part in zip(grads, grads_alone, strict=True):
            assert torch.allclose(whole[s], part, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_any_strides_will_do(kernel: Kernel) -> None:
    """Transformers' queries are views in another order; a gradient may be one number expanded."""
    q, k, v, dout = draw(4, 2, 8, torch.float64)
    mask = Mask.causal(Segments.of(LENGTHS, CPU))
    out, lse = kernel.forward(q, k, v, mask, 0.3)
    expected = kernel.backward(dout, q, k, v, out, lse, mask, 0.3)
    for dims in ((0, 1), (1, 2), (0, 2)):
        views = [x.transpose(*dims).contiguous().transpose(*dims) for x in (dout, q, k, v, out)]
        assert not views[0].is_contiguous()
        out_view, lse_view = kernel.forward(views[1], views[2], views[3], mask, 0.3)
        assert torch.allclose(out_view, out, rtol=0, atol=1e-13)
        assert torch.allclose(lse_view, lse, rtol=0, atol=1e-13)
        lse_view = lse.T.contiguous().T
        grads = kernel.backward(views[0], views[1], views[2], views[3], views[4], lse_view, mask, 0.3)
        for grad, wanted in zip(grads, expected, strict=True):
            assert torch.allclose(grad, wanted, rtol=0, atol=1e-13), dims
    one = torch.ones(1, 1, 1, dtype=torch.float64).expand(q.shape)
    for grad, wanted in zip(
        kernel.backward(one, q, k, v, out, lse, mask, 0.3),
        kernel.backward(one.contiguous(), q, k, v, out, lse, mask, 0.3),
        strict=True,
    ):
        assert torch.allclose(grad, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", KERNELS.keys())
@pytest.mark.parametrize("window", [1, 2, 5, 32, 33, 100])
def test_a_window_hides_what_is_further_back(name: str, window: int) -> None:
    """E3: a query sees itself and the window - 1 keys before it."""
    kernel = KERNELS[name].adapted(window, None)
    q, k, v, dout = draw(4, 2, 8, torch.float64)
    kv_of_query, mask = (0, 0, 1, 1), Mask.causal(Segments.of(LENGTHS, CPU))
    out, lse = attend(kernel, q, k, v, mask, 0.3, kv_of_query)
    grads = attend_backward(kernel, dout, q, k, v, out, lse, mask, 0.3, kv_of_query)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = []
    for s in mask.queries.slices():
        distance = torch.arange(s.stop - s.start)[:, None] - torch.arange(s.stop - s.start)
        seen = (distance >= 0) & (distance < window)
        q_s, k_s, v_s = (x[s].transpose(0, 1)[None] for x in inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        expected.append(sdpa(q_s, k_s, v_s, attn_mask=seen, scale=0.3, enable_gqa=True)[0].transpose(0, 1))
    assert_close(out, torch.cat(expected).detach(), 1e-13)
    for grad, wanted in zip(grads, torch.autograd.grad(torch.cat(expected), inputs, dout), strict=True):
        assert_close(grad, wanted, 1e-13)


@pytest.mark.parametrize("name", KERNELS.keys())
@pytest.mark.parametrize("window", [None, 5])
def test_a_soft_cap_bends_scores(name: str, window: int | None) -> None:
    """Scores far above the cap and far below; causal in a window or not, and a block without a mask."""
    kernel = KERNELS[name].adapted(window, 1.5)
    assert isinstance(kernel, MathKernel)
    q, k, v, dout = draw(4, 2, 8, torch.float64)
    kv_of_query, mask = (0, 0, 1, 1), Mask.causal(Segments.of(LENGTHS, CPU))
    for causal in (True, False) if window is None else (True,):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = []
        for s in mask.queries.slices():
            distance = torch.arange(s.stop - s.start)[:, None] - torch.arange(s.stop - s.start)
            hidden = (distance < 0) | (distance >= (window or 1000)) if causal else distance > 1000
            q_s, k_s, v_s = (x[s].transpose(0, 1) for x in inputs)
            k_s, v_s = (x.repeat_interleave(2, 0) for x in (k_s, v_s))
            scores = 1.5 * torch.tanh(q_s @ k_s.transpose(1, 2) * 0.9 / 1.5)
            expected.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v_s).transpose(0, 1))
        seen = mask if causal else Mask.full(mask.queries, mask.queries)
        out, lse = attend(kernel, q, k, v, seen, 0.9, kv_of_query)
        grads = attend_backward(kernel, dout, q, k, v, out, lse, seen, 0.9, kv_of_query)
        assert_close(out, torch.cat(expected).detach(), 1e-13)
        for grad, wanted in zip(grads, torch.autograd.grad(torch.cat(expected), inputs, dout), strict=True):
            assert_close(grad, wanted, 1e-13)


def test_the_plain_kernels_memory_grows_with_a_sequence_not_with_its_square() -> None:
    """Whatever the length, a block has no more scores than one block may have."""
    kernel = MathKernel(softcap=30.0, block_elements=40_000)  # all scores of the longer one are 270,400
    sizes: list[int] = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    q, k, v, dout = draw(4, 2, 8, torch.float64, tokens=300)
    mask = Mask.causal(Segments.of((260, 40), CPU))
    with Counting():
        out, lse = kernel.forward(q, k, v, mask, 0.3)
        kernel.backward(dout, q, k, v, out, lse, mask, 0.3)
    assert 20_000 < max(sizes) <= 40_000
    whole = MathKernel(softcap=30.0).forward(q, k, v, mask, 0.3)
    assert torch.allclose(out, whole[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
def test_blocks_of_queries_and_keys_merge_to_causal_attention(kernel: Kernel, dtype: torch.dtype) -> None:
    """The last queries of each sequence see their own keys causally and all earlier ones as a block, of any shape."""
    for kv_of_query in ((0,), (0, 0, 1, 1), (0, 1, 1)):
        q, k, v, dout = draw(len(kv_of_query), kv_of_query[-1] + 1, 8, dtype, tokens=24)
        lengths, splits, scale = (9, 2, 13), (2, 1, 10), 0.3  # keys of the block: fewer and more than queries
        inputs = [x.double().clone().requires_grad_() for x in (q, k, v)]
        expected, _ = plain(inputs[0], inputs[1], inputs[2], lengths, scale, kv_of_query)
        late = torch.cat([torch.arange(a + s, a + n) for a, s, n in zip((0, 9, 11), splits, lengths, strict=True)])
        early = torch.cat([torch.arange(a, a + s) for a, s in zip((0, 9, 11), splits, strict=True)])
        late_parts = Segments.of(tuple(n - s for n, s in zip(lengths, splits, strict=True)), CPU)
        own, earlier = Mask.causal(late_parts), Mask.full(late_parts, Segments.of(splits, CPU))
        out, lse = attend(kernel, q[late], k[late], v[late], own, scale, kv_of_query)
        total = wide(out)
        part, part_lse = attend(kernel, q[late], k[early], v[early], earlier, scale, kv_of_query)
        merge_into(total, lse, slice(0, len(late)), part, part_lse)
        tolerance = TOLERANCES[dtype]
        assert_close(total, expected[late].detach(), tolerance)
        whole = total.to(dtype)
        dq, dk, dv = attend_backward(kernel, dout[late], q[late], k[late], v[late], whole, lse, own, scale, kv_of_query)
        more_dq, early_dk, early_dv = attend_backward(
            kernel, dout[late], q[late], k[early], v[early], whole, lse, earlier, scale, kv_of_query
        )
        assert {x.dtype for x in (part, more_dq, early_dk, early_dv)} == {dtype}
        wanted = torch.autograd.grad(expected[late], inputs, dout[late].double())
        assert_close(wide(dq) + wide(more_dq), wanted[0][late], 3 * tolerance)
        assert_close(dk, wanted[1][late], 3 * tolerance)
        assert_close(dv, wanted[2][late], 3 * tolerance)
        assert_close(early_dk, wanted[1][early], 3 * tolerance)
        assert_close(early_dv, wanted[2][early], 3 * tolerance)


def test_a_member_without_heads_calls_no_kernel() -> None:
    q, k, v = (torch.randn(9, 0, 8) for _ in range(3))
    mask = Mask.causal(Segments.of((9,), CPU))
    nothing: Kernel = None  # type: ignore[assignment]
    out, lse = attend(nothing, q, k, v, mask, 1.0, ())
    assert (out.shape, lse.shape) == ((9, 0, 8), (0, 9))
    assert [g.shape for g in attend_backward(nothing, out, q, k, v, out, lse, mask, 1.0, ())] == [(9, 0, 8)] * 3


def test_heads_dealt_to_members_give_what_all_heads_give() -> None:
    """Every member works with its own heads; gradients of shared key/value heads add up."""
    for heads, kv_heads, degree in ((6, 3, 4), (5, 1, 3), (2, 1, 4), (12, 4, 3), (12, 4, 5), (7, 7, 3)):
        q, k, v, dout = draw(heads, kv_heads, 8, torch.float64)
        mask = Mask.causal(Segments.of(LENGTHS, CPU))
        all_of = tuple(head * kv_heads // heads for head in range(heads))
        out, lse = attend(CpuFlash(), q, k, v, mask, 0.3, all_of)
        expected = attend_backward(CpuFlash(), dout, q, k, v, out, lse, mask, 0.3, all_of)
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for share in head_shares(heads, kv_heads, degree):
            mine, kv = slice(share.query.start, share.query.stop), slice(share.kv.start, share.kv.stop)
            part, part_lse = attend(CpuFlash(), q[:, mine], k[:, kv], v[:, kv], mask, 0.3, share.kv_of_query)
            assert torch.allclose(part, out[:, mine], rtol=0, atol=1e-14)
            grads = attend_backward(
                CpuFlash(),
                dout[:, mine],
                q[:, mine],
                k[:, kv],
                v[:, kv],
                part,
                part_lse,
                mask,
                0.3,
                share.kv_of_query,
            )
            for total, grad, where in zip(sums, grads, (mine, kv, kv), strict=True):
                total[:, where] += grad
        for total, wanted in zip(sums, expected, strict=True):
            assert torch.allclose(total, wanted, rtol=0, atol=1e-13)


def test_segments_know_where_sequences_lie() -> None:
    segments = Segments.of((3, 1, 2), CPU)
    assert segments.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.slices() == [slice(0, 3), slice(3, 4), slice(4, 6)]


def test_pytorchs_gpu_operators_still_take_what_we_give_them() -> None:
    """`CudaFlash` calls them by position and cannot run here: another signature must fail a test, not a user."""
    forward = torch.ops.aten._flash_attention_forward.default._schema
    assert [a.name for a in forward.arguments[:10]] == [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    ]
    assert [r.name for r in forward.returns][:2] == ["output", "softmax_logsumexp"]
    assert len(forward.returns) == 5
    backward = torch.ops.aten._flash_attention_backward.default._schema
    assert [a.name for a in backward.arguments[:14]] == [
        "grad_out",
        "query",
        "key",
        "value",
        "out",
        "logsumexp",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "rng_state",
        "unused",
    ]
    assert len(backward.returns) == 3
    for schema, positional in ((forward, 10), (backward, 14)):
        rest = schema.arguments[positional:]
        assert {"scale", "window_size_left", "window_size_right"} <= {a.name for a in rest}
        assert all(a.kwarg_only and a.has_default_value() for a in rest)
