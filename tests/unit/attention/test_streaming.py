"""The driver of one layer's groups, in one process: groups of one rank, several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Kernel, Mask, Segments, attend
from nestsp.attention.streaming import AttentionContext, attend_groups
from nestsp.attention.work import GroupWork
from nestsp.plan import Keep
from nestsp.schedule import Pass, Turn
from nestsp.shape import head_shares

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8


def make_context(
    groups: Sequence[tuple[int, ...]], recomputed: bool = False, keep: Keep = "none", kernel: Any = None
) -> AttentionContext:
    """One group of one rank for each tuple of lengths."""
    works, offset = {}, 0
    for level, lengths in enumerate(groups):
        size = sum(lengths)
        works[level] = GroupWork(
            level=level,
            link=None,
            member=0,
            sizes=(size,),
            rows=slice(offset, offset + size),
            segments=Segments.of(lengths, CPU),
            heads=head_shares(HEADS, KV_HEADS, 1),
            keep=keep,
        )
        offset += size
    turns = {which: tuple(Turn(level, 0, opens=False) for level in works) for which in Pass}
    return AttentionContext(works, turns, kernel or CpuFlash(), frozenset({0} if recomputed else ()))


def draw(tokens: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(tokens, n, SIZE, dtype=torch.float64).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]


def expected(inputs: Sequence[Tensor], lengths: tuple[int, ...]) -> Tensor:
    out, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out.append(sdpa(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_groups_attend_apart_and_gradients_are_right(recomputed: bool, keep: Keep) -> None:
    inputs = draw(12)
    context = make_context([(5, 1), (4, 2)], recomputed, keep)
    if recomputed:
        out = checkpoint(attend_groups, context, 0, 0.3, *inputs, use_reentrant=False)
        assert set(context.stash) == {0}
    else:
        out = attend_groups(context, 0, 0.3, *inputs)
    wanted = expected(inputs, (5, 1, 4, 2))
    dout = torch.randn_like(out)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-14)
    found = torch.autograd.grad(out, inputs, dout)
    for grad, right in zip(found, torch.autograd.grad(wanted, inputs, dout), strict=True):
        assert torch.allclose(grad, right, rtol=0, atol=1e-13)
    assert not context.stash


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_E6_sinks_have_gradients_from_all_groups(recomputed: bool, keep: Keep) -> None:
    inputs = draw(12)
    sinks = torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    context = make_context([(5, 1), (4, 2)], recomputed, keep)
    if recomputed:
        out = checkpoint(attend_groups, context, 0, 0.3, *inputs, sinks=sinks, use_reentrant=False)
    else:
        out = attend_groups(context, 0, 0.3, *inputs, sinks=sinks)
    wanted = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 10), slice(10, 12)):
        q, k, v = (x[rows].transpose(0, 1) for x in inputs)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * 0.3
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        wanted.append((scores.softmax(-1)[..., :-1] @ v).transpose(0, 1))
    right = torch.cat(wanted)
    assert torch.allclose(out, right, rtol=0, atol=1e-14)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, [*inputs, sinks], dout)
    for grad, of_right in zip(found, torch.autograd.grad(right, [*inputs, sinks], dout), strict=True):
        assert torch.allclose(grad, of_right, rtol=0, atol=1e-13)
    assert not context.stash


def test_a_filler_token_gives_sinks_a_gradient_of_zeros() -> None:
    inputs, sinks = draw(1), torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    out = attend_groups(make_context([]), 0, 0.3, *inputs, sinks=sinks)
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert torch.equal(grad, torch.zeros(HEADS, dtype=torch.float64))


def test_what_is_kept_for_backward_is_no_view_of_something_larger() -> None:
    """Two groups' rows lie in one tensor; each group must not hold the other's."""
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    inputs = draw(12)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend_groups(make_context([(5, 1), (4, 2)]), 0, 0.3, *inputs)
    assert len(held) == 10
    for tensor in held:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_filler_token_gets_zeros_and_a_gradient_of_zeros() -> None:
    inputs = draw(1)
    out = attend_groups(make_context([]), 0, 0.3, *inputs)
    assert torch.equal(out, torch.zeros_like(out))
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), inputs))


def test_tokens_that_no_group_has_are_an_error_and_not_zeros() -> None:
    with pytest.raises(AssertionError, match="attention got 12 tokens, but its groups have 11 here"):
        attend_groups(make_context([(5,), (6,)]), 0, 0.3, *draw(12))
    with pytest.raises(AssertionError, match="attention got 2 tokens, but its groups have 0 here"):
        attend_groups(make_context([]), 0, 0.3, *draw(2))


def test_without_gradients_nothing_is_kept() -> None:
    context = make_context([(5, 1), (4, 2)], recomputed=True, keep="output")
    with torch.no_grad():
        out = attend_groups(context, 0, 0.3, *draw(12))
    assert not out.requires_grad
    assert not context.stash
    frozen = attend_groups(context, 0, 0.3, *(x.detach() for x in draw(12)))  # with gradients, but none is needed
    assert torch.equal(frozen, out)
    assert not context.stash


def test_only_some_inputs_may_need_gradients() -> None:
    for which in range(3):
        inputs = [x.detach().requires_grad_(number == which) for number, x in enumerate(draw(6))]
        out = attend_groups(make_context([(6,)]), 0, 0.3, *inputs)
        (found,) = torch.autograd.grad(out.sum(), [inputs[which]])
        (right,) = torch.autograd.grad(expected(inputs, (6,)).sum(), [inputs[which]])
        assert torch.allclose(found, right, rtol=0, atol=1e-13)


def test_backward_may_run_twice() -> None:
    inputs = draw(6)
    out = attend_groups(make_context([(4, 2)]), 0, 0.3, *inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class FailingOnce:
    name = "failing once"

    def __init__(self, failing_call: int) -> None:
        self.left = failing_call

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        raise NotImplementedError

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the kernel failed")
        return CpuFlash().forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return CpuFlash().backward(*args)


def test_after_an_error_in_a_kernel_the_next_call_is_right() -> None:
    inputs = draw(12)
    context = make_context([(5, 1), (4, 2)], kernel=FailingOnce(2))
    with pytest.raises(RuntimeError, match="the kernel failed"):
        attend_groups(context, 0, 0.3, *inputs)
    assert torch.allclose(attend_groups(context, 0, 0.3, *inputs), expected(inputs, (5, 1, 4, 2)), rtol=0, atol=1e-14)


class Listed:
    """A timer whose instants are 0, 1, 2 ..."""

    def __init__(self) -> None:
        self.next = 0
        self.turns: list[tuple[int, Pass, Turn, int, int, int]] = []

    def now(self) -> int:
        self.next += 1
        return self.next - 1

    def add(self, layer: int, which: Pass, turn: Turn, began: int, arrived: int, ended: int) -> None:
        self.turns.append((layer, which, turn, began, arrived, ended))


def test_every_turn_is_timed_once_in_each_pass() -> None:
    inputs, timer = draw(12), Listed()
    context = make_context([(5, 1), (4, 2)], recomputed=True)
    context.timer = timer
    out = checkpoint(attend_groups, context, 0, 0.3, *inputs, use_reentrant=False)
    out.sum().backward()
    wanted = [(which, turn) for which in (Pass.FORWARD, Pass.RECOMPUTE, Pass.BACKWARD) for turn in context.turns[which]]
    assert [(which, turn) for _, which, turn, *_ in timer.turns] == wanted
    instants = [instant for *_, began, arrived, ended in timer.turns for instant in (began, arrived, ended)]
    assert instants == sorted(instants)
    assert all(began == arrived < ended for *_, began, arrived, ended in timer.turns)  # nothing to wait for


def test_a_group_with_more_exchanges_than_its_schedule_is_an_error() -> None:
    context = make_context([(6,)])
    extra = {**context.turns, Pass.FORWARD: (Turn(0, 0, opens=False), Turn(0, 1, opens=False))}
    with pytest.raises(KeyError):  # it has ended already
        attend_groups(AttentionContext(context.groups, extra, context.kernel, frozenset()), 0, 0.3, *draw(6))


def test_the_reference_of_these_tests_is_the_kernel_alone() -> None:
    q, k, v = (x.detach() for x in draw(6))
    out, _ = attend(CpuFlash(), q, k, v, Mask.causal(Segments.of((4, 2), CPU)), 0.3, (0, 0, 1, 1))
    assert torch.allclose(out, expected((q, k, v), (4, 2)), rtol=0, atol=1e-14)
