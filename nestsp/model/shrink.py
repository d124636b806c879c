"""A config of the same model, made small: what decides how its layers run stays, sizes go.

Kept: the model's class, every kind of layer, the ratio of query to key/value heads, whether heads together are as wide
as the residual stream, scalings, caps, sinks, biases, normalisations, rotary positions. Shrunk: layers, hidden and
feed-forward sizes, heads, vocabulary, experts, and windows, so that they hide something from a dozen tokens.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

__all__ = ["PROBE_VOCABULARY", "shrink_config"]

PROBE_VOCABULARY = 61

_HEAD_DIM = 16
_MOST_QUERIES_PER_KEY = 8
_MIN_LAYERS = 2

# No value is raised.
_AT_MOST = {
    "vocab_size": PROBE_VOCABULARY,
    "intermediate_size": 40,
    "intermediate_size_mlp": 40,
    "ffn_dim": 40,
    "ffn_hidden_size": 40,
    "n_inner": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "decoder_sparse_step": 2,
    "first_k_dense_replace": 1,
    "sliding_window": 4,
}
# Follow from others, or say where a config comes from.
_LEFT_OUT = (
    "architectures",
    "dtype",
    "model_type",
    "qk_head_dim",
    "quantization_config",
    "transformers_version",
    "_name_or_path",
)


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The small config; the one that is given stays as it is.

    Raises:
        Exception: Whatever the class raises on sizes that it does not take.
    """
    keys: dict[str, Any] = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    named = config.attribute_map
    layers, hidden, heads = (named.get(n, n) for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    num_layers, num_heads = keys[layers], keys[heads]
    num_kv = keys.get("num_key_value_heads") or num_heads
    small_kv = min(num_kv, 2)
    small_heads = small_kv * min(num_heads // num_kv, _MOST_QUERIES_PER_KEY)
    fills = keys.get("head_dim") is None or keys["head_dim"] * num_heads == keys[hidden]
    small: dict[str, Any] = {
        layers: _MIN_LAYERS,
        heads: small_heads,
        hidden: _HEAD_DIM * (small_heads if fills else small_heads + 1),
        "num_key_value_heads": small_kv,
        "head_dim": _HEAD_DIM if keys.get("head_dim") is not None else None,
    }
    if "qk_rope_head_dim" in keys:  # multi-head latent attention calls that its head size, for rotary positions
        small["head_dim"] = _AT_MOST["qk_rope_head_dim"]
    for name, most in _AT_MOST.items():
        if isinstance(keys.get(name), int):
            small[name] = min(keys[name], most)
    for name, value in keys.items():
        if name.endswith("token_id"):  # must lie in the vocabulary
            small[name] = value % 3 if isinstance(value, int) else None
    if keys.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    by_layer = {name: value for name, value in keys.items() if isinstance(value, list) and len(value) == num_layers}
    if by_layer:  # one layer of each kind, in order
        kinds = list(zip(*by_layer.values(), strict=True))
        taken = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
        taken += [layer for layer in range(num_layers) if layer not in taken][: max(0, _MIN_LAYERS - len(taken))]
        small[layers] = len(taken)
        small |= {name: [value[layer] for layer in sorted(taken)] for name, value in by_layer.items()}
    return type(config)(**keys | {name: value for name, value in small.items() if name in keys})
