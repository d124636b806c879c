"""Liger's kernel for the loss: when it is taken, how it is called, and that it is proven before it is used.

It needs a GPU. A stand-in of the same signature shows the call; where the package is installed, Triton's interpreter
runs the kernel itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestsp.errors import ConfigError
from nestsp.model import fused_loss
from nestsp.model.adapter import build_model, model_config
from nestsp.model.fused_loss import FusedLoss, choose_loss, prove_loss
from nestsp.model.loss import IGNORED_TARGET, sliced_nll
from tests.distributed.equivalence import COHERE, GEMMA2, GRANITE, LLAMA, small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ARGUMENTS = (
    *("ctx", "_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale"),
    *("label_smoothing", "reduction", "softcap", "return_z_loss", "accum_dtype", "use_token_scaling"),
    *("return_token_accuracy", "return_predicted_tokens", "ce_impl", "ce_mode", "chunk_mem_const"),
)
# Triton reads the variable when it is imported, so the kernel has a process of its own.
INTERPRETED = """
import inspect
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
from nestsp.model.fused_loss import FusedLoss, prove_loss
for dtype in (torch.float32, torch.bfloat16):
    prove_loss(FusedLoss(function, "liger"), torch.device("cpu"), dtype, 60)
print(*inspect.signature(function.forward).parameters)
"""


class StandIn(torch.autograd.Function):
    """What Liger's function does for single tokens' likelihoods: the gradient's logits are computed in backward."""

    wrong = 1.0

    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, None, None, None]:
        assert (reduction, ignore_index, ce_weight, ce_impl, ce_mode) == ("none", IGNORED_TARGET, None, None, None)
        assert not any((lse_square_scale, label_smoothing, return_z_loss, use_token_scaling, return_token_accuracy))
        assert chunk_mem_const * weight.shape[1] >= weight.shape[0], "several chunks: the sum would be rounded between"
        ctx.save_for_backward(_input, weight, target, bias)
        ctx.softcap = softcap
        return _nll(_input, weight, target, bias, softcap), None, None, None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved: list[Any] = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
        hidden, weight, target, bias = saved
        wanted = [hidden, weight] + ([] if bias is None else [bias])
        with torch.enable_grad():
            for tensor in wanted:
                tensor.requires_grad_()
            nll = _nll(hidden, weight, target, bias, ctx.softcap)
            found = torch.autograd.grad((nll * grads[0]).sum() * StandIn.wrong, wanted)
        return found[0], found[1], None, (found[2] if bias is not None else None), *[None] * 14


def _nll(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, target, ignore_index=IGNORED_TARGET, reduction="none")


def model_of(keys: dict[str, Any]) -> Any:
    return build_model(model_config(small_config(keys)), seed=0)


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """The stand-in in the package's place, and this CPU in a GPU's."""

    def of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    metadata = SimpleNamespace(version=of, PackageNotFoundError=importlib.metadata.PackageNotFoundError)
    module = SimpleNamespace(LigerFusedLinearCrossEntropyFunction=StandIn)
    found = SimpleNamespace(metadata=metadata, import_module=lambda name: module)
    monkeypatch.setattr(fused_loss, "importlib", found)
    monkeypatch.setattr(fused_loss, "prove_loss", lambda fused, device, *rest: prove_loss(fused, CPU, *rest))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.8.5")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("keys", "softcap"), [(LLAMA, None), (GEMMA2, 3.0)], ids=["llama", "gemma2"])
@pytest.mark.parametrize("named", ["auto", "liger"])
def test_it_is_taken_on_a_gpu_where_it_is_installed(keys: dict[str, Any], softcap: float | None, named: str) -> None:
    fused = choose_loss(model_of(keys), GPU, torch.bfloat16, named)
    assert fused == FusedLoss(StandIn, "liger 0.8.5", softcap)


