"""The small copy keeps what decides how layers run."""

from __future__ import annotations

from typing import Any

import pytest

from nestsp.known_models import KNOWN_MODELS
from nestsp.model.adapter import model_config
from nestsp.model.derive import model_shape
from nestsp.model.shrink import PROBE_VOCABULARY, shrink_config
from nestsp.shape import ModelShape

NAMES = [name for name, keys in KNOWN_MODELS.items() if keys["model_type"] != "gpt2"]


def small(keys: dict[str, Any]) -> ModelShape:
    return model_shape(shrink_config(model_config(keys)))


@pytest.mark.parametrize("name", NAMES)
def test_kinds_stay_and_sizes_go(name: str) -> None:
    full, copy = model_shape(model_config(KNOWN_MODELS[name])), small(dict(KNOWN_MODELS[name]))
    for field in ("family", "tied_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "head_norms", "width_norms"):
        assert getattr(copy, field) == getattr(full, field)
    assert (copy.sinks, copy.softcap) == (full.sinks, full.softcap)
    assert min(8, full.num_heads // full.num_kv_heads) == copy.num_heads // copy.num_kv_heads
    assert (copy.query_width == copy.hidden_size) == (full.query_width == full.hidden_size)
    assert (copy.window > 0, copy.num_window_layers > 0) == (full.window > 0, full.num_window_layers > 0)
    assert (copy.num_window_layers < copy.num_layers) == (full.num_window_layers < full.num_layers)
    assert (copy.num_moe_layers > 0) == (full.num_moe_layers > 0)
    assert copy.num_layers == 2
    assert copy.vocab_size == PROBE_VOCABULARY
    assert copy.num_parameters < 1_000_000
    assert copy.window <= 4


def test_the_config_that_is_given_stays_as_it_is() -> None:
    config = model_config(KNOWN_MODELS["gemma-2-9b"])
    before = config.to_dict()
    shrink_config(config)
    assert config.to_dict() == before


def test_layers_of_every_kind_are_there_in_their_order() -> None:
    kinds = ["full_attention"] * 5 + ["sliding_attention"] * 3 + ["full_attention"]
    keys = {"model_type": "gemma2", "num_hidden_layers": 9, "layer_types": kinds}
    assert shrink_config(model_config(keys)).layer_types == ["full_attention", "sliding_attention"]
    moe = {**KNOWN_MODELS["qwen3-30b-a3b"], "mlp_only_layers": [3, 7]}
    assert (small(moe).num_layers, small(moe).num_moe_layers) == (2, 1)
    sparse = {**KNOWN_MODELS["qwen3-30b-a3b"], "decoder_sparse_step": 4}
    assert (small(sparse).num_layers, small(sparse).num_moe_layers) == (2, 1)
