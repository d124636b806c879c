"""What nestsp asks of a Transformers model, and how it gets its attention into an unmodified one.

Two seams of Transformers are used, no patch: the attention interface, under the name ``nestsp``, and each decoder
layer's ``_gradient_checkpointing_func`` (see `nestsp.execute.recompute`). What nestsp cannot run exactly is refused by
name, from the config before any rank starts and again from the arguments that attention receives.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from nestsp.attention.streaming import AttentionContext, attend_groups
from nestsp.errors import ModelError, did_you_mean
from nestsp.shape import FAMILIES, read_config_json

__all__ = [
    "ATTENTION",
    "AttentionCall",
    "AttentionRecord",
    "MissingContextError",
    "build_model",
    "decoder_layers",
    "model_config",
    "nestsp_attention",
    "register_attention",
]

ATTENTION = "nestsp"
"""Name under which the attention function is registered with Transformers."""

# Keys that published configs carry and that these families' configs do not have (any more): older names, which
# Transformers translates, and some that decide nothing here. No misspellings, however near they are to another key.
_PUBLISHED_KEYS = frozenset(
    {
        "cache_implementation",
        "experts_per_token",
        "initial_context_length",
        "max_window_layers",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_theta",
        "sliding_window_pattern",
        "torch_dtype",
        "use_sliding_window",
    }
)

# Kinds of rotary positions whose angles follow from a token's own position alone.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Arguments that decoder layers pass on to attention and that decide nothing there: positions are applied before, and
# nothing is cached in training.
_IGNORED = frozenset({"position_ids", "use_cache"})


class MissingContextError(ModelError):
    """Attention was called without nestsp's argument."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of attention.

    Attributes:
        layer: Number of the layer.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head, the wider one where keys and values differ.
        window: Keys that a query sees; None for all.
        softcap: Of the scores; None for none.
        sinks: Whether each head has a sink.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    sinks: bool


class AttentionRecord:
    """Stands where a microbatch's context would, to see what a model asks of attention; the answer is zeros.

    Attributes:
        calls: In their order.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []


def model_config(source: str | Mapping[str, Any]) -> PreTrainedConfig:
    """Make a Transformers config and check that nestsp can run it exactly.

    Args:
        source: Keys of a config, ``model_type`` among them, or the path of a ``config.json`` or its folder.

    Raises:
        ConfigError: The file is missing or no JSON object.
        ModelError: The config is one that Transformers or nestsp cannot run.
    """
    # Transformers writes into nested mappings that it is given.
    keys = copy.deepcopy(read_config_json(Path(source)) if isinstance(source, str) else dict(source))
    family = keys.pop("model_type", None)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model_type is {family!r}, but Transformers has no causal language model of that name; nestsp knows "
            f"{', '.join(FAMILIES)}, and tries what else Transformers has"
            f"{did_you_mean(str(family), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}"
        )
    try:
        with _only_errors():  # it warns of special tokens beyond the vocabulary, which nestsp does not use
            config = AutoConfig.for_model(family, **keys)
    except Exception as error:
        raise ModelError(
            f"model.config is no {family} config that Transformers takes: {' '.join(str(error).split())}"
        ) from None
    _refuse_misspelt_keys(config, keys, family)
    _refuse_what_would_be_wrong(config)
    return config


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """Transformers' own messages below errors are not shown."""
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


def build_model(config: PreTrainedConfig, *, seed: int, attention: str = ATTENTION, **kwargs: Any) -> PreTrainedModel:
    """Make a model with random weights that depend on the seed alone, in float32 on the CPU.

    Args:
        config: A config that `model_config` accepted.
        seed: Of the weights.
        attention: Attention implementation; ``sdpa`` gives the one-process reference.
        **kwargs: Passed to Transformers, such as ``experts_implementation``.
    """
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention, dtype=torch.float32, **kwargs
        )
    model.train()
    return model


