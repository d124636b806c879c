"""Which kernel a run gets, and that a foreign one is compared with plain operators first."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nestsp.attention.choice import choose_kernel, prove_kernel
from nestsp.attention.flash_attn import FlashAttn2, FlashAttn3
from nestsp.attention.kernels import CpuFlash, CudaFlash, MathKernel
from nestsp.attention.local import Kernel, Mask
from nestsp.errors import ConfigError
from tests.unit.attention.test_flash_attn import functions_of_2, functions_of_3

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is no GPU here to prove a kernel on: the names of those that would be proven."""
    proven: list[str] = []
    monkeypatch.setattr("nestsp.attention.choice.prove_kernel", lambda kernel, *rest: proven.append(kernel.name))
    return proven


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs packages by name and version, on a GPU of some capability, and nothing else."""

    importlib.import_module("transformers.integrations.hub_kernels")  # it looks at the packages that are really there
    real = importlib.metadata.version

    def made(capability: tuple[int, int] = (8, 0), **versions: str) -> None:
        def version(name: str) -> str:
            return versions[name] if name in versions else real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", functions_of_2())
        monkeypatch.setitem(sys.modules, "flash_attn_interface", functions_of_3())

    return made


def test_without_packages_pytorchs_own_kernels_run(install: Callable[..., None], unproven: list[str]) -> None:
    install()
    for named in ("auto", "torch"):
        assert isinstance(choose_kernel(CPU, torch.float32, 5, named=named), CpuFlash)
        assert isinstance(choose_kernel(CPU, torch.float32, 64, softcap=30.0, named=named), MathKernel)
        assert isinstance(choose_kernel(GPU, BF16, 128, named=named), CudaFlash)
        assert isinstance(choose_kernel(GPU, BF16, 128, softcap=30.0, named=named), MathKernel)
        for dtype, size in ((torch.float32, 128), (torch.float64, 64), (BF16, 36), (BF16, 264)):
            assert isinstance(choose_kernel(GPU, dtype, size, named=named), MathKernel)
    assert not unproven


@pytest.mark.parametrize(
    ("version", "known"), [("2.6.3", False), ("2.7.4.post1", True), ("2.8.3", True), ("10.0", False)]
)
def test_flash_attn_2_is_chosen_for_soft_caps_where_a_known_version_is_installed(
    version: str, known: bool, install: Callable[..., None], unproven: list[str]
) -> None:
    install(flash_attn=version)
    if version == "10.0":  # installed, and nobody here knows it: said, not passed over
        with pytest.raises(ConfigError, match=r"the package flash_attn is 10\.0, and 2\.7 or a later 2 is needed"):
            choose_kernel(GPU, BF16, 128, named="flash-attn-2")
        return
    capped = choose_kernel(GPU, BF16, 128, softcap=30.0)
    assert isinstance(capped, FlashAttn2 if known else MathKernel)
    assert unproven == (["flash-attn 2"] if known else [])
    assert isinstance(choose_kernel(GPU, BF16, 128), CudaFlash)
    assert isinstance(choose_kernel(GPU, BF16, 128, softcap=30.0, named="torch"), MathKernel)


def test_flash_attn_3_is_chosen_on_hopper_alone(install: Callable[..., None], unproven: list[str]) -> None:
    install((9, 0), flash_attn_3="3.0.0", flash_attn="2.8.3")
    for softcap in (None, 30.0):
        assert isinstance(choose_kernel(GPU, BF16, 128, softcap=softcap), FlashAttn3)
    assert isinstance(choose_kernel(GPU, torch.float32, 128), MathKernel)
    install((8, 0), flash_attn_3="3.0.0", flash_attn="2.8.3")
    assert isinstance(choose_kernel(GPU, BF16, 128), CudaFlash)
    assert isinstance(choose_kernel(GPU, BF16, 128, softcap=30.0), FlashAttn2)
    assert unproven == ["flash-attn 3", "flash-attn 3", "flash-attn 2"]


def test_a_named_kernel_is_taken_or_refused(install: Callable[..., None], unproven: list[str]) -> None:
    install(flash_attn="2.8.3")
    assert isinstance(choose_kernel(GPU, BF16, 128, named="flash-attn-2"), FlashAttn2)
    with pytest.raises(ConfigError, match="the package flash_attn_3 is missing, and 3 or a later 3 is needed"):
        choose_kernel(GPU, BF16, 128, named="flash-attn-3")
    with pytest.raises(ConfigError, match=r"is 'flash-attn-2', but it runs on GPUs, in bfloat16.* cpu, float32, 64;"):
        choose_kernel(CPU, torch.float32, 64, named="flash-attn-2")
    with pytest.raises(ConfigError, match=r"and this run has cuda, bfloat16, 36; set it to auto"):
        choose_kernel(GPU, BF16, 36, named="kernels-community/flash-attn2")
    assert unproven == ["flash-attn 2"]


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
@pytest.mark.parametrize(
    ("kernel", "package"), [("flash-attn-2", "flash_attn"), ("flash-attn-3", "flash_attn_3")], ids=["2", "3"]
)
def test_a_package_that_cannot_be_imported_is_one_sentence_whoever_chose_it(
    error: type[Exception],
    kernel: str,
    package: str,
    install: Callable[..., None],
    unproven: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install((9, 0), **{package: "2.8.3" if kernel == "flash-attn-2" else "3.0.0"})

    def broken(name: str) -> ModuleType:
        raise error(f"{name}:\n  undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    for named, subject in ((kernel, f"'{kernel}'"), ("auto", f"'auto' and chose {kernel}")):
        with pytest.raises(ConfigError) as caught:
            choose_kernel(GPU, BF16, 128, softcap=30.0, named=named)
        said = str(caught.value)
        assert said.startswith(f"train.attention_kernel is {subject}, but the package {package} cannot be imported (")
        assert f"({error.__name__}: flash_attn" in said
        assert said.endswith("_interface: undefined symbol); mend it, or set the kernel to torch")
    assert isinstance(choose_kernel(GPU, BF16, 128, named="torch"), CudaFlash)
    assert not unproven


def test_an_unknown_version_that_auto_meets_is_not_said_to_be_the_users(install: Callable[..., None]) -> None:
    install(flash_attn="10.0")
    said = r"^train\.attention_kernel is 'auto' and chose flash-attn-2, but .* 10\.0, .*; install it, or .* to torch$"
    with pytest.raises(ConfigError, match=said):
        choose_kernel(GPU, BF16, 128, softcap=30.0)


class TestFromTheHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> dict[str, Any]:
        """What Transformers' loader finds."""
        install()
        there: dict[str, Any] = {}

        def load(name: str) -> Any:
            if isinstance(there[name], Exception):
                raise there[name]
            return there[name]

        monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", load)
        return there

    def test_its_functions_say_which_it_is(self, hub: dict[str, Any], unproven: list[str]) -> None:
        package: Any = ModuleType("flash_attn2")
        package.flash_attn_interface = functions_of_2()
        hub["kernels-community/flash-attn2"] = package
        hub["kernels-community/flash-attn3@v1"] = functions_of_3()
        for name, kind in zip(hub, (FlashAttn2, FlashAttn3), strict=True):
            kernel = choose_kernel(GPU, BF16, 128, named=name)
            assert isinstance(kernel, kind)
            assert kernel.name == name  # for the banner
        assert unproven == list(hub)

    def test_what_cannot_train_or_be_loaded_is_refused_by_name(self, hub: dict[str, Any], unproven: list[str]) -> None:
        hub["some/forward-only"] = ModuleType("forward_only")
        with pytest.raises(ConfigError, match="is 'some/forward-only', but that has no backward pass in the form"):
            choose_kernel(GPU, BF16, 128, named="some/forward-only")
        hub["some/kernel"] = ImportError("kernels is not installed")
        with pytest.raises(ConfigError, match=r"Transformers cannot load it \(kernels is not installed\); set it to"):
            choose_kernel(GPU, BF16, 128, named="some/kernel")
        assert not unproven

    def test_transformers_loader_says_what_is_missing_without_the_package(self) -> None:
        """The real one, where `kernels` is not installed."""
        if importlib.metadata.packages_distributions().get("kernels"):
            pytest.skip("kernels is installed here, and would ask the network")
        with pytest.raises(ConfigError, match=r"Transformers cannot load it \(`kernels` is either not installed"):
            choose_kernel(GPU, BF16, 128, named="kernels-community/flash-attn2")


