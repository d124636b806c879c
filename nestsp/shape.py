"""What planning needs to know of a model: its sizes, parameters and floating-point operations. No torch.

Sizes come from the keys of a Transformers ``config.json``. Parameter counts are exact for the families listed in
`FAMILIES`, which training can run (a test compares them with the models), and for those in `PLANNED_FAMILIES`, of
which the rest can be planned and simulated only. FLOP counts follow the usual rule of 2 per multiply-add, and count
causal attention by the half square that is needed, not the square.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestsp.cluster import share
from nestsp.errors import ConfigError, ModelError, did_you_mean

__all__ = ["FAMILIES", "PLANNED_FAMILIES", "HeadShare", "ModelShape", "head_shares", "head_slices", "read_config_json"]

# Transformers' own defaults (5.24) of the keys read here; what a config.json leaves out has these values.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_MIXTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}
_PHI3: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
_OLMO2: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_COHERE: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_qk_norm": False,
}
_GEMMA2: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3: dict[str, Any] = {
    **{key: value for key, value in _GEMMA2.items() if key != "attn_logit_softcapping"},
    "vocab_size": 262208,
}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
# GPT-2 as Transformers writes it: learned positions, biases everywhere, a feed-forward block of two matrices.
_GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "tie_word_embeddings": True,
}
# Which key has the width of one expert.
_EXPERT_SIZE_KEY = {
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "gpt_oss": "intermediate_size",
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen2": _QWEN2,
    "mixtral": _MIXTRAL,
    "mistral": _MISTRAL,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _GPT_OSS,
    "phi3": _PHI3,
    "granite": _LLAMA,
    "cohere": _COHERE,
    "olmo2": _OLMO2,
}
PLANNED_FAMILIES: Mapping[str, Mapping[str, Any]] = {**FAMILIES, "gpt2": _GPT2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model.

    Attributes:
        family: Transformers' ``model_type``.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of one head; heads × head_dim may differ from the hidden size.
        intermediate_size: Width of a dense feed-forward block.
        vocab_size: Rows of the embedding and of the head.
        tied_embeddings: Embedding and head are one matrix.
        attention_bias: The four attention projections have biases.
        qkv_bias: Only the query, key and value projections have biases (Qwen 2).
        mlp_bias: The dense feed-forward projections have biases.
        gated_mlp: A feed-forward block has a gate, which makes three matrices of two.
        norm_bias: Normalisations have biases (GPT-2).
        num_positions: Rows of a learned position embedding; 0 for rotary positions.
        layer_norms: Normalisations of the residual stream in a layer.
        head_norms: Queries and keys are normalised per head, all heads by the same weights (Qwen3, Gemma 3).
        width_norms: Queries and keys are normalised with a weight for each element (OLMo 2, Cohere).
        sinks: Each query head has an attention sink (gpt-oss).
        softcap: Attention scores are capped softly at this; 0 if they are not (Gemma 2).
        num_moe_layers: Layers whose feed-forward block is a mixture of experts.
        num_experts: Experts of such a layer.
        experts_per_token: Experts that one token is sent to.
        expert_intermediate_size: Width of one expert.
        expert_bias: The projections of experts and router have biases (gpt-oss).
        window: Keys that a query sees in layers with a sliding window; 0 if there is no such layer.
        num_window_layers: Layers with a sliding window.
        other_parameters: Of all decoder layers together, what the fields above do not account for: of a model whose
            family is not known here, all that was counted in the model beyond them.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    norm_bias: bool = False
    num_positions: int = 0
    layer_norms: int = 2
    head_norms: bool = False
    width_norms: bool = False
    sinks: bool = False
    softcap: float = 0.0
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_bias: bool = False
    window: int = 0
    num_window_layers: int = 0
    other_parameters: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"the model's {name} is {value!r}, but it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model has {self.num_heads} query heads, but they must be a multiple of its "
                f"{self.num_kv_heads} key/value heads; change one of them"
            )
        if self.num_moe_layers and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"the model sends each token to {self.experts_per_token} experts, but has {self.num_experts}; "
                "take at least 1 and at most that many"
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the keys of a Transformers config of a model that is to be trained.

        Raises:
            ModelError: The family is not one that nestsp can run.
            ConfigError: A size is missing or impossible.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ModelError(
                f"model_type is {family!r}, but nestsp runs {', '.join(FAMILIES)}{did_you_mean(str(family), FAMILIES)}"
            )
        return cls.for_planning(config)

    @classmethod
    def for_planning(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the keys of a Transformers config of a model that is to be planned or simulated.

        Raises:
            ModelError: The family's sizes are not known.
            ConfigError: A size is missing or impossible.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in PLANNED_FAMILIES:
            raise ModelError(
                f"model_type is {family!r}, but nestsp plans {', '.join(PLANNED_FAMILIES)}"
                f"{did_you_mean(str(family), PLANNED_FAMILIES)}"
            )
        keys = {**PLANNED_FAMILIES[family], **config}
        if family == "gpt2":
            return _gpt2_shape(keys)
        if "num_local_experts" in keys:  # what Mixtral and Transformers 5 write for num_experts
            keys["num_experts"] = keys["num_local_experts"]
        num_heads = _size(keys, "num_attention_heads")
        num_layers = _size(keys, "num_hidden_layers")
        kv_heads = num_heads if keys["num_key_value_heads"] is None else _size(keys, "num_key_value_heads")
        head_dim = _size(keys, "head_dim") if keys["head_dim"] else _size(keys, "hidden_size") // num_heads
        moe_layers = 0
        if family in ("mixtral", "gpt_oss"):
            moe_layers = num_layers
        elif family == "qwen3_moe" and _size(keys, "num_experts", 0) > 0:
            dense = _layers(keys, "mlp_only_layers")
            sparse_step = _size(keys, "decoder_sparse_step")
            moe_layers = sum(1 for i in range(num_layers) if i not in dense and (i + 1) % sparse_step == 0)
        return cls(
            family=family,
            num_layers=num_layers,
            hidden_size=_size(keys, "hidden_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_size(keys, "intermediate_size"),
            vocab_size=_size(keys, "vocab_size"),
            tied_embeddings=_flag(keys, "tie_word_embeddings"),
            attention_bias="attention_bias" in keys and _flag(keys, "attention_bias"),
            qkv_bias=family == "qwen2",
            mlp_bias="mlp_bias" in FAMILIES[family] and _flag(keys, "mlp_bias"),
            layer_norms={"gemma2": 4, "gemma3_text": 4, "cohere": 1}.get(family, 2),
            head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            width_norms=family == "olmo2" or (family == "cohere" and _flag(keys, "use_qk_norm")),
            sinks=family == "gpt_oss",
            softcap=float(keys["attn_logit_softcapping"] or 0) if family == "gemma2" else 0.0,
            num_moe_layers=moe_layers,
            num_experts=_size(keys, "num_experts") if moe_layers else 0,
            experts_per_token=_size(keys, "num_experts_per_tok") if moe_layers else 0,
            expert_intermediate_size=_size(keys, _EXPERT_SIZE_KEY[family]) if moe_layers else 0,
            expert_bias=family == "gpt_oss",
            window=_window(keys, family),
            num_window_layers=_num_window_layers(keys, family),
        )

    @property
    def query_width(self) -> int:
        """Elements of one token's queries: heads × head size."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys, or of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention block."""
        weights = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.attention_bias or self.qkv_bias else 0
        biases += self.hidden_size if self.attention_bias else 0
        norms = 2 * self.head_dim if self.head_norms else 0
        norms += self.query_width + self.kv_width if self.width_norms else 0
        return weights + biases + norms + (self.num_heads if self.sinks else 0)

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense feed-forward block."""
        widenings = 2 if self.gated_mlp else 1
        biases = widenings * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return (widenings + 1) * self.hidden_size * self.intermediate_size + biases

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.expert_intermediate_size + self.hidden_size if self.expert_bias else 0
        return 3 * self.hidden_size * self.expert_intermediate_size + biases

    @property
    def layer_parameters(self) -> int:
        """Parameters of all decoder layers together."""
        router = (self.hidden_size + (1 if self.expert_bias else 0)) * self.num_experts
        norms = self.layer_norms * self.hidden_size * (2 if self.norm_bias else 1)
        layers = self.num_layers * (self.attention_parameters + norms)
        layers += (self.num_layers - self.num_moe_layers) * self.dense_mlp_parameters
        layers += self.num_moe_layers * (router + self.num_experts * self.expert_parameters)
        return layers + self.other_parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the decoder layers: embeddings, last normalisation and head."""
        rows = self.vocab_size * (1 if self.tied_embeddings else 2) + self.num_positions
        return self.hidden_size * (rows + (2 if self.norm_bias else 1))

    @property
    def num_parameters(self) -> int:
        """All parameters, tied ones once."""
        return self.layer_parameters + self.root_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that multiply one token: no embedding, and only its own experts."""
        idle = self.num_moe_layers * (self.num_experts - self.experts_per_token) * self.expert_parameters
        rows = (0 if self.tied_embeddings else self.vocab_size) + self.num_positions
        return self.num_parameters - idle - rows * self.hidden_size

    @property
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs of one token outside attention's score and value products."""
        return 2 * self.num_active_parameters

    def attention_flops(self, length: int) -> int:
        """Forward FLOPs of causal attention over one sequence, all layers: two products over each pair that is seen."""
        seen = min(length, self.window)
        doubled_pairs = (self.num_layers - self.num_window_layers) * length * (length + 1)
        doubled_pairs += self.num_window_layers * seen * (2 * length - seen + 1)
        return 2 * self.query_width * doubled_pairs


