"""Models that can be named instead of giving a config: figures of their public ``config.json``, no network.

Keys that are left out have Transformers' defaults. FlexSP's GPT models (arXiv:2412.01523, section 6) have learned
positions, so their parameter count depends on the context; theirs are stated for 192K and 384K, ours for 192K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nestsp.errors import ConfigError, did_you_mean
from nestsp.shape import ModelShape

__all__ = ["KNOWN_MODELS", "known_model"]


def _llama(hidden: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
        **more,
    }


def _qwen(family: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        "model_type": family,
        **sizes,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 151936,
        **more,
    }


def _gemma(family: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **more,
    }


def _gpt(hidden: int, layers: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": 64, "n_positions": 192_000}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_MOE: dict[str, Any] = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_LLAMA_70B = _llama(8192, 80, 64, 28672)

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _llama(4096, 32, 32, 14336),
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-8b": _llama(4096, 32, 32, 14336),
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": _llama(16384, 126, 128, 53248),
    "llama-3.2-1b": _llama(2048, 16, 32, 8192, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama(3072, 28, 24, 8192, head_dim=128, **_TIED),
    "llama-3.3-70b": _LLAMA_70B,
    "qwen2.5-0.5b": _qwen("qwen2", 896, 24, 14, 2, 4864, **_TIED),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 28, 12, 2, 8960, **_TIED),
    "qwen2.5-3b": _qwen("qwen2", 2048, 36, 16, 2, 11008, **_TIED),
    "qwen2.5-7b": _qwen("qwen2", 3584, 28, 28, 4, 18944, vocab_size=152064),
    "qwen2.5-14b": _qwen("qwen2", 5120, 48, 40, 8, 13824, vocab_size=152064),
    "qwen2.5-32b": _qwen("qwen2", 5120, 64, 40, 8, 27648, vocab_size=152064),
    "qwen2.5-72b": _qwen("qwen2", 8192, 80, 64, 8, 29568, vocab_size=152064),
    "qwen3-0.6b": _qwen("qwen3", 1024, 28, 16, 8, 3072, **_TIED),
    "qwen3-1.7b": _qwen("qwen3", 2048, 28, 16, 8, 6144, **_TIED),
    "qwen3-4b": _qwen("qwen3", 2560, 36, 32, 8, 9728, **_TIED),
    "qwen3-8b": _qwen("qwen3", 4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen("qwen3", 5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen("qwen3", 5120, 64, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen("qwen3_moe", 2048, 48, 32, 4, 6144, moe_intermediate_size=768, **_MOE),
    "qwen3-235b-a22b": _qwen("qwen3_moe", 4096, 94, 64, 4, 12288, moe_intermediate_size=1536, **_MOE),
    "mixtral-8x7b": {"model_type": "mixtral"},
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "hidden_size": 6144,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "intermediate_size": 16384,
        "vocab_size": 32768,
    },
    "gemma-2-2b": {"model_type": "gemma2"},
    "gemma-2-9b": _gemma("gemma2", 3584, 42, 16, 8, 14336, head_dim=256),
    "gemma-2-27b": _gemma("gemma2", 4608, 46, 32, 16, 36864, head_dim=128),
    "gemma-3-1b": _gemma("gemma3_text", 1152, 26, 4, 1, 6912, head_dim=256, vocab_size=262144, sliding_window=512),
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "phi-3-mini": {"model_type": "phi3", "sliding_window": 2047},
    "phi-3-medium": {
        "model_type": "phi3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "sliding_window": 2047,
    },
    "olmo-2-7b": {"model_type": "olmo2", "vocab_size": 100352},
    "olmo-2-13b": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
    },
    "granite-3-8b": {
        "model_type": "granite",
        "vocab_size": 49155,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 12800,
        "tie_word_embeddings": True,
    },
    "command-r": {"model_type": "cohere"},
    "gpt-7b": _gpt(4096, 32),
    "gpt-13b": _gpt(5120, 40),
    "gpt-30b": _gpt(6656, 60),
}


def known_model(name: str) -> ModelShape:
    """The shape of a model by its name.

    Raises:
        ConfigError: The name is not known; the message has the nearest one.

    >>> known_model("qwen3-30b-a3b").num_parameters
    30532122624
    """
    config = KNOWN_MODELS.get(name.lower())
    if config is None:
        near = did_you_mean(name.lower(), KNOWN_MODELS)
        raise ConfigError(
            f"the model is {name!r}, but the models known by name are {', '.join(KNOWN_MODELS)}, or give the path of a "
            f"config.json{near}"
        )
    return ModelShape.for_planning(config)
