from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nestsp.errors import ConfigError, ModelError
from nestsp.shape import FAMILIES, ModelShape, head_shares, read_config_json

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MOE = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2}
ODD: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 20},
    {"model_type": "llama", "num_key_value_heads": None},
    {"model_type": "llama", "num_key_value_heads": 1, "num_hidden_layers": 1},
    {"model_type": "qwen3", "head_dim": 16},
    {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    MOE,
    {**MOE, "head_dim": 16, "attention_bias": True},
    {**MOE, "tie_word_embeddings": True, "num_experts_per_tok": 5},
    {**MOE, "mlp_only_layers": [0, 2]},
    {**MOE, "mlp_only_layers": [0, 1, 2]},
    {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5},
    {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]},
    {**MOE, "num_experts": 0},
    {"model_type": "mistral"},
    {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    {"model_type": "mixtral", "num_local_experts": 3},
    {"model_type": "mixtral", "num_local_experts": 5, "head_dim": 16, "num_experts_per_tok": 3},
    {"model_type": "gemma2"},
    {"model_type": "gemma2", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "gemma3_text", "head_dim": 16},
    GPT_OSS,
    {**GPT_OSS, "attention_bias": False, "head_dim": 16, "tie_word_embeddings": True},
    {"model_type": "phi3", "pad_token_id": 0},
    {"model_type": "phi3", "pad_token_id": 0, "num_key_value_heads": None, "tie_word_embeddings": True},
    {"model_type": "granite"},
    {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "cohere"},
    {"model_type": "cohere", "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "olmo2"},
    {"model_type": "olmo2", "attention_bias": True, "num_key_value_heads": None},
]


@pytest.mark.parametrize("keys", ODD, ids=str)
def test_parameters_are_counted_as_transformers_makes_them(keys: dict[str, Any]) -> None:
    config = AutoConfig.for_model(**{**SMALL, **keys})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    real = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_hf_config({**SMALL, **keys}).num_parameters == real
    assert ModelShape.from_hf_config(config.to_dict()).num_parameters == real


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_has_transformers_own_default(family: str) -> None:
    config = AutoConfig.for_model(family)
    full = config.to_dict()
    for key, default in FAMILIES[family].items():
        if default is not None:
            assert getattr(config, key) == default, key
    assert ModelShape.from_hf_config({"model_type": family}) == ModelShape.from_hf_config(full)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_config_gives_the_same_shape_as_the_keys_it_was_made_of(family: str, tmp_path: Path) -> None:
    """Transformers renames keys when it saves (num_experts becomes num_local_experts)."""
    keys = {**SMALL, **(MOE if family == "qwen3_moe" else {"model_type": family}), "head_dim": 16}
    AutoConfig.for_model(**keys).save_pretrained(tmp_path)
    assert ModelShape.from_hf_config(read_config_json(tmp_path)) == ModelShape.from_hf_config(keys)


WINDOWED: list[tuple[dict[str, Any], int]] = [
    ({"model_type": "mistral", "sliding_window": 8}, 3),
    ({"model_type": "mistral", "sliding_window": None}, 0),
    ({"model_type": "mixtral", "sliding_window": 8}, 3),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 2),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, 0),
    ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, 0),
    ({**MOE, "use_sliding_window": True, "sliding_window": 8}, 3),
]


@pytest.mark.parametrize(("keys", "layers"), WINDOWED, ids=str)
def test_layers_with_a_window_are_counted_before_and_after_transformers_filled_the_config_in(
    keys: dict[str, Any], layers: int
) -> None:
    full = AutoConfig.for_model(**{**SMALL, **keys}).to_dict()
    assert ModelShape.from_hf_config({**SMALL, **keys}).num_window_layers == layers
    assert ModelShape.from_hf_config(full).num_window_layers == layers


def test_flops_of_a_window_are_those_of_the_pairs_inside_it() -> None:
    shape = ModelShape.from_hf_config({**SMALL, **WINDOWED[3][0]})
    pairs = 1 * 20 * 21 // 2 + 2 * sum(min(query, 8) for query in range(1, 21))
    assert shape.attention_flops(20) == 2 * 2 * shape.query_width * pairs


WINDOWS: list[dict[str, Any]] = [
    {"model_type": "mistral"},
    {"model_type": "mixtral", "sliding_window": 3},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    {"model_type": "gemma2"},
    {"model_type": "gemma2", "layer_types": ["full_attention"] * 5},
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    {"model_type": "gpt_oss"},
    {"model_type": "gpt_oss", "sliding_window": 7, "layer_types": ["sliding_attention"] + ["full_attention"] * 4},
    {"model_type": "phi3"},
    {"model_type": "phi3", "sliding_window": 9},
    {"model_type": "llama"},
]


