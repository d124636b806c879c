"""Compares one planned step with the same batch in one process: loss, gradient norm, every gradient, expert choices.

The reference is Transformers alone: the same weights, ``sdpa`` attention, each sequence by itself, full logits, one sum
of losses. It shares with the planned step nothing but tokens and weights, and makes its own routing decisions.

The error of a parameter is ‖g − g_ref‖ / max(‖g_ref‖, 1e-6 · ‖all g_ref‖), so that gradients that are nothing but
rounding do not count as wrong; a gradient that is missing on one side counts as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

__all__ = [
    "Gradients",
    "RoutingRecorder",
    "Verification",
    "compare_gradients",
    "full_gradients",
    "parameter_group",
    "reference_gradients",
]

Choices = Mapping[tuple[int, int, int], tuple[int, ...]]
"""(layer, sequence id, position) → the experts that the token goes to, ascending."""

# Below this share of the whole gradient's norm, a parameter's gradient is compared with the share, not with itself.
_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What one step gave.

    Attributes:
        loss_sum: Sum of the losses of all targets.
        by_parameter: Gradient of the sum by parameter name; None where autograd left none.
        experts: Expert choices of all tokens; empty for a dense model.
    """

    loss_sum: float
    by_parameter: Mapping[str, Tensor | None]
    experts: Choices

    @property
    def norm(self) -> float:
        """Euclidean norm of all gradients."""
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.by_parameter.values() if g is not None))


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a planned step is from the reference.

    Attributes:
        loss: Of the planned step, mean over targets.
        reference_loss: Of the reference.
        norm: Gradient norm of the planned step, of the mean loss.
        reference_norm: Of the reference.
        errors: Error of each parameter's gradient.
        num_rerouted: Tokens (of one layer each) whose experts differ.
        num_routed: Tokens (of one layer each) that were routed in both.
    """

    loss: float
    reference_loss: float
    norm: float
    reference_norm: float
    errors: Mapping[str, float]
    num_rerouted: int
    num_routed: int

    @property
    def loss_error(self) -> float:
        """Relative error of the loss."""
        return _relative(self.loss, self.reference_loss)

    @property
    def norm_error(self) -> float:
        """Relative error of the gradient norm."""
        return _relative(self.norm, self.reference_norm)

    @property
    def worst(self) -> float:
        """The largest of all errors; infinite if any is not a number."""
        values = [self.loss_error, self.norm_error, *self.errors.values()]
        return max(math.inf if math.isnan(value) else value for value in values)

    def passes(self, tolerance: float) -> bool:
        """Whether all errors are within a tolerance and every token went to the same experts."""
        return self.worst <= tolerance and self.num_rerouted == 0

    def errors_by_group(self) -> dict[str, tuple[int, float]]:
        """Number of parameters and largest error of each parameter group, in the order of the model."""
        groups: dict[str, tuple[int, float]] = {}
        for name, error in self.errors.items():
            group = parameter_group(name)
            count, worst = groups.get(group, (0, 0.0))
            groups[group] = (count + 1, max(worst, math.inf if math.isnan(error) else error))
        return groups


def parameter_group(name: str) -> str:
    """A parameter's name without the layer's number.

    >>> parameter_group("model.layers.3.self_attn.q_proj.weight")
    'self_attn.q_proj'
    >>> parameter_group("lm_head.weight")
    'lm_head'
    """
    parts = [part for part in name.split(".") if not part.isdecimal() and part not in ("model", "layers")]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts)


class RoutingRecorder:
    """Records the experts that a mixture-of-experts model chooses for its tokens, by hooks on its routers.

    Attributes:
        choices: What was recorded so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.choices: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._origin: Sequence[tuple[int, int]] = ()
        self._places: dict[int, int] = {}
        self._handles = []
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        for number, router in enumerate(routers):
            self._handles.append(router.register_forward_hook(self._hook(number)))

    @contextmanager
    def tokens(self, origin: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Say which (sequence id, position) the next forward's tokens are; tokens beyond them are fillers."""
        self._origin, self._places = origin, {}
        yield
        self._origin = ()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            chosen = output[2].sort(-1).values.tolist()
            start = self._places.get(layer, 0)  # a block that runs in slices calls its router several times
            self._places[layer] = start + len(chosen)
            for (sequence, position), experts in zip(self._origin[start:], chosen, strict=False):
                self.choices[layer, sequence, position] = tuple(experts)

        return record


def full_gradients(root: nn.Module, *, keep: bool) -> dict[str, Tensor | None]:
    """Whole gradients of a sharded module, on the CPU; every rank must call it.

    Args:
        root: Its parameters may be sharded.
        keep: Whether this rank wants them; others get an empty mapping and need no memory for them.
    """
    result: dict[str, Tensor | None] = {}
    for name, parameter in root.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if keep:
            result[name.removeprefix("model.")] = None if whole is None else whole.detach().cpu()
    return result


def reference_gradients(
    model: nn.Module,
    sequences: Mapping[int, Tensor],
    labels: Mapping[int, tuple[Tensor, Tensor]] | None = None,
) -> Gradients:
    """Run each sequence alone through a model, in this process.

    Args:
        model: A causal language model of Transformers with ``sdpa`` attention; its gradients must be unset.
        sequences: Token ids, int64 [length], by sequence id.
        labels: What is to be predicted at each token's place and its weight, int64 and float [length], by sequence id;
            None for the tokens themselves, all of weight 1.
    """
    recorder = RoutingRecorder(model)
    total = 0.0
    for identity, ids in sequences.items():
        with recorder.tokens([(identity, position) for position in range(len(ids))]):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        wanted, weights = (ids, torch.ones(len(ids))) if labels is None else labels[identity]
        nll = F.cross_entropy(logits[:-1].to(wide), wanted[1:], reduction="none")
        loss = (nll * weights[1:].to(wide)).sum()
        if len(ids) > 1:  # a sequence of one token has no target
            loss.backward()
            total += loss.item()
    recorder.remove()
    gradients = {name: p.grad.detach().cpu() if p.grad is not None else None for name, p in model.named_parameters()}
    return Gradients(total, gradients, recorder.choices)


def compare_gradients(planned: Gradients, reference: Gradients, total_weight: float) -> Verification:
    """Compare a planned step with the reference.

    Args:
        planned: Of the planned step.
        reference: Of `reference_gradients`.
        total_weight: Of the batch's targets; losses and norms are shown as of the mean over them.
    """
    denominator = total_weight or 1.0
    floor = _FLOOR * reference.norm
    errors = {}
    for name, expected in reference.by_parameter.items():
        found = planned.by_parameter.get(name)
        if expected is None and found is None:
            errors[name] = 0.0
            continue
        like = expected if expected is not None else found
        assert like is not None
        a = (found if found is not None else torch.zeros_like(like)).double()
        b = (expected if expected is not None else torch.zeros_like(like)).double()
        scale = max(float(b.norm()), floor)
        difference = float((a - b).norm())
        errors[name] = difference / scale if scale else (0.0 if difference == 0 else math.inf)
    for name in planned.by_parameter.keys() - reference.by_parameter.keys():
        errors[name] = math.inf
    rerouted = sum(1 for key, experts in reference.experts.items() if planned.experts.get(key) != experts)
    return Verification(
        loss=planned.loss_sum / denominator,
        reference_loss=reference.loss_sum / denominator,
        norm=planned.norm / denominator,
        reference_norm=reference.norm / denominator,
        errors=errors,
        num_rerouted=rerouted,
        num_routed=len(reference.experts),
    )


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
