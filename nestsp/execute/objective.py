"""What a run minimises, in one value: a loss of tokens or of whole sequences, and the routers' auxiliary loss.

With a loss of sequences *and* a counting pass, a batch of several microbatches runs forward twice before its first
backward pass: once for the sequences' sums, once for the routers' counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.local import TokenLoss, weighted_sum
from nestsp.execute.losses import SequenceLoss, run_sequence_loss
from nestsp.execute.router_loss import RouterLossKind, run_with_router_loss

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What every step of a run minimises.

    Attributes:
        token_loss: Sum over tokens, which the update divides by the batch's target weight.
        sequence_loss: Replaces it, and is divided by nothing; None for the loss of tokens.
        router_loss: Where the routers' counts come from.
        router_coefficient: Factor of the routers' auxiliary loss.
    """

    token_loss: TokenLoss = weighted_sum
    sequence_loss: SequenceLoss | None = None
    router_loss: RouterLossKind | Literal["off"] = "off"
    router_coefficient: float = 0.0

    def denominator(self, total_weight: float) -> float:
        """What gradients and loss are divided by at the update; 0 for a batch without targets, which has none.

        Args:
            total_weight: Of the batch's targets.
        """
        return 1.0 if self.sequence_loss is not None and total_weight else total_weight

    def run(
        self, executor: Executor, local: LocalBatch, batch: SequenceBatch, total_weight: float
    ) -> tuple[float, float | None]:
        """Run all microbatches, forward and backward; every rank must call it.

        Args:
            executor: The model.
            local: What `Executor.load` made of a plan of the batch.
            batch: The sequences.
            total_weight: Of the batch's targets.

        Returns:
            This rank's share of the loss, not divided; and the batch's auxiliary loss, not scaled, or None.
        """
        auxiliary: list[float] = []

        def run(token_loss: TokenLoss) -> Tensor:
            if self.router_loss == "off":
                return executor.run(local, token_loss)
            scale = self.router_coefficient * self.denominator(total_weight)
            total, value = run_with_router_loss(
                executor, local, kind=self.router_loss, scale=scale, token_loss=token_loss
            )
            auxiliary.append(value)
            return total

        if self.sequence_loss is None or not total_weight:  # without a target there is nothing to compare
            share = run(self.token_loss).item()
        else:
            value = run_sequence_loss(executor, local, batch, self.sequence_loss, run).item()
            share = value if executor.rank == 0 else 0.0  # all ranks have the whole
        return share, auxiliary[0] if auxiliary else None
