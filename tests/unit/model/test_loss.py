"""The sliced loss: a sum, whatever the slices, with right gradients and no NaN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestsp.model.loss import IGNORED_TARGET, sliced_nll


def parts(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    head = nn.Linear(6, 11, bias=False).to(dtype)
    hidden = torch.randn(13, 6).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (13,))
    targets[[0, 5, 12]] = IGNORED_TARGET
    return head, hidden, targets, torch.randn(13)


@pytest.mark.parametrize("slice_tokens", [1, 2, 5, 13, 1000])
def test_slices_do_not_change_the_sum_nor_its_gradients(slice_tokens: int) -> None:
    head, hidden, targets, weights = parts()
    loss = (sliced_nll(head, hidden, targets, slice_tokens) * weights).sum()
    there = targets != IGNORED_TARGET
    nll = -head(hidden).log_softmax(-1)[there, targets[there]]
    expected = (nll * weights[there]).sum()
    assert loss.dtype == torch.float64
    assert torch.allclose(loss, expected, rtol=1e-13)
    found = torch.autograd.grad(loss, [hidden, head.weight])
    for grad, wanted in zip(found, torch.autograd.grad(expected, [hidden, head.weight]), strict=True):
        assert torch.allclose(grad, wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(found[0][~there], torch.zeros_like(found[0][~there]))


def test_B4_a_rank_without_targets_gives_exactly_zero_with_a_gradient() -> None:
    head, hidden, targets, weights = parts()
    loss = (sliced_nll(head, hidden, torch.full_like(targets, IGNORED_TARGET), 4) * weights).sum()
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


def test_B6_an_ignored_target_with_a_huge_loss_does_not_poison_the_sum() -> None:
    head, hidden, targets, weights = parts()
    with torch.no_grad():
        hidden[0] = 1e300  # its target is ignored
    loss = (sliced_nll(head, hidden, targets, 4) * weights).sum()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_is_taken_in_float32(dtype: torch.dtype) -> None:
    head, hidden, targets, weights = parts(dtype)
    loss = (sliced_nll(head, hidden, targets, 4) * weights).sum()
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype


def test_G25_logits_of_one_slice_only_exist_at_one_time() -> None:
    head, hidden, targets, weights = parts()
    seen = []
    head.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    loss = (sliced_nll(head, hidden, targets, 4) * weights).sum()
    assert seen == [4, 4, 4, 1]
    loss.backward()
    assert sorted(seen[4:]) == [1, 4, 4, 4]  # once more, in backward
