"""The sizes of a family that is not listed come from the model itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nestsp.errors import ModelError
from nestsp.model import derive
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import attention_calls, model_shape

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LISTED: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True},
    {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    {"model_type": "gemma2", "head_dim": 12, "sliding_window": 7},
    {"model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
]


@pytest.mark.parametrize("keys", LISTED, ids=str)
def test_a_listed_family_would_get_the_same_sizes_from_its_model(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config({**SMALL, **keys})
    listed = model_shape(config)
    monkeypatch.setattr(derive, "FAMILIES", {})
    derived = model_shape(config)
    assert derived.num_parameters == listed.num_parameters
    assert derived.num_active_parameters == pytest.approx(listed.num_active_parameters, rel=0.02)
    for field in ("num_heads", "num_kv_heads", "head_dim", "window", "num_window_layers", "softcap", "sinks"):
        assert getattr(derived, field) == getattr(listed, field), field
    assert replace(derived, other_parameters=0).root_parameters == listed.root_parameters


UNLISTED: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"model_type": "cohere2", "head_dim": 12, "sliding_window": 5}, (6, 2, 12, 5, 3)),
    ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}, (6, 2, 8, 0, 0)),
    (
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "first_k_dense_replace": 1,
        },
        (6, 6, 20, 0, 0),
    ),
]


@pytest.mark.parametrize(("keys", "sizes"), UNLISTED, ids=lambda value: str(value)[:30])
def test_an_unlisted_family_is_counted(keys: dict[str, Any], sizes: tuple[int, ...]) -> None:
    config = model_config({**SMALL, **keys})
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shape = model_shape(config)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    found = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.window, shape.num_window_layers)
    assert found == sizes
    if "moe" in keys["model_type"] or "n_routed_experts" in keys:
        assert (shape.num_experts, shape.experts_per_token) == (4, 2)
        experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
        assert shape.num_parameters - shape.num_active_parameters == pytest.approx(experts / 2 + 67 * 48, rel=0.02)


def test_a_model_in_which_a_layer_asks_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(model_config({**SMALL, "model_type": "llama"}), seed=0)
    attention = model.model.layers[1].self_attn
    once = attention.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        once(*args, **kwargs)
        return once(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", twice)
    with pytest.raises(ModelError, match="LlamaForCausalLM has 3 layers, but 1 of them do not ask for attention, once"):
        attention_calls(model)


def test_E17_a_model_that_mixes_tokens_without_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="MambaForCausalLM has 3 layers, but 3 of them do not ask for attention"):
        model_shape(model_config({"model_type": "mamba", "num_hidden_layers": 3, "hidden_size": 48}))
    with pytest.raises(ModelError, match="the model has linear_attention, but nestsp runs full_attention and sliding"):
        model_config({"model_type": "qwen3_next", "num_hidden_layers": 4})
