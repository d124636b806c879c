"""The probe passes what is right and names what is not: each way to be wrong is put into a model and must be found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from nestsp.attention import hybrid
from nestsp.attention.kernels import CpuFlash, MathKernel
from nestsp.errors import ModelError
from nestsp.execute import probe
from nestsp.execute.executor import Executor
from nestsp.execute.float64 import all_float64
from nestsp.execute.probe import make_subject, probe_kind, probe_line, probe_model
from nestsp.known_models import KNOWN_MODELS
from nestsp.model import root
from nestsp.model.adapter import model_config

LLAMA, MISTRAL = KNOWN_MODELS["llama-3.1-8b"], {"model_type": "mistral"}
GEMMA2, GPT_OSS = KNOWN_MODELS["gemma-2-9b"], KNOWN_MODELS["gpt-oss-20b"]


LLAMA_SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPTJ = {
    "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip


def no_window(self: CpuFlash, window: int | None, softcap: float | None) -> Any:
    return MathKernel(None, softcap)


def no_softcap(self: CpuFlash, window: int | None, softcap: float | None) -> Any:
    return MathKernel(window, None)


def no_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse


def no_sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.zeros_like(sinks)


def head_alone(model: Any) -> Callable[[Tensor], Tensor]:
    head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    return head


def mixing(self: LlamaMLP, x: Tensor) -> Tensor:
    """A feed-forward block that looks at the token before."""
    result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.roll(1, 1)))
    return result


def dropping(self: LlamaMLP, x: Tensor) -> Tensor:
    """Dropout that no key of the config tells of."""
    hidden = torch.nn.functional.dropout(self.gate_proj(x), 0.1, self.training)
    result: Tensor = self.down_proj(self.act_fn(hidden) * self.up_proj(x))
    return result


_ROTARY = LlamaRotaryEmbedding.forward


def longest_local(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> Any:
    """Rotary positions that look at the longest one here, as dynamic scalings do."""
    return _ROTARY(self, x, position_ids.double() / (1 + position_ids.max()))


def counted_on(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> Any:
    """Positions counted on each rank, which only differences between ranks show: angles are relative."""
    return _ROTARY(self, x, torch.arange(x.shape[1])[None])


WRONG: dict[str, tuple[Any, Any, str, Any]] = {
    "E3 a window is lost": (MISTRAL, CpuFlash, "adapted", no_window),
    "a soft cap of scores is lost": (GEMMA2, CpuFlash, "adapted", no_softcap),
    "E6 sinks are lost": (GPT_OSS, hybrid, "merge_sinks", no_sinks),
    "E6 gradients of sinks are lost": (GPT_OSS, hybrid, "sink_gradients", no_sink_gradients),
    "a soft cap of logits is lost": (GEMMA2, root, "logit_function", head_alone),
    "tokens are mixed outside attention": (LLAMA, LlamaMLP, "forward", mixing),
    "dropout is hidden in a layer": (LLAMA, LlamaMLP, "forward", dropping),
    "positions look at the longest": (LLAMA, LlamaRotaryEmbedding, "forward", longest_local),
    "positions are counted on each rank": (LLAMA, LlamaRotaryEmbedding, "forward", counted_on),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, where, what, instead = WRONG[name]
    monkeypatch.setattr(where, what, instead)
    config = model_config(keys)
    with pytest.raises(
        ModelError, match=r"gives other (logits|loss and gradients) in a (local|hybrid) group"
    ) as caught:
        probe_model(config, ("local", "hybrid"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ulysses", "ring", "hybrid"])
def test_what_is_wrong_only_between_ranks_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that forgets where its part of a sequence begins."""
    subject = make_subject(model_config(LLAMA))
    right = Executor.load

    def shifted(self: Any, plan: Any, read: Any) -> Any:
        batch = right(self, plan, read)
        for microbatch in batch.microbatches if self.rank == 1 else ():
            microbatch.tokens.positions.copy_(torch.arange(len(microbatch.tokens.positions)))
        return batch

    probe_kind(subject, kind)
    monkeypatch.setattr(Executor, "load", shifted)
    with pytest.raises(ModelError, match=f"gives other logits in a {kind} group than each sequence alone"):
        probe_kind(subject, kind)


def test_a_model_that_cannot_be_made_small_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: Any) -> Any:
        raise ValueError("sizes\nclash")

    monkeypatch.setattr(probe, "shrink_config", fails)
    with pytest.raises(
        ModelError, match=r"the llama model cannot be made small for the probe \(ValueError: sizes clash"
    ):
        make_subject(model_config(LLAMA))


def test_the_line_before_training_tells_what_was_compared() -> None:
    line = probe_line(model_config(LLAMA))
    assert line.startswith("2 layers of the model made small, local and hybrid: logits, loss and gradients ")
    assert "local and ulysses" in probe_line(model_config(MISTRAL))


def test_the_given_model_is_not_touched() -> None:
    config = model_config(GPT_OSS)
    before = copy.deepcopy(config.to_dict())
    state = torch.get_rng_state()
    probe_model(config, ("local",))
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_in_float64_throughout_nobody_gets_float32() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with all_float64():
        for y in (x.float(), x.to(torch.float32), x.softmax(-1, dtype=torch.float32), torch.arange(3).float()):
            assert y.dtype == torch.float64
        x.float().square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
    assert x.float().dtype == torch.float32  # and outside, as ever


@pytest.mark.parametrize("keys", [LLAMA_SMALL, GPTJ], ids=["before the layers", "inside attention"])
def test_C15_rotary_phases_are_of_the_ranks_own_positions_wherever_the_model_computes_them(
    keys: dict[str, Any],
) -> None:
    """Packed sequences in groups of every kind against each sequence alone."""
    found = probe_model(model_config(keys))
    assert list(found.errors) == ["local", "ulysses", "ring", "hybrid"]
