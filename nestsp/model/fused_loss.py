"""Liger's kernel for head and likelihood in one, where it is installed: a slice's logits become their own gradient.

Of one slice there are then the logits and, in backward, one product of the same size, both in the model's dtype; ours
has two more in float32. Sums are taken in float32. In backward the slice's logits are computed again, as ours are.
Price: the host waits for the GPU once a slice, forward and backward. Plans count what ours needs.

Not run on a GPU here: under Triton's interpreter it is what PyTorch gives, in float32 and bfloat16. So it is compared
with plain operators on the device before it is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nestsp.errors import ConfigError
from nestsp.model.loss import IGNORED_TARGET, sliced_nll

__all__ = ["FusedLoss", "choose_loss", "prove_loss"]

_PACKAGE = "liger-kernel"
_LEAST = (0, 8, 5)  # earlier ones have no right gradients of single tokens' likelihoods
_MODULE, _FUNCTION = "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"

# Of the largest element, by dtype: some times what rounding leaves in sums over a hundred tokens.
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 5e-3}


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """The kernel, as the loss of a model calls it.

    Attributes:
        function: Its ``autograd.Function``, with the arguments of 0.8.5.
        name: With its version.
        softcap: Of the logits, or None.
    """

    function: Any
    name: str
    softcap: float | None = None

    def sliced_nll(self, head: nn.Module, hidden_TD: Tensor, targets_T: Tensor, slice_tokens: int) -> Tensor:
        """Negative log-likelihood of each token's target, float32 [T]; see `nestsp.model.loss.sliced_nll`."""
        slices = zip(hidden_TD.split(slice_tokens), targets_T.split(slice_tokens), strict=True)
        return torch.cat([self._nll(head, hidden, targets) for hidden, targets in slices])

    def _nll(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        weight = head.weight
        assert isinstance(weight, Tensor)
        result = self.function.apply(
            hidden,
            weight,
            targets,
            head.bias,
            None,  # no weights of classes
            IGNORED_TARGET,
            0.0,  # no z-loss
            0.0,  # no smoothing
            "none",
            self.softcap,
            False,
            None,  # gradients are added up in the weight's dtype, as autograd does between slices
            False,
            False,
            False,
            None,
            None,
            -(-weight.shape[0] // weight.shape[1]),  # the whole slice at one time
        )
        nll: Tensor = result[0]
        return nll


def choose_loss(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, named: str = "auto"
) -> FusedLoss | None:
    """The kernel of a run's loss; None for PyTorch's own operators.

    Args:
        model: Its head is looked at; it may lie on the meta device.
        device: Where tensors are.
        dtype: Of hidden states and head.
        named: ``train.loss_kernel``; ``auto`` is Liger's where it fits.

    Raises:
        ConfigError: The named kernel does not fit, or the kernel cannot be imported or computes something else.
    """
    if named == "torch":
        return None
    reason = _why_not(model, device, dtype)
    if reason is not None:
        if named == "auto":
            return None
        raise ConfigError(f"train.loss_kernel is '{named}', but {reason}; set it to auto or torch")
    try:
        function = getattr(importlib.import_module(_MODULE), _FUNCTION)
    except Exception as error:  # built for another Triton or torch, it may raise anything
        chose = " and chose liger" if named == "auto" else ""
        raise ConfigError(
            f"train.loss_kernel is '{named}'{chose}, but the package {_PACKAGE} cannot be imported "
            f"({type(error).__name__}: {' '.join(str(error).split())}); mend it, or set the kernel to torch"
        ) from error
    softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
    fused = FusedLoss(function, f"liger {importlib.metadata.version(_PACKAGE)}", softcap)
    prove_loss(fused, device, dtype, model.config.vocab_size)
    return fused


def _why_not(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"Liger's kernel runs on GPUs, and this run is on {device.type}"
    if dtype not in _TOLERANCE:
        return f"Liger's kernel adds up in float32, and this run computes in {str(dtype).removeprefix('torch.')}"
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear:
        return f"the model's head is a {type(head).__name__}, and Liger's kernel takes linear layers"
    for name in ("logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) is not None:
            return f"the model scales its logits ({name}), which Liger's kernel does not"
    found = _version()
    if found < _LEAST:
        version = ".".join(map(str, found)) or "missing"
        return f"the package {_PACKAGE} is {version}, and {'.'.join(map(str, _LEAST))} is needed (nestsp[liger])"
    return None


def _version() -> tuple[int, ...]:
    """The package's version; nothing if it is not installed."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def prove_loss(fused: FusedLoss, device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Compare a kernel with plain operators: likelihoods of some tokens, and gradients with a weight for each.

    Args:
        fused: The kernel.
        device: Where to run it.
        dtype: Of hidden states and head.
        vocab_size: Of the model.

    Raises:
        ConfigError: It fails, or computes something else.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(133, 64, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocab_size, (133,), generator=generator).to(device)
    targets[::5] = IGNORED_TARGET
    weights = torch.randn(133, generator=generator).to(device)
    head = nn.Linear(64, vocab_size, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab_size, 64, generator=generator) / 4)
    cap = fused.softcap

    def plain(part: Tensor) -> Tensor:
        logits: Tensor = head(part)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    try:
        found = fused.sliced_nll(head, hidden, targets, 50)
        ours = [found, *torch.autograd.grad((found * weights).sum(), [hidden, head.weight])]
    except Exception as error:
        raise ConfigError(
            f"train.loss_kernel chose {fused.name}, but that fails on this device ({type(error).__name__}: {error}); "
            "set it to torch"
        ) from error
    wanted = sliced_nll(plain, hidden, targets, 50)
    right = [wanted, *torch.autograd.grad((wanted * weights).sum(), [hidden, head.weight])]
    errors = []
    for a, b in zip(ours, right, strict=True):
        errors.append(float((a.detach().float() - b.detach().float()).abs().max() / b.detach().float().abs().max()))
    if not all(error <= _TOLERANCE[dtype] for error in errors):
        raise ConfigError(
            f"train.loss_kernel chose {fused.name}, but likelihoods and gradients differ from plain operators by "
            f"{', '.join(f'{error:.1e}' for error in errors)} of the largest number, and {_TOLERANCE[dtype]} may be "
            "rounding; set it to torch"
        )
