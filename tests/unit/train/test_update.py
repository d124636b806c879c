"""From sums over targets to new weights, against PyTorch's own mean, clipping and AdamW."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from nestsp.config import TrainConfig
from nestsp.train.update import learning_rate, make_optimizer, update

CONFIG = TrainConfig(steps=10, learning_rate=0.5, weight_decay=0.3)


class Small(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.vector = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.matrix + self.vector) ** 2).sum(-1)


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("max_grad_norm", [None, 1e9, 0.5])
def test_a_sum_divided_at_the_update_is_the_mean_clipped_and_stepped_by_pytorch(max_grad_norm: float | None) -> None:
    ours, theirs = Small(), Small()
    optimizer = make_optimizer(ours, CONFIG, fused=False)
    reference = make_optimizer(theirs, CONFIG, fused=False)
    for step in range(3):
        ours.losses(X).sum().backward()
        norm = update(ours, optimizer, total_weight=len(X), max_grad_norm=max_grad_norm, lr=0.1 + step)
        theirs.losses(X).mean().backward()
        gradients = [p.grad for p in theirs.parameters() if p.grad is not None]
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        if max_grad_norm is not None and expected > max_grad_norm:
            for gradient in gradients:
                gradient.mul_(max_grad_norm / expected)
        for group in reference.param_groups:
            group["lr"] = 0.1 + step
        reference.step()
        reference.zero_grad()
        assert norm == pytest.approx(expected, rel=1e-12)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
            assert mine.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(value: float) -> None:
    model = Small()
    optimizer = make_optimizer(model, CONFIG, fused=False)
    before = copy.deepcopy(model.state_dict())
    model.losses(X).sum().backward()
    assert model.vector.grad is not None
    model.vector.grad[2] = value
    norm = update(model, optimizer, total_weight=len(X), max_grad_norm=1.0, lr=0.1)
    assert not math.isfinite(norm)
    assert not optimizer.state
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Small()
    optimizer = make_optimizer(model, CONFIG, fused=False)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(model.matrix): 0.3, id(model.vector): 0.0}


def test_the_learning_rate_warms_up_to_the_peak_and_ends_at_its_ratio() -> None:
    config = TrainConfig(steps=10, learning_rate=2.0, min_lr_ratio=0.25, warmup_steps=4)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[-1] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[4] - rates[5] < rates[6] - rates[7], "a cosine is flat at its ends and steep in the middle"


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 3), (3, 3), (2, 3)])
def test_the_learning_rate_is_above_zero_and_at_most_the_peak_on_short_runs(warmup: int, steps: int) -> None:
    config = TrainConfig(steps=steps, learning_rate=2.0, warmup_steps=warmup)
    assert all(0 < learning_rate(config, step, steps) <= 2.0 for step in range(steps))
