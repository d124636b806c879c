"""flash-attn cannot run here: a stand-in with its functions' signatures shows that each argument is in its place."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nestsp.attention.flash_attn import FlashAttn, has_flash_attn
from nestsp.attention.local import CudaFlash, MathKernel, Segments, choose_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def segments_of(cu_seqlens: Tensor) -> Segments:
    return Segments.of(tuple(cu_seqlens.diff().tolist()), CPU)


def math_of(window_size_left: int, window_size_right: int, causal: bool, softcap: float) -> MathKernel:
    """What flash-attn would compute: a window is how many keys a query sees beside its own."""
    assert window_size_right == (-1 if window_size_left == -1 else 0)
    assert causal or window_size_left == -1
    return MathKernel(None if window_size_left == -1 else window_size_left + 1, softcap or None)


# Names, order and defaults of flash-attn 2.7's own.
def forward(
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
    queries, keys = segments_of(cu_seqlens_q), segments_of(cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (max(queries.lengths), max(keys.lengths))
    kernel = math_of(window_size_left, window_size_right, causal, softcap)
    out, lse = kernel._forward(q, k, v, queries, keys, causal, softmax_scale)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def backward(
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
    queries, keys = segments_of(cu_seqlens_q), segments_of(cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (max(queries.lengths), max(keys.lengths))
    kernel = math_of(window_size_left, window_size_right, causal, softcap)
    grads = kernel._backward(dout, q, k, v, out, softmax_lse, queries, keys, causal, softmax_scale)
    for place, grad in zip((dq, dk, dv), grads, strict=True):
        place.copy_(grad)
    return q.new_empty(0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward, backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 1.5), (4, 1.5), (4, None)])
def test_its_inner_functions_get_what_they_expect(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(9, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    ours, wanted = FlashAttn().adapted(window, softcap), MathKernel(window, softcap)
    segments = Segments.of((6, 3), CPU)
    out, lse = ours.forward(q, k, v, segments, 0.7)
    assert all(map(torch.equal, (out, lse), wanted.forward(q, k, v, segments, 0.7)))
    grads = ours.backward(dout, q, k, v, out, lse, segments, 0.7)
    assert all(map(torch.equal, grads, wanted.backward(dout, q, k, v, out, lse, segments, 0.7)))
    if window is None:
        late = Segments.of((2, 1), CPU)
        part, part_lse = ours.forward_block(q[:3], k, v, late, segments, 0.7)
        assert all(map(torch.equal, (part, part_lse), wanted.forward_block(q[:3], k, v, late, segments, 0.7)))
        grads = ours.backward_block(dout[:3], q[:3], k, v, part, part_lse, late, segments, 0.7)
        right = wanted.backward_block(dout[:3], q[:3], k, v, part, part_lse, late, segments, 0.7)
        assert all(map(torch.equal, grads, right))


@pytest.mark.parametrize(
    ("version", "known"), [(None, False), ("2.6.3", False), ("2.7.4.post1", True), ("2.8.3", True), ("3.0.0", False)]
)
def test_it_is_chosen_for_soft_caps_where_a_known_version_is_installed(
    version: str | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        assert name == "flash_attn"
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert has_flash_attn() == known
    capped = choose_kernel(GPU, torch.bfloat16, 128, softcap=True)
    assert isinstance(capped, FlashAttn if known else MathKernel)
    assert isinstance(choose_kernel(GPU, torch.bfloat16, 128), CudaFlash)
