"""The router's auxiliary loss of mixture-of-experts models, defined on the whole batch, whatever the plan.

    loss = E · Σ_e (F_e / n) · (P_e / n)

E experts; n tokens × layers; F_e how often expert e is chosen; P_e the sum of its probabilities. F and P are sums over
all tokens of the batch and all layers, as Transformers takes them over one forward pass (`load_balancing_loss_func`).
It is not linear in the tokens, so means over microbatches or ranks are another loss, with other gradients.

F has no gradient. So the loss is linear in P once F is known, and each rank adds its own share: every router passes on
its scores unchanged and sends the gradient of Σ_e slope_e · P_e into its logits, in backward and inside its own layer,
so that recomputation and FSDP's hooks see nothing unusual. Slopes are read in backward: they may come after the forward
pass, which is when the counts of a batch of one microbatch are complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nestsp.errors import ModelError

__all__ = ["RouterLoss", "find_routers", "router_loss_of"]


class RouterLoss:
    """Counts what the routers of a model choose, and gives them the gradient of the auxiliary loss. Hooks do both.

    Attributes:
        num_routers: Layers with experts.
        num_experts: Of each.
        top_k: Experts of a token.
        sums: float64 [2, E], F and P of this rank since the last `take`.
        slope_E: Derivative of the loss by P; None while the auxiliary loss is off.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = find_routers(model)
        self.num_routers = len(routers)
        self.num_experts, self.top_k = int(routers[0].num_experts), int(routers[0].top_k)  # type: ignore[arg-type]
        self.sums = torch.zeros(2, self.num_experts, dtype=torch.float64)
        self.slope_E: Tensor | None = None
        self._counts = False
        self._filler = False
        for router in routers:
            router.register_forward_hook(self._hook)

    @contextmanager
    def forward_pass(self, num_tokens: int) -> Iterator[None]:
        """Count what is chosen inside; a recompute, which comes later, is not counted again.

        Args:
            num_tokens: Tokens of the microbatch on this rank; 0 if there is a filler only.
        """
        self._counts, self._filler = True, num_tokens == 0
        try:
            yield
        finally:
            self._counts = False

    def take(self) -> Tensor:
        """What was counted since the last time, float64 [2, E]."""
        sums, self.sums = self.sums, torch.zeros_like(self.sums)
        return sums

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        logits, scores, chosen = output
        if self._filler or not (self._counts or self.slope_E is not None):
            return output
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        probability_E = logits.reshape(-1, self.num_experts).to(wide).softmax(-1).sum(0)
        if self._counts:
            count_E = torch.zeros(self.num_experts, dtype=torch.float64, device=logits.device)
            count_E.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen, dtype=torch.float64).reshape(-1))
            self.sums = self.sums.to(logits.device) + torch.stack([count_E, probability_E.detach().double()])
        if self.slope_E is None or not torch.is_grad_enabled():
            return output
        scores = _SendSlopes.apply(scores, probability_E, self)  # type: ignore[no-untyped-call]
        return logits, scores, chosen


class _SendSlopes(torch.autograd.Function):
    """The scores, unchanged; in backward the probabilities get their slopes."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, probability_E: Tensor, loss: RouterLoss) -> Tensor:
        ctx.loss, ctx.dtype = loss, probability_E.dtype
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slope_E = ctx.loss.slope_E
        assert slope_E is not None, "the auxiliary loss was turned off between forward and backward"
        return grads[0], slope_E.to(ctx.dtype), None


def router_loss_of(sums: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The auxiliary loss of a batch, and its slopes.

    Args:
        sums: float64 [2, E], F and P over all ranks, microbatches and layers.
        top_k: Experts of a token.

    Returns:
        The loss, a scalar, and float64 [E], its derivative by P; zeros if nothing was counted.
    """
    count_E, probability_E = sums
    num_choices = (count_E.sum() / top_k).clamp(min=1)
    slope_E = len(count_E) * count_E / num_choices.square()
    return (slope_E * probability_E).sum(), slope_E


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order of its layers.

    Raises:
        ModelError: It has none, or they are not all alike.
    """
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    kinds = {(getattr(router, "num_experts", None), getattr(router, "top_k", None)) for router in routers}
    if len(kinds) != 1 or None in next(iter(kinds)):
        raise ModelError(
            f"train.router_loss is on, but {type(model).__name__} has "
            f"{'no routers of experts' if not routers else 'routers of several kinds'}; set train.router_loss: off"
        )
    return routers
