"""flash-attn cannot run here: stand-ins with its functions' signatures show that each argument is in its place."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nestsp.attention.flash_attn import FlashAttn2, FlashAttn3
from nestsp.attention.kernels import MathKernel
from nestsp.attention.local import Kernel, Mask, Segments

CPU = torch.device("cpu")


def segments_of(cu_seqlens: Tensor) -> Segments:
    return Segments.of(tuple(cu_seqlens.diff().tolist()), CPU)


def mask_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool) -> Mask:
    mask = Mask(segments_of(cu_seqlens_q), segments_of(cu_seqlens_k), causal)
    assert (max_seqlen_q, max_seqlen_k) == (max(mask.queries.lengths), max(mask.keys.lengths))
    return mask


def math_of(window_size_left: int, window_size_right: int, causal: bool, softcap: float) -> MathKernel:
    """What flash-attn would compute: a window is how many keys a query sees beside its own."""
    assert window_size_right == (-1 if window_size_left == -1 else 0)
    assert causal or window_size_left == -1
    return MathKernel(None if window_size_left == -1 else window_size_left + 1, softcap or None)


# Names, order and defaults of flash-attn 2.7's own.
def forward_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert dropout_p == 0
    mask = mask_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    out, lse = math_of(window_size_left, window_size_right, causal, softcap).forward(q, k, v, mask, softmax_scale)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def backward_2(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    assert (dropout_p, alibi_slopes, rng_state) == (0, None, None)
    mask = mask_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    kernel = math_of(window_size_left, window_size_right, causal, softcap)
    grads = kernel.backward(dout, q, k, v, out, softmax_lse, mask, softmax_scale)
    for place, grad in zip((dq, dk, dv), grads, strict=True):
        place.copy_(grad)
    return q.new_empty(0)


# Names, order and defaults of flash-attn 3's own, of 2025 and 2026.
def forward_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    unused = (k_new, v_new, qv, out_, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k)
    assert {*unused, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale} == {None}
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert softmax_scale is not None
    mask = mask_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    out, lse = math_of(window_size_left, window_size_right, causal, softcap).forward(q, k, v, mask, softmax_scale)
    return out, lse, q.new_empty(0), q.new_empty(0)


def backward_3(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sequed_q: Tensor | None,
    sequed_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    assert (sequed_q, sequed_k) == (None, None)
    mask = mask_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal)
    kernel = math_of(window_size_left, window_size_right, is_causal, softcap)
    grads = kernel.backward(dout, q, k, v, out, softmax_lse, mask, softmax_scale)
    for place, grad in zip((dq, dk, dv), grads, strict=True):
        place.copy_(grad)
    return q.new_empty(0)


# As vLLM's version of it and its own betas have them: a window is a pair, and all up to it must be given.
def paired_forward_3(*args: Any, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0) -> Any:
    assert len(args) == 25
    return functions_of_3()._flash_attn_forward(*args, *window_size, 0, softcap)


def paired_backward_3(*args: Any, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0) -> Any:
    assert len(args) == 17
    return functions_of_3()._flash_attn_backward(*args, *window_size, softcap)


def functions_of_2() -> Any:
    module: Any = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward_2, backward_2
    return module


def functions_of_3(*, paired: bool = False) -> Any:
    module: Any = ModuleType("flash_attn_interface")
    module._flash_attn_forward = paired_forward_3 if paired else forward_3
    module._flash_attn_backward = paired_backward_3 if paired else backward_3
    return module


KERNELS = {
    "2": FlashAttn2(functions_of_2(), "2"),
    "3": FlashAttn3(functions_of_3(), "3"),
    "3, paired windows": FlashAttn3(functions_of_3(paired=True), "3"),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 1.5), (4, 1.5), (4, None)])
def test_E15_inner_functions_get_what_they_expect(kernel: Kernel, window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(9, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    ours, wanted = kernel.adapted(window, softcap), MathKernel(window, softcap)
    segments = Segments.of((6, 3), CPU)
    masks = [Mask.causal(segments)] + ([Mask.full(Segments.of((2, 1), CPU), segments)] if window is None else [])
    for mask in masks:
        rows = slice(0, sum(mask.queries.lengths))
        out, lse = ours.forward(q[rows], k, v, mask, 0.7)
        assert all(map(torch.equal, (out, lse), wanted.forward(q[rows], k, v, mask, 0.7)))
        grads = ours.backward(dout[rows], q[rows], k, v, out, lse, mask, 0.7)
        assert all(map(torch.equal, grads, wanted.backward(dout[rows], q[rows], k, v, out, lse, mask, 0.7)))
