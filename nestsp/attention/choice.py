"""Which attention kernel a run uses: chosen once, by the user's name for it or by what is there.

A kernel that is neither PyTorch's nor ours is compared with plain operators before it is used, on the run's own device,
dtype, head size, window and soft cap, forward and backward: its functions may have changed since this was written, and
another build of it may be wrong for one head size. Price: some milliseconds once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nestsp.attention.flash_attn import FlashAttn2, FlashAttn3
from nestsp.attention.kernels import CpuFlash, CudaFlash, MathKernel
from nestsp.attention.local import Kernel, Mask, Segments
from nestsp.attention.merge import merge_into, wide
from nestsp.errors import ConfigError

__all__ = ["choose_kernel", "prove_kernel"]

# Of the largest element: three times what bfloat16 rounds away in sums over some hundred keys.
_TOLERANCE = 0.05
_LENGTHS, _OTHER_LENGTHS = (130, 1, 67), (33, 70, 5)
_HOPPER = 9  # compute capability, its first number


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    named: str = "auto",
) -> Kernel:
    """The kernel of a run.

    Args:
        device: Where tensors are.
        dtype: Of queries, keys and values.
        head_dim: Size of a head.
        window: Of the layers that have one.
        softcap: Of scores, where layers cap them.
        named: ``train.attention_kernel``. ``auto`` is the fastest that is right for all of this, among what is
            installed; nothing is fetched unless it is named.

    Raises:
        ConfigError: The named kernel is not there or does not fit, or a kernel cannot be imported or computes something
            else than attention.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    fits_flash = device.type == "cuda" and is_half and head_dim % 8 == 0 and head_dim <= 256
    kernel: Kernel | None = None
    if named not in ("auto", "torch"):
        if not fits_flash:
            raise ConfigError(
                f"train.attention_kernel is '{named}', but it runs on GPUs, in bfloat16, with head sizes that are "
                f"multiples of 8 up to 256, and this run has {device.type}, {str(dtype).removeprefix('torch.')}, "
                f"{head_dim}; set it to auto"
            )
        kernel = _load(named, named)
    elif named == "auto" and fits_flash:
        kernel = _installed(device, softcap)
    if kernel is not None:
        prove_kernel(kernel, device, dtype, head_dim, window, softcap)
        return kernel
    if device.type == "cpu":
        return MathKernel() if softcap else CpuFlash()
    return CudaFlash() if fits_flash and not softcap else MathKernel()


def _installed(device: torch.device, softcap: float | None) -> Kernel | None:
    """A package's kernel that does better than PyTorch's own: on Hopper GPUs, and under soft caps."""
    if _version("flash_attn_3") and torch.cuda.get_device_capability(device)[0] == _HOPPER:
        return _load("flash-attn-3", "auto")
    if softcap and _version("flash_attn") >= (2, 7):
        return _load("flash-attn-2", "auto")
    return None


def _load(chosen: str, named: str) -> Kernel:
    """A kernel by its name; the user named it, or ``auto``."""
    if "/" in chosen:
        return _load_from_hub(chosen)
    package, module, least = {
        "flash-attn-2": ("flash_attn", "flash_attn.flash_attn_interface", (2, 7)),
        "flash-attn-3": ("flash_attn_3", "flash_attn_interface", (3,)),
    }[chosen]
    is_auto = named == "auto"
    subject = f"train.attention_kernel is '{named}'" + (f" and chose {chosen}" if is_auto else "")
    found = _version(package)
    if not least <= found < (least[0] + 1,):
        version = ".".join(map(str, found)) or "missing"
        raise ConfigError(
            f"{subject}, but the package {package} is {version}, and {'.'.join(map(str, least))} or a later {least[0]} "
            f"is needed; install it, or set the kernel to {'torch' if is_auto else 'auto'}"
        )
    try:
        functions = importlib.import_module(module)
    except Exception as error:  # built for another torch or CUDA, it may raise anything
        raise ConfigError(
            f"{subject}, but the package {package} cannot be imported ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); mend it, or set the kernel to torch"
        ) from error
    of_two = chosen == "flash-attn-2"
    return FlashAttn2(functions, "flash-attn 2") if of_two else FlashAttn3(functions, "flash-attn 3")


