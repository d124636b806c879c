"""From sums over targets to new weights: divide once, clip, step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nestsp.config import TrainConfig

__all__ = ["learning_rate", "make_optimizer", "update"]


def make_optimizer(root: nn.Module, config: TrainConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; weights with two or more dimensions decay, norms and biases do not."""
    parameters = [p for p in root.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Of one step: linear warm-up to the peak, then a cosine down to ``min_lr_ratio`` of it at the last step.

    A function of the step alone, so a resumed run needs no scheduler state.

    Args:
        config: The settings.
        step: 0 to ``num_steps - 1``.
        num_steps: Steps of the whole run.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    after_warmup = num_steps - config.warmup_steps
    done = (step - config.warmup_steps) / max(after_warmup - 1, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def update(
    root: nn.Module, optimizer: torch.optim.Optimizer, *, total_weight: float, max_grad_norm: float | None, lr: float
) -> float:
    """Turn gradient sums into one step of the optimizer; every rank must call it.

    Gradients are divided by the batch's total target weight and scaled down to ``max_grad_norm``, in one product. If
    the norm is not finite, nothing is changed.

    Args:
        root: The sharded module; its gradients are used up.
        optimizer: Over its parameters.
        total_weight: Sum of the weights of all targets of the batch, above 0.
        max_grad_norm: Longest gradient of the mean loss that is let through; None for any.
        lr: Learning rate of this step.

    Returns:
        Norm of the gradient of the mean loss, before it was scaled down.
    """
    gradients = [p.grad for p in root.parameters() if p.grad is not None]
    sum_norm = torch.nn.utils.get_total_norm(gradients)
    norm = (sum_norm.full_tensor() if isinstance(sum_norm, DTensor) else sum_norm).item() / total_weight
    if math.isfinite(norm):
        scale = 1.0 / total_weight
        if max_grad_norm is not None and norm > max_grad_norm:
            scale *= max_grad_norm / norm
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