class Wrong:
    """A kernel that is wrong in one way."""

    name = "wrong"

    def __init__(self, fault: str, window: int | None = None, softcap: float | None = None) -> None:
        self.fault, self.kind = fault, (window, softcap)

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        kept_window, kept_cap = self.fault != "window", self.fault != "cap"
        return Wrong(self.fault, window if kept_window else None, softcap if kept_cap else None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        if self.fault == "raises":
            raise TypeError("unexpected keyword argument")
        out, lse = MathKernel(*self.kind).forward(q, k, v, mask, scale)
        if self.fault == "log-sum-exp":
            lse = lse * 1.4427  # in base 2
        return (torch.full_like(out, float("nan")) if self.fault == "nan" else out), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        kernel = MathKernel(*self.kind)
        if self.fault == "own log-sum-exp":
            out, lse = kernel.forward(q, k, v, *rest)  # of this block, where all blocks' is wanted
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, *rest)
        return dq, (dv if self.fault == "swapped" else dk), dv


@pytest.mark.parametrize("kernel", [MathKernel(), CpuFlash()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_right_kernels_are_proven(kernel: Kernel, dtype: torch.dtype) -> None:
    for size in (8, 64, 256):
        prove_kernel(kernel, CPU, dtype, size, window=40)
        prove_kernel(kernel, CPU, dtype, size, softcap=2.0)


@pytest.mark.parametrize("fault", ["log-sum-exp", "nan", "own log-sum-exp", "swapped", "window", "cap", "raises"])
def test_wrong_kernels_are_refused(fault: str) -> None:
    with pytest.raises(ConfigError, match=r"^train\.attention_kernel chose wrong, but .*; set it to torch$"):
        prove_kernel(Wrong(fault), CPU, BF16, 64, window=40, softcap=0.5)