def _load_from_hub(named: str) -> Kernel:
    """A kernel of the Hugging Face Hub, by Transformers' loader, which takes it from the cache if it is there.

    It refuses repositories of publishers that the package kernels does not trust.
    """
    from transformers.integrations.hub_kernels import load_and_register_attn_kernel

    try:
        module = load_and_register_attn_kernel(named)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"train.attention_kernel is '{named}', but Transformers cannot load it ({error}); set it to auto"
        ) from error
    functions = getattr(module, "flash_attn_interface", module)
    if hasattr(functions, "_flash_attn_varlen_backward"):
        return FlashAttn2(functions, named)
    if hasattr(functions, "_flash_attn_backward"):
        return FlashAttn3(functions, named)
    raise ConfigError(
        f"train.attention_kernel is '{named}', but that has no backward pass in the form of flash-attn 2 or 3; set it "
        "to kernels-community/flash-attn2, kernels-community/flash-attn3 or auto"
    )


def _version(package: str) -> tuple[int, ...]:
    """The first two numbers of a package's version; none if it is not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def prove_kernel(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Compare a kernel with plain operators: all that attention asks of it, on a few sequences.

    Args:
        kernel: The kernel.
        device: Where to run it.
        dtype: Of queries, keys and values.
        head_dim: Size of a head.
        window: Of the layers that have one.
        softcap: Of scores, where layers cap them.

    Raises:
        ConfigError: It fails, or computes something else.
    """
    try:
        errors = []
        for each in {None, window}:
            tried, wanted = kernel.adapted(each, softcap), MathKernel(each, softcap)
            found = list(_exercise(tried, device, dtype, head_dim, each, tried))
            for ours, right in zip(found, _exercise(wanted, device, dtype, head_dim, each, tried), strict=True):
                errors.append(float((wide(ours) - wide(right)).abs().max() / wide(right).abs().max()))
    except Exception as error:
        raise ConfigError(
            f"train.attention_kernel chose {kernel.name}, but that fails on this device with heads of {head_dim} "
            f"({type(error).__name__}: {error}); set it to torch"
        ) from error
    worst = max(errors, key=_nan_last)
    if not worst <= _TOLERANCE:
        raise ConfigError(
            f"train.attention_kernel chose {kernel.name}, but with heads of {head_dim} it differs from plain operators "
            f"by {worst:.1e} of the largest number, and {_TOLERANCE} may be rounding; set it to torch"
        )


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def _exercise(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, merged: Kernel
) -> Iterator[Tensor]:
    """What a kernel gives for sequences on themselves; and, as in a ring, for the same queries on other keys as well.

    Backward starts from the output and log-sum-exp of one and the same kernel, over all keys. All rows have a stride,
    as those have that were exchanged (`nestsp.attention.ulysses`).
    """
    generator = torch.Generator().manual_seed(0)
    own, other = Segments.of(_LENGTHS, device), Segments.of(_OTHER_LENGTHS, device)
    masks = [Mask.causal(own)] + ([] if window else [Mask.full(own, other)])

    def draw(num_tokens: int, num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)

    scale, num_queries = head_dim**-0.5, sum(_LENGTHS)
    q, dout = draw(num_queries, 8).split(4, 1)
    keys = [draw(sum(mask.keys.lengths), 4).split(2, 1) for mask in masks]
    for mask, (k, v) in zip(masks, keys, strict=True):
        yield from kernel.forward(q, k, v, mask, scale)
    out, lse = merged.forward(q, keys[0][0], keys[0][1], masks[0], scale)
    total = wide(out).clone()
    for mask, (k, v) in zip(masks[1:], keys[1:], strict=True):
        merge_into(total, lse, slice(0, num_queries), *merged.forward(q, k, v, mask, scale))
    out, _ = torch.cat((total.to(dtype), dout), 1).split(4, 1)
    for mask, (k, v) in zip(masks, keys, strict=True):
        yield from kernel.backward(dout, q, k, v, out, lse, mask, scale)