def _gpt2_shape(keys: Mapping[str, Any]) -> ModelShape:
    hidden_size, num_heads = _size(keys, "n_embd"), _size(keys, "n_head")
    return ModelShape(
        family="gpt2",
        num_layers=_size(keys, "n_layer"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=_size(keys, "n_inner") if keys["n_inner"] else 4 * hidden_size,
        vocab_size=_size(keys, "vocab_size"),
        tied_embeddings=_flag(keys, "tie_word_embeddings"),
        attention_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_bias=True,
        num_positions=_size(keys, "n_positions"),
    )


def _window(keys: Mapping[str, Any], family: str) -> int:
    """The sliding window of the layers that have one; 0 where no layer has."""
    return _size(keys, "sliding_window") if _num_window_layers(keys, family) else 0


def _num_window_layers(keys: Mapping[str, Any], family: str) -> int:
    """How many layers have the window; where the config does not list them, as the family's own config class does."""
    windowed = family.startswith("qwen") and keys.get("use_sliding_window")
    if keys.get("sliding_window") is None or not (windowed or "sliding_window" in FAMILIES[family]):
        return 0
    kinds, num_layers = keys.get("layer_types"), _size(keys, "num_hidden_layers")
    if kinds is not None and family != "phi3":  # whose layers read the window alone
        return sum(kind == "sliding_attention" for kind in kinds)
    if family in ("qwen2", "qwen3"):
        first = 28 if keys.get("max_window_layers") is None else _size(keys, "max_window_layers", 0)
        return max(0, num_layers - first)
    if family in ("gemma2", "gpt_oss"):  # every other one, from the first
        return -(-num_layers // 2)
    if family == "gemma3_text":
        period = _size(keys, "sliding_window_pattern") if keys.get("sliding_window_pattern") is not None else 6
        return num_layers - num_layers // period
    return num_layers


def _size(keys: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = keys[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"the model's {name} is {value!r}, but it must be a whole number of at least {least}")
    return value


def _flag(keys: Mapping[str, Any], name: str) -> bool:
    value = keys[name]
    if not isinstance(value, bool):
        raise ConfigError(f"the model's {name} is {value!r}, but it must be true or false")
    return value


def _layers(keys: Mapping[str, Any], name: str) -> frozenset[int]:
    value = keys[name]
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(i, int) for i in value)):
        raise ConfigError(f"the model's {name} is {value!r}, but it must be a list of layer numbers")
    return frozenset(value or ())


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads that one member of a group works for.

    Attributes:
        query: Its query heads; may be empty.
        kv: The key/value heads that these need.
        kv_of_query: For each of its query heads, the place of its key/value head in ``kv``.
    """

    query: range
    kv: range
    kv_of_query: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def head_shares(num_heads: int, num_kv_heads: int, degree: int) -> tuple[HeadShare, ...]:
    """Deal heads to the members of a group, as evenly as whole heads allow.

    Key/value heads go where their queries are; one that several members need is replicated.

    >>> [list(s.query) for s in head_shares(6, 3, 4)], [list(s.kv) for s in head_shares(6, 3, 4)]
    ([[0], [1, 2], [3], [4, 5]], [[0], [0, 1], [1], [2]])
    """
    per_kv = num_heads // num_kv_heads
    result = []
    for member in range(degree):
        query = share(num_heads, degree, member)
        kv = range(query[0] // per_kv, query[-1] // per_kv + 1) if query else range(0)
        result.append(HeadShare(query, kv, tuple(head // per_kv - kv.start for head in query)))
    return tuple(result)


def head_slices(shares: Sequence[HeadShare], num_slices: int) -> tuple[tuple[HeadShare, ...], ...]:
    """Cut each member's query heads in slices, as evenly as whole heads allow; some may be empty.

    Returns:
        For each slice, what each member works for in it; key/value heads that several slices need are in all of these.

    >>> [[list(s.query) for s in members] for members in head_slices(head_shares(6, 3, 2), 2)]
    [[[0], [3]], [[1, 2], [4, 5]]]
    >>> [[list(s.kv) for s in members] for members in head_slices(head_shares(6, 3, 2), 2)]
    [[[0], [1]], [[0, 1], [2]]]
    """
    return tuple(
        tuple(_slice(of, share(len(of.query), num_slices, number)) for of in shares) for number in range(num_slices)
    )


def _slice(of: HeadShare, heads: range) -> HeadShare:
    seen = of.kv_of_query[heads.start : heads.stop]
    if not seen:
        return HeadShare(range(0), range(0), ())
    kv = range(of.kv.start + seen[0], of.kv.start + seen[-1] + 1)
    query = range(of.query.start + heads.start, of.query.start + heads.stop)
    return HeadShare(query, kv, tuple(head - seen[0] for head in seen))


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a Transformers ``config.json``, given by its path or its folder's.

    Raises:
        ConfigError: There is no such file, or it holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"model.config is {str(path)!r}, but there is no config.json there; correct the path"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model.config {file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.config {file} is a JSON {type(config).__name__}, but it must be an object")
    return config
