"""What is accepted of published configs, and what is refused, by which sentence."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestsp.attention.kernels import CpuFlash
from nestsp.attention.streaming import AttentionContext
from nestsp.errors import ConfigError, ModelError
from nestsp.model.adapter import build_model, decoder_layers, model_config, nestsp_attention
from nestsp.model.derive import model_shape
from nestsp.schedule import Pass

# Written from memory of the published config.json files, older key names included.
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = {
    **LLAMA_3_1_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA_2_7B = {
    key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "attention_bias", "mlp_bias")
} | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
SMOLLM2_135M = {
    **LLAMA_2_7B,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
}
PUBLISHED = {
    "Llama 3.1 8B": LLAMA_3_1_8B,
    "Llama 3.2 1B": LLAMA_3_2_1B,
    "Llama 2 7B": LLAMA_2_7B,
    "SmolLM2 135M": SMOLLM2_135M,
    "Qwen3 8B": QWEN3_8B,
    "Qwen3 30B A3B": QWEN3_30B_A3B,
}
AS_PUBLISHED = copy.deepcopy(PUBLISHED)
BILLIONS = {
    "Llama 3.1 8B": 8.030261248,
    "Llama 3.2 1B": 1.235814400,
    "Llama 2 7B": 6.738415616,
    "SmolLM2 135M": 0.134515008,
    "Qwen3 8B": 8.190735360,
    "Qwen3 30B A3B": 30.532122624,
}
# Small enough to build.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 11,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accepted_and_counted_right(name: str) -> None:
    shape = model_shape(model_config(PUBLISHED[name]))
    assert shape.num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=1e-9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_is_read_from_its_file_or_folder_and_not_changed(name: str, tmp_path: Path) -> None:
    """Transformers writes into nested mappings that it is given."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    given = model_config(PUBLISHED[name]).to_dict()
    assert PUBLISHED[name] == AS_PUBLISHED[name]
    for source in (tmp_path, tmp_path / "config.json"):
        assert model_config(str(source)).to_dict() == given


def inverse_frequencies(keys: dict[str, Any]) -> Tensor:
    """Of a model built from the keys."""
    return dict(build_model(model_config(keys), seed=0).named_buffers())["model.rotary_emb.inv_freq"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rotary_positions_turn_as_the_config_says(name: str) -> None:
    """A top-level rope_theta and an older rope_scaling must not silently become the defaults."""
    keys = {**PUBLISHED[name], **SMALL}
    if keys["model_type"] == "qwen3_moe":
        keys |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    rotary = inverse_frequencies(keys)
    theta = float(keys.get("rope_theta", 10000.0))
    frequencies = torch.tensor([theta ** (-i / 8) for i in range(0, 8, 2)])
    scaling = keys["rope_scaling"]
    if scaling:  # Llama 3: long wavelengths are stretched, short ones stay, those between are blended
        original = scaling["original_max_position_embeddings"]
        blended = []
        for frequency in frequencies.tolist():
            turns = original * frequency / (2 * torch.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            blended.append(share * frequency + (1 - share) * frequency / scaling["factor"])
        frequencies = torch.tensor(blended)
    assert torch.allclose(rotary, frequencies, rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "inv_freq"),
    [
        ({"type": "linear", "factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025]),  # the oldest name of the key
        ({"rope_type": "linear", "factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025]),
        ({"rope_type": "default"}, [1.0, 0.1, 0.01, 0.001]),
    ],
)
def test_other_rotary_scalings_reach_the_model(scaling: dict[str, Any], inv_freq: list[float]) -> None:
    keys = {**LLAMA_3_1_8B, **SMALL, "rope_theta": 10000.0, "rope_scaling": scaling}
    rotary = inverse_frequencies(keys)
    assert torch.allclose(rotary, torch.tensor(inv_freq))
    keys = {**keys, "rope_parameters": {**scaling, "rope_theta": 10000.0}}
    del keys["rope_scaling"], keys["rope_theta"]
    again = inverse_frequencies(keys)
    assert torch.allclose(again, torch.tensor(inv_freq))


DENSE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "lama"},
        r"model_type is 'lama', but Transformers has no causal language model of that name; .*; did you mean 'llama'\?",
    ),
    ({"model_type": "vit"}, "model_type is 'vit', but Transformers has no causal language model of that name"),
    ({"model_type": None}, "model_type is None, but Transformers has no causal language model of that name"),
    ({"hidden_dropout": 0.2}, "hidden_dropout is 0.2, but nestsp runs none; set model.config.hidden_dropout: 0"),
    (
        {"attention_dropout": 0.1},
        "attention_dropout is 0.1, but nestsp runs none; set model.config.attention_dropout: 0",
    ),
    ({"num_hiden_layers": 3}, "model.config.num_hiden_layers is no key of a qwen3 config; did you mean"),
    ({"rope_teta": 3.0}, r"model.config.rope_teta is no key of a qwen3 config; did you mean 'rope_theta'\?"),
    ({"is_causal": False}, "is_causal is false, but nestsp runs causal attention"),
    ({"hidden_act": "silo"}, r"hidden_act is 'silo', but Transformers has no such function; did you mean 'silu'\?"),
    ({"hidden_size": "wide"}, "model.config is no qwen3 config that Transformers takes: .*hidden_size"),
    (
        {"layer_types": ["full_attention"] * 35 + ["chunked_attention"]},
        "the model has chunked_attention, but nestsp runs full_attention and sliding_attention; correct",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic', but it looks at the longest position that a rank holds",
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic', but it looks at the longest position that a rank holds, so results would depend on "
        "the plan; take default, linear, llama3, yarn",
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 64,
                "long_factor": [1.0] * 64,
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
            }
        },
        "rope_type is 'longrope', but it looks",
    ),
    (
        {"rope_scaling": {"rope_type": "lama3", "factor": 2.0}},
        r"rope_type is 'lama3', but nestsp runs default, linear, llama3, yarn; did you mean 'llama3'\?",
    ),
]
MOE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but results must not depend on the plan; set it to 0"),
    (
        {"output_router_logits": True},
        "output_router_logits is true, but nestsp takes the router's auxiliary loss over",
    ),
    ({"num_expert": 64}, r"model.config.num_expert is no key of a qwen3_moe config; did you mean"),
]