@pytest.mark.parametrize("keys", WINDOWS, ids=str)
def test_layers_with_a_window_are_those_that_transformers_makes(keys: dict[str, Any]) -> None:
    """E3, E4: read from each attention module, which decides; what a config leaves out included."""
    keys = {**SMALL, "num_hidden_layers": 5, "pad_token_id": 0, "num_local_experts": 8, **keys}
    config = AutoConfig.for_model(**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    windows = []
    for layer in model.model.layers:
        window = getattr(layer.self_attn, "sliding_window", None)
        if keys["model_type"] in ("mistral", "mixtral", "phi3"):  # these read the config in their forward pass
            window = config.sliding_window
        windows.append(window)
    used = [window for window in windows if window is not None]
    for shape in (ModelShape.from_hf_config(keys), ModelShape.from_hf_config(config.to_dict())):
        assert (shape.window, shape.num_window_layers) == (max(used, default=0), len(used))


def test_active_parameters_are_those_that_multiply_one_token() -> None:
    dense = ModelShape.from_hf_config({**SMALL, "model_type": "llama"})
    tied = ModelShape.from_hf_config({**SMALL, "model_type": "llama", "tie_word_embeddings": True})
    moe = ModelShape.from_hf_config({**SMALL, **MOE})
    assert dense.num_active_parameters == dense.num_parameters - 259 * 48
    assert tied.num_active_parameters == tied.num_parameters == dense.num_active_parameters
    assert moe.num_parameters - moe.num_active_parameters == 259 * 48 + 3 * 3 * (3 * 48 * 24)
    assert dense.linear_flops_per_token == 2 * dense.num_active_parameters


def test_attention_is_counted_over_the_half_square_that_is_needed() -> None:
    shape = ModelShape.from_hf_config({**SMALL, "model_type": "llama"})
    pairs = sum(query + 1 for query in range(17))
    assert shape.attention_flops(17) == 3 * 6 * pairs * (2 * 2 * 8)  # layers, heads, pairs, 2 products of head_dim


@pytest.mark.parametrize("family", [None, 3, "bert", "lama", "qwen3-moe"])
def test_another_family_is_refused_by_name(family: Any) -> None:
    """E17: what nestsp cannot run exactly it refuses at startup."""
    with pytest.raises(ModelError) as refused:
        ModelShape.from_hf_config({**SMALL, "model_type": family})
    assert f"model_type is {family!r}, but nestsp runs llama, qwen3, qwen3_moe" in str(refused.value)
    assert ("did you mean 'llama'?" in str(refused.value)) == (family == "lama")


def test_a_config_without_a_family_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type is None"):
        ModelShape.from_hf_config(SMALL)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": "48"},
        {"hidden_size": None},
        {"hidden_size": 0},
        {"hidden_size": 4},  # less than one element a head
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_attention_heads": True},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 2.0},
        {"head_dim": -8},
        {"head_dim": "8"},
        {"intermediate_size": None},
        {"vocab_size": -1},
        {"tie_word_embeddings": "false"},
        {"attention_bias": 1},
        {"num_experts": -1},
        {"num_experts": None},
        {"num_local_experts": "5"},
        {"num_experts_per_tok": 6},
        {"num_experts_per_tok": 0},
        {"moe_intermediate_size": None},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": 3},
        {"mlp_only_layers": ["0"]},
    ],
    ids=str,
)
def test_an_impossible_size_is_one_sentence(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^the model"):
        ModelShape.from_hf_config({**SMALL, **MOE, **keys})


def test_heads_that_ranks_do_not_divide_are_dealt_and_kv_heads_are_replicated() -> None:
    """D9, D11."""
    assert [list(s.query) for s in head_shares(4, 1, 4)] == [[0], [1], [2], [3]]
    assert [list(s.kv) for s in head_shares(4, 1, 4)] == [[0]] * 4
    assert [len(s.query) for s in head_shares(28, 4, 8)] == [3, 4, 3, 4, 3, 4, 3, 4]
    assert [list(s.query) for s in head_shares(2, 2, 5)] == [[], [], [0], [], [1]]
    assert [list(s.kv) for s in head_shares(2, 2, 5)] == [[], [], [0], [], [1]]


def test_a_config_is_read_by_its_path_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert read_config_json(tmp_path) == read_config_json(tmp_path / "config.json") == SMALL


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "but there is no config.json there; correct the path"),
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[1]", "is a JSON list, but it must be an object"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_refused(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read_config_json(tmp_path)