def register_attention() -> None:
    """Tell Transformers of nestsp's attention; once or more often. Compiled code calls it as it is."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(nestsp_attention))  # type: ignore[no-untyped-call]


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a model that can be recomputed, in the order in which they run.

    Raises:
        ModelError: It has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"the model is {type(model).__name__}, but it has no gradient-checkpointing layers, which nestsp needs to "
            "shard and recompute it; take a model of Transformers' own"
        )
    return layers


def nestsp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    nestsp: AttentionContext | AttentionRecord | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls, once a layer.

    Args:
        module: The attention module; its ``layer_idx`` names the layer.
        query: [1, N, T, H], rotary positions applied.
        key: [1, K, T, H].
        value: [1, K, T, V]; where V is not H, the narrower ones are filled up with zeros, which changes no result.
        attention_mask: None; sequences are known from the plan.
        scaling: Factor of the scores.
        dropout: 0.
        sliding_window: How many keys a query sees, itself and those before it; None for all.
        softcap: Scores s become ``softcap · tanh(s / softcap)``; None leaves them.
        s_aux: [N], attention sinks: a score for each head that takes part in its softmax's sum.
        nestsp: The microbatch.
        **kwargs: What else the layer passes on; refused if it would change the result.

    Returns:
        [1, T, N, V], and None for the attention weights.

    Raises:
        ModelError: An argument asks for something that is not done here.
    """
    if nestsp is None:
        raise MissingContextError(
            f"{type(module).__name__} was called without nestsp's context, but its attention implementation is "
            f"'{ATTENTION}'; run it through nestsp's executor, or set model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None:
        raise ModelError("attention got a mask, but sequences are told apart by the plan; pass no attention_mask")
    if dropout:
        raise ModelError(f"attention dropout is {dropout}, but nestsp runs none; set attention_dropout = 0")
    if getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{type(module).__name__} is not causal, but nestsp runs causal attention; take a causal language model"
        )
    if s_aux is not None and s_aux.shape != (query.shape[1],):
        raise ModelError(
            f"attention got s_aux = a tensor {list(s_aux.shape)}, but nestsp knows one sink for each of "
            f"{query.shape[1]} query heads; use a model without it"
        )
    for name, argument in kwargs.items():
        if argument is not None and name not in _IGNORED and (name, argument) != ("is_causal", True):
            shown = f"a tensor {list(argument.shape)}" if isinstance(argument, Tensor) else repr(argument)
            raise ModelError(f"attention got {name} = {shown}, but nestsp does not know it; use a model without it")
    if len(query) != 1:
        raise ModelError(
            f"attention got a batch of {len(query)}, but nestsp packs all tokens into one row; run the model through "
            "nestsp's executor"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    size = max(query.shape[-1], value.shape[-1])
    if isinstance(nestsp, AttentionRecord):
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        call = AttentionCall(layer, num_heads, num_kv_heads, size, sliding_window, softcap, s_aux is not None)
        nestsp.calls.append(call)
        return value.new_zeros(1, query.shape[2], num_heads, value.shape[-1]), None
    q, k, v = (_widened(x[0].transpose(0, 1), size) for x in (query, key, value))
    out = attend_groups(nestsp, layer, scaling, q, k, v, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None, ..., : value.shape[-1]], None


def _widened(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _refuse_misspelt_keys(config: PreTrainedConfig, keys: Mapping[str, Any], family: str) -> None:
    """A misspelt key would silently leave the default in place; unknown keys that are near to none pass."""
    known = {*type(config)().to_dict(), *type(config).attribute_map, *FAMILIES.get(family, ())}
    for key in sorted(key for key in keys.keys() - known - _PUBLISHED_KEYS if not key.startswith("_")):  # its own notes
        nearest = did_you_mean(key, (known | _PUBLISHED_KEYS) - keys.keys())  # a key that is given too was not meant
        if nearest:
            raise ModelError(f"model.config.{key} is no key of a {family} config{nearest}")


def _refuse_what_would_be_wrong(config: PreTrainedConfig) -> None:
    keys = config.to_dict()
    for key in [key for key in keys if "dropout" in key or key.endswith("pdrop")]:
        if isinstance(keys[key], int | float) and keys[key] and not key.startswith(("classifier", "summary")):
            raise ModelError(f"{key} is {keys[key]}, but nestsp runs none; set model.config.{key}: 0")
    for key in [key for key in keys if "jitter" in key]:
        if keys[key]:
            raise ModelError(f"{key} is {keys[key]}, but results must not depend on the plan; set it to 0")
    if keys.get("output_router_logits"):
        raise ModelError(
            "output_router_logits is true, but nestsp takes the router's auxiliary loss over whole batches; set "
            "model.config.output_router_logits: false, and train.router_loss: counting_pass for that loss"
        )
    others = set(keys.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise ModelError(
            f"the model has {', '.join(sorted(others))}, but nestsp runs full_attention and sliding_attention; correct "
            "model.config.layer_types"
        )
    if keys.get("is_causal") is False:
        raise ModelError("is_causal is false, but nestsp runs causal attention; leave model.config.is_causal out")
    if keys.get("use_bidirectional_attention"):
        raise ModelError(
            "use_bidirectional_attention is true, but nestsp runs causal attention; leave "
            "model.config.use_bidirectional_attention out"
        )
    rope = keys.get("rope_parameters") or {}
    for parameters in [part for part in rope.values() if isinstance(part, dict)] or [rope]:  # by kind of layer, or one
        _refuse_rope(parameters.get("rope_type", "default"))
    for key in ("hidden_act", "hidden_activation"):
        if key in keys and keys[key] not in ACT2FN:
            raise ModelError(
                f"{key} is {keys[key]!r}, but Transformers has no such function{did_you_mean(str(keys[key]), ACT2FN)}"
            )


def _refuse_rope(kind: object) -> None:
    if kind in ("dynamic", "longrope"):
        raise ModelError(
            f"rope_type is '{kind}', but it looks at the longest position that a rank holds, so results would depend "
            f"on the plan; take {', '.join(_ROPE_TYPES)}"
        )
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"rope_type is {kind!r}, but nestsp runs {', '.join(_ROPE_TYPES)}{did_you_mean(str(kind), _ROPE_TYPES)}"
        )
