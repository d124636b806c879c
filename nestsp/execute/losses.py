"""Losses of whole sequences, whose tokens lie on many ranks and in many microbatches: exact, by one linearisation.

A loss L is any function of the sequences' sums S_i = Σ weight × negative log-likelihood. With c_i = ∂L/∂S_i at the
batch's own sums, the gradient of L is that of Σ c_i · S_i: plain training whose token weights are c_i × weight. So:

1. every rank adds up its tokens' shares of S, and one all-reduce of [sequences] gives S to all;
2. every rank computes L and c from the same S, as in one process;
3. the backward pass runs with the weights c_i × weight.

Price: with one microbatch nothing but the all-reduce; with several, one more forward pass of each, because the first
backward pass needs the sums of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.errors import ConfigError, NumericsError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.local import LocalTokens, TokenLoss
from nestsp.model.loss import IGNORED_TARGET

__all__ = ["SequenceLoss", "SequenceSums", "measure_sequences", "require_loss", "run_sequence_loss", "try_loss"]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSums:
    """What a loss of whole sequences is made of; the same on all ranks.

    Attributes:
        ids: Of the batch's sequences, in order.
        nll_S: float64 [S], Σ weight × negative log-likelihood of each sequence's targets.
        weight_S: float64 [S], Σ weight of the same targets; 0 for a sequence of one token.
        reference_S: float64 [S], as ``nll_S`` under the model that the run began with; None unless it was asked for.
    """

    ids: tuple[int, ...]
    nll_S: Tensor
    weight_S: Tensor
    reference_S: Tensor | None = None


class SequenceLoss(Protocol):
    """A loss of whole sequences: a function of its argument alone, since every rank computes it for itself."""

    def __call__(self, sums: SequenceSums, /) -> Tensor:
        """The batch's loss, a scalar; it is not divided by anything afterwards."""


def run_sequence_loss(
    executor: Executor,
    local: LocalBatch,
    batch: SequenceBatch,
    loss: SequenceLoss,
    run: Callable[[TokenLoss], object] | None = None,
) -> Tensor:
    """Run all microbatches forward and backward for a loss of whole sequences; every rank must call it.

    Gradients are added to those there are, and are the loss's own: give `nestsp.train.update.update` a
    ``total_weight`` of 1.

    Args:
        executor: The model.
        local: What `Executor.load` made of a plan of the batch; its weights may have been changed.
        batch: The sequences.
        loss: The function.
        run: Runs all microbatches for a loss of tokens, with whatever it adds to it; None for `Executor.run`.

    Returns:
        The loss, float64, the same on all ranks, without a gradient; nan, with gradients of nan, if the model's own
        likelihoods are not finite.

    Raises:
        ConfigError: The function returns no scalar that follows from the likelihoods; on every rank.
        NumericsError: The loss of finite likelihoods, or what a sequence does to it, is not finite; on every rank.
    """
    weight_S = _weights(executor, local, batch)
    found: list[Tensor] = []

    def slopes(likelihoods: Sequence[Tensor]) -> Tensor:
        nll_S = _sums(executor, local, batch, likelihoods)
        value, slope_S = _linearise(loss, SequenceSums(batch.ids, nll_S, weight_S))
        found.append(value)
        return slope_S

    slope_S = slopes(executor.measure(local)) if len(local.microbatches) > 1 else None

    def linear(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
        slope = slopes([nll_T.detach()]) if slope_S is None else slope_S
        weights = (slope[tokens.sequences] * tokens.weights).to(nll_T.dtype)
        return (nll_T * weights).sum()

    if run is None:
        executor.run(local, linear)
    else:
        run(linear)
    return found[0]


def require_loss(value: object, name: str, source: str) -> None:
    """Refuse what is no loss.

    Raises:
        ConfigError: The value is no scalar with a gradient.
    """
    if not isinstance(value, Tensor) or value.shape != () or not value.requires_grad:
        shown = type(value).__name__
        if isinstance(value, Tensor):
            shown = f"a tensor {list(value.shape)}" if value.shape else "a tensor without gradient"
        raise ConfigError(
            f"{name} is {shown}, but it must be a scalar tensor that follows from {source}; end it with .sum() and "
            "leave out .item() and .detach()"
        )


def try_loss(loss: SequenceLoss, sums: SequenceSums) -> tuple[float, ...]:
    """A loss of given sums, and its derivative by each; no collective.

    Raises:
        ConfigError: It returns no scalar that follows from the likelihoods.
        NumericsError: It, or a derivative, is not finite.
    """
    value, slope_S = _linearise(loss, sums)
    return (value.item(), *slope_S.tolist())


def measure_sequences(executor: Executor, local: LocalBatch, batch: SequenceBatch) -> SequenceSums:
    """The sums of a batch's sequences under the model as it is, forward only; every rank must call it.

    Args:
        executor: The model.
        local: What `Executor.load` made of a plan of the batch.
        batch: The sequences.
    """
    nll_S = _sums(executor, local, batch, executor.measure(local))
    return SequenceSums(batch.ids, nll_S, _weights(executor, local, batch))


def _weights(executor: Executor, local: LocalBatch, batch: SequenceBatch) -> Tensor:
    return _sums(executor, local, batch, [torch.ones_like(m.tokens.weights) for m in local.microbatches])


def _sums(executor: Executor, local: LocalBatch, batch: SequenceBatch, values: Sequence[Tensor]) -> Tensor:
    """Σ weight × value of the targets of each sequence on all ranks, float64 [S]."""
    sums = torch.zeros(batch.num_sequences, dtype=torch.float64, device=executor.device)
    for microbatch, values_T in zip(local.microbatches, values, strict=True):
        tokens = microbatch.tokens
        there = tokens.targets != IGNORED_TARGET
        sums.index_add_(0, tokens.sequences[there], (tokens.weights * values_T)[there].double())
    dist.all_reduce(sums)
    return sums


def _linearise(loss: SequenceLoss, sums: SequenceSums) -> tuple[Tensor, Tensor]:
    """The loss, and its derivative by each sequence's sum; nan where a sum is not finite, which is no fault of it."""
    if not sums.nll_S.isfinite().all():
        return sums.nll_S.new_tensor(torch.nan), torch.full_like(sums.nll_S, torch.nan)
    with torch.enable_grad():
        nll_S = sums.nll_S.detach().requires_grad_()
        value = loss(replace(sums, nll_S=nll_S))
        require_loss(value, "the result of a loss of sequences", "nll_S")
        (slope_S,) = torch.autograd.grad(value, nll_S)
    if not value.isfinite() or not slope_S.isfinite().all():
        bad = [
            identity for identity, slope in zip(sums.ids, slope_S.tolist(), strict=True) if not abs(slope) < torch.inf
        ]
        slopes = f", and its derivative is not finite for sequences {bad[:5]}" if bad else ""
        raise NumericsError(
            f"the loss is {value.item()}{slopes}, but both must be finite; no gradient was made of it, so correct the "
            "loss"
        )
    return value.detach(), slope_S