@pytest.mark.usefixtures("installed")
def test_torch_named_is_torch_though_it_is_installed() -> None:
    assert choose_loss(model_of(LLAMA), GPU, torch.bfloat16, "torch") is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("keys", "device", "dtype", "version", "said"),
    [
        (LLAMA, CPU, torch.bfloat16, "0.8.5", "Liger's kernel runs on GPUs, and this run is on cpu"),
        (LLAMA, GPU, torch.float64, "0.8.5", "Liger's kernel adds up in float32, and this run computes in float64"),
        (COHERE, GPU, torch.bfloat16, "0.8.5", "the model scales its logits (logit_scale), which Liger's kernel does"),
        (GRANITE, GPU, torch.bfloat16, "0.8.5", "the model scales its logits (logits_scaling), which Liger's kernel"),
        (LLAMA, GPU, torch.bfloat16, "0.8.4", "the package liger-kernel is 0.8.4, and 0.8.5 is needed (nestsp[liger])"),
        (LLAMA, GPU, torch.bfloat16, None, "the package liger-kernel is missing, and 0.8.5 is needed (nestsp[liger])"),
    ],
    ids=["cpu", "float64", "cohere", "granite", "old", "missing"],
)
def test_what_it_does_not_fit_is_pytorchs_own_or_refused_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    version: str | None,
    said: str,
) -> None:
    install(monkeypatch, version)
    model = model_of(keys)
    assert choose_loss(model, device, dtype) is None
    with pytest.raises(
        ConfigError, match=r"^train\.loss_kernel is 'liger', but .*; set it to auto or torch$"
    ) as caught:
        choose_loss(model, device, dtype, "liger")
    assert said in str(caught.value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("named", "subject"), [("liger", "'liger'"), ("auto", "'auto' and chose liger")])
@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, None])
def test_a_package_that_cannot_be_imported_is_one_sentence_whoever_chose_it(
    monkeypatch: pytest.MonkeyPatch, named: str, subject: str, error: type[Exception] | None
) -> None:
    def broken(name: str) -> SimpleNamespace:
        if error is None:
            return SimpleNamespace()  # without the function
        raise error("libtriton:\n  undefined symbol")

    monkeypatch.setattr("nestsp.model.fused_loss.importlib.import_module", broken)
    model = model_of(LLAMA)
    with pytest.raises(ConfigError) as caught:
        choose_loss(model, GPU, torch.bfloat16, named)
    said = str(caught.value)
    assert said.startswith(f"train.loss_kernel is {subject}, but the package liger-kernel cannot be imported (")
    reason = "(AttributeError: " if error is None else f"({error.__name__}: libtriton: undefined symbol); "
    assert reason in said
    assert said.endswith("); mend it, or set the kernel to torch")
    assert choose_loss(model, GPU, torch.bfloat16, "torch") is None


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_kernel_that_is_wrong_or_fails_is_refused_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    prove_loss(FusedLoss(StandIn, "liger 0.8.5", softcap), CPU, torch.float32, 997)
    monkeypatch.setattr(StandIn, "wrong", 1.2)  # gradients alone
    with pytest.raises(ConfigError, match=r"chose liger 0\.8\.5, but likelihoods and gradients differ from plain oper"):
        prove_loss(FusedLoss(StandIn, "liger 0.8.5", softcap), CPU, torch.float32, 997)
    other = SimpleNamespace(apply=lambda *arguments: 1 / 0)
    with pytest.raises(
        ConfigError, match=r"but that fails on this device \(ZeroDivisionError: division by zero\); set"
    ):
        prove_loss(FusedLoss(other, "liger 0.8.5"), CPU, torch.float32, 997)


@pytest.mark.parametrize("bias", [False, True])
def test_slices_have_the_likelihoods_and_gradients_of_the_plain_loss(bias: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias).double()
    hidden = torch.randn(13, 6).double().requires_grad_()
    targets = torch.randint(0, 11, (13,))
    targets[[0, 5, 12]] = IGNORED_TARGET
    weights = torch.randn(13).double()
    found = FusedLoss(StandIn, "liger").sliced_nll(head, hidden, targets, 5)
    wanted = sliced_nll(head, hidden, targets, 5)
    assert torch.allclose(found, wanted, rtol=1e-13)
    inputs = [hidden, *head.parameters()]
    for ours, right in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(ours, right, rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="Liger is an extra for GPUs: nestsp[liger]")
def test_the_packages_own_kernel_is_called_as_it_asks_and_gives_what_pytorch_gives() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(ARGUMENTS)


def test_the_stand_in_has_the_packages_signature() -> None:
    assert list(inspect.signature(StandIn.forward).parameters) == list(ARGUMENTS)