def refusals() -> list[Any]:
    cases = [(QWEN3_8B, *case) for case in DENSE_REFUSALS] + [(QWEN3_30B_A3B, *case) for case in MOE_REFUSALS]
    return [pytest.param(base, more, text, id=re.sub(r"\W+", " ", str(more))[:40]) for base, more, text in cases]


@pytest.mark.parametrize(("base", "more", "sentence"), refusals())
def test_what_would_be_wrong_is_refused_in_one_sentence(
    base: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    """From the config alone, so before there is a process group."""
    keys = {**base, **more}
    meant = {"num_hiden_layers": "num_hidden_layers", "num_expert": "num_experts", "rope_teta": "rope_theta"}
    for key in more:  # a misspelling takes the place of what was meant
        keys.pop(meant.get(key, ""), None)
    with pytest.raises(ModelError, match=sentence) as caught:
        model_config(keys)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_notes_that_transformers_leaves_in_a_config_are_no_misspellings() -> None:
    """As in the config that it saves of a model read from GGUF."""
    assert model_config({**QWEN3_8B, "_model_name_or_path": "somewhere"}).num_hidden_layers == 36


def test_windows_are_told_to_planning() -> None:
    """E3: which layers have one decides what a ring may run."""
    for more, window in (({}, 0), ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}, 512)):
        config = model_config({**QWEN3_8B, **more})
        assert model_shape(config).window == window
    assert model_shape(model_config({"model_type": "mistral"})).window == 4096
    assert model_shape(model_config({"model_type": "mistral", "sliding_window": None})).window == 0


def test_an_unused_window_is_none() -> None:
    for base in (QWEN3_8B, QWEN3_30B_A3B):
        assert model_config({**base, "sliding_window": 4096, "use_sliding_window": False}).sliding_window is None


def test_a_missing_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config.json there; correct the path"):
        model_config(str(tmp_path))


class Attention(torch.nn.Module):
    layer_idx = 0


def attend(**more: Any) -> tuple[Tensor, None]:
    context = AttentionContext({}, {which: () for which in Pass}, CpuFlash(), frozenset())
    query, key, value = (torch.zeros(1, n, 1, 8) for n in (4, 2, 2))
    arguments: dict[str, Any] = {"attention_mask": None, "scaling": 1.0, "nestsp": context} | more
    return nestsp_attention(Attention(), query, key, value, **arguments)


def test_attention_answers_in_transformers_layout() -> None:
    out, weights = attend(sliding_window=None, position_ids=torch.zeros(1, 1), use_cache=False)
    assert out.shape == (1, 1, 4, 8)
    assert weights is None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"nestsp": None}, r"Attention was called without nestsp's context, .*set_attn_implementation\('sdpa'\)"),
        ({"attention_mask": torch.zeros(2, 2)}, "attention got a mask, but sequences are told apart by the plan"),
        ({"dropout": 0.1}, "attention dropout is 0.1, but nestsp runs none; set attention_dropout = 0"),
        ({"soft_cap": 30.0}, "attention got soft_cap = 30.0, but nestsp does not know it"),
        (
            {"s_aux": torch.zeros(4, 3)},
            r"attention got s_aux = a tensor \[4, 3\], but nestsp knows one sink for each of 4 query heads",
        ),
        ({"cu_seq_lens_q": torch.zeros(2)}, r"attention got cu_seq_lens_q = a tensor \[2\], but"),
        ({"is_causal": False}, "attention got is_causal = False, but nestsp does not know it"),
        ({"anything": 0}, "attention got anything = 0, but nestsp does not know it"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_E3_E4_E6_attention_refuses_what_it_does_not_know(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        attend(**more)
    assert "\n" not in str(caught.value)


def test_D8_an_attention_module_that_is_not_causal_is_refused() -> None:
    context = AttentionContext({}, {which: () for which in Pass}, CpuFlash(), frozenset())
    module = Attention()
    module.is_causal = False  # type: ignore[assignment]
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ModelError, match="Attention is not causal, but nestsp runs causal attention; take a causal"):
        nestsp_attention(module, x, x, x, None, scaling=1.0, nestsp=context)


def test_a_batch_of_two_rows_is_refused() -> None:
    context = AttentionContext({}, {which: () for which in Pass}, CpuFlash(), frozenset())
    x = torch.zeros(2, 2, 1, 8)
    with pytest.raises(ModelError, match="attention got a batch of 2, but nestsp packs all tokens into one row"):
        nestsp_attention(Attention(), x, x, x, None, scaling=1.0, nestsp=context)


def test_weights_depend_on_the_seed_alone() -> None:
    config = model_config({**QWEN3_8B, **SMALL})
    torch.manual_seed(1)
    first = build_model(config, seed=5).state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = build_model(config, seed=5, attention="sdpa").state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    other = build_model(config, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == torch.float32 for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_model_without_layers_that_can_be_recomputed_is_refused() -> None:
    with pytest.raises(ModelError, match="the model is Linear, but it has no gradient-checkpointing layers"):
        decoder_layers(torch.nn.Linear(1, 1))
    assert len(decoder_layers(build_model(model_config({**QWEN3_8B, **SMALL, "num_hidden_layers": 3}), seed=0))) == 3
