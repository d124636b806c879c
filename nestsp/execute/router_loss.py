"""One step with the router's auxiliary loss: where the whole batch's counts come from.

- ``counting_pass``: from the batch itself. Exact, the loss that Transformers defines; with one microbatch the forward
  pass that runs anyway counts, with several there is one more forward pass of each before the first backward pass.
- ``previous_step``: from the batch before, which costs nothing. Another objective: it pushes the router away from what
  was crowded one step ago. The first step has no gradient of it.

Neither depends on the plan, the ranks or the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.local import LocalTokens, TokenLoss, weighted_sum
from nestsp.model.root import LossRoot
from nestsp.model.router_loss import router_loss_of

__all__ = ["RouterLossKind", "remember_counts", "run_with_router_loss"]

RouterLossKind = Literal["counting_pass", "previous_step"]


def run_with_router_loss(
    executor: Executor,
    local: LocalBatch,
    *,
    kind: RouterLossKind,
    scale: float,
    token_loss: TokenLoss = weighted_sum,
) -> tuple[Tensor, float]:
    """Run all microbatches; every rank must call it. Gradients are of loss sum + scale × auxiliary loss.

    Args:
        executor: Its root must have a `nestsp.model.router_loss.RouterLoss`.
        local: The microbatches.
        kind: Where the counts come from.
        scale: The auxiliary loss's coefficient × the batch's total target weight, since the sum is divided by the
            weight later.
        token_loss: To which the auxiliary loss is added.

    Returns:
        This rank's loss sum without the auxiliary loss, as of `Executor.run`; and the batch's auxiliary loss, not
        scaled, the same on all ranks.
    """
    root = executor.root
    assert isinstance(root, LossRoot)
    router = root.router_loss
    assert router is not None, "the root has no router loss"
    router.take()
    found: list[Tensor] = []

    def slopes_of_batch() -> Tensor:
        sums = router.take().to(executor.device)
        dist.all_reduce(sums)
        loss, slope_E = router_loss_of(sums, router.top_k)
        found.append(loss)
        if root.router_counts is not None:
            root.router_counts.copy_(sums)
        return slope_E * scale

    one_pass = kind == "counting_pass" and len(local.microbatches) == 1
    if kind == "previous_step":
        assert root.router_counts is not None, "the root keeps no counts"
        router.slope_E = router_loss_of(root.router_counts, router.top_k)[1] * scale
    elif one_pass:
        router.slope_E = torch.zeros(router.num_experts)  # known when the forward pass is over
    else:
        executor.measure(local)
        router.slope_E = slopes_of_batch()

    def after_counting(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
        if one_pass:
            router.slope_E = slopes_of_batch()
        return token_loss(tokens, nll_T)

    try:
        total = executor.run(local, after_counting)
    finally:
        router.slope_E = None
    if kind == "previous_step":
        slopes_of_batch()
    router.take()
    return total, found[0].item()


def remember_counts(executor: Executor) -> Callable[[], None]:
    """A function that sets the counts that are kept for the next step, if any are, back to what they are now."""
    root = executor.root
    assert isinstance(root, LossRoot)
    counts = root.router_counts
    if counts is None:
        return lambda: None
    before = counts.clone()

    def put_back() -> None:
        counts.copy_(before)

    return put_back
