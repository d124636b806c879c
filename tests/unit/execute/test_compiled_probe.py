"""The probe of compiled blocks names what fails and what differs; what it passes is compared in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from nestsp.errors import ModelError
from nestsp.execute.compiled_probe import probe_compiled
from nestsp.execute.probe import Subject, make_subject
from nestsp.known_models import KNOWN_MODELS
from nestsp.model.adapter import model_config
from nestsp.model.compiled import check_compiler


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_subject(model_config(KNOWN_MODELS["llama-3.1-8b"]))


def put_in_place_of_the_compiler(monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, **options: partial(compiled, forward))


def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def run_wrongly(forward: Any, *args: Any, **kwargs: Any) -> Any:
    result = forward(*args, **kwargs)
    return result * (1 + 1e-7) if isinstance(result, torch.Tensor) else result


def fail(forward: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("Constraints violated (L['x'].size()[1])\nand what it says besides")


def test_code_that_gives_the_same_passes(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    put_in_place_of_the_compiler(monkeypatch, run)
    num_blocks, error = probe_compiled(subject)
    assert num_blocks == 4 * subject.shape.num_layers  # two norms, attention, a feed-forward block
    assert error == 0


def test_code_that_gives_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    put_in_place_of_the_compiler(monkeypatch, run_wrongly)
    with pytest.raises(
        ModelError,
        match=r"train\.compile is true, but the llama model gives other loss and gradients compiled than uncompiled "
        r"\(error \S+, but at most 1e-09 is rounding\); set train\.compile: false$",
    ):
        probe_compiled(subject)


def test_a_compiler_that_fails_on_the_model_is_named(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    put_in_place_of_the_compiler(monkeypatch, fail)
    with pytest.raises(
        ModelError,
        match=r"train\.compile is true, but torch\.compile fails on the llama model \(RuntimeError: Constraints "
        r"violated \(L\['x'\]\.size\(\)\[1\]\)\); set train\.compile: false$",
    ):
        probe_compiled(subject)


# PyTorch's compiler looks at a tensor of its own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_block_whose_code_depends_on_the_length_is_refused(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    """By the compiler itself: it would compile anew at each length."""
    num_tokens = sum(len(ids) for ids in subject.sequences.values())

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return hidden if x.shape[1] == num_tokens else hidden * 2

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=r"torch\.compile fails on the llama model \(\w*ConstraintViolation"):
        probe_compiled(subject)


def test_a_compiler_that_does_not_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        ModelError,
        match=r"train\.compile is true, but torch\.compile does not work on this cpu host \(No working C\+\+ compiler "
        r"found\); install a C\+\+ compiler, or set train\.compile: false$",
    ):
        check_compiler(torch.device("cpu"))
