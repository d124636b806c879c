"""The sizes of a model: from its config where the family is known, else from the model itself.

A model of another family is built without memory, on the meta device: its parameters are counted, and one forward pass
over two tokens tells what each layer asks of attention. So no list of families decides; the probe does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nestsp.errors import ModelError
from nestsp.model.adapter import (
    ATTENTION,
    AttentionCall,
    AttentionRecord,
    MissingContextError,
    decoder_layers,
    register_attention,
)
from nestsp.shape import FAMILIES, ModelShape

__all__ = ["attention_calls", "model_shape", "reference_attention"]


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """The sizes of a model, defaults of Transformers filled in.

    Raises:
        ModelError: The family is not known, and the model does not run as nestsp needs it.
    """
    if config.model_type in FAMILIES:
        return ModelShape.from_hf_config(config.to_dict())
    register_attention()
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=ATTENTION, dtype=torch.bfloat16
            )
    except Exception as error:
        raise ModelError(
            f"Transformers does not build the {config.model_type} model with nestsp's attention "
            f"({type(error).__name__}: {' '.join(str(error).split())}), but every model must; use another one"
        ) from None
    layers = decoder_layers(model)
    calls = attention_calls(model)
    kinds = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(kinds) != 1:
        raise ModelError(
            f"the model's layers have attention of {len(kinds)} sizes (query heads, key/value heads, head size: "
            f"{sorted(kinds)}), but nestsp plans for one; use another model"
        )
    return _counted(model, layers, calls)


def reference_attention(shape: ModelShape) -> str:
    """The name of Transformers' own attention that has all that the model asks of it."""
    return "eager" if shape.softcap or shape.sinks else "sdpa"


def attention_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """What each layer of a model asks of attention, in order, by a forward pass over two tokens.

    Raises:
        ModelError: A layer asks for what is not done, does not ask at all, or the model does not pass our argument on.
    """
    record, name = AttentionRecord(), type(model).__name__
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model.base_model(
                input_ids=ids,
                position_ids=torch.arange(2, device=model.device)[None],
                use_cache=False,
                return_dict=True,
                nestsp=record,
            )
    except MissingContextError:
        raise ModelError(
            f"{name} does not pass keyword arguments on to its attention, but that is how attention learns of a "
            "batch's sequences; use another model"
        ) from None
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name} does not run with nestsp's attention ({type(error).__name__}: {' '.join(str(error).split())}), "
            "but every model must; use another one"
        ) from None
    num_layers = len(decoder_layers(model))
    asked = [call.layer for call in record.calls]
    if asked != list(range(num_layers)):
        once = sum(asked.count(layer) == 1 for layer in range(num_layers))
        raise ModelError(
            f"{name} has {num_layers} layers, but {num_layers - once} of them do not ask for attention, once and in "
            "turn, so they mix tokens in a way that nestsp does not split; use a model of attention layers alone"
        )
    return record.calls


def _counted(model: PreTrainedModel, layers: list[Any], calls: list[AttentionCall]) -> ModelShape:
    config, call = model.config, calls[0]
    hidden = config.hidden_size
    windows = [call.window for call in calls if call.window is not None]
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    experts = [parameter for layer in layers for parameter in layer.parameters() if parameter.dim() == 3]
    num_experts = experts[0].shape[0] if experts else 0
    expert_layers = sum(any(p.dim() == 3 for p in layer.parameters()) for layer in layers)
    per_token = getattr(config, "num_experts_per_tok", None)
    if experts and not isinstance(per_token, int):
        raise ModelError(
            f"{type(model).__name__} has {num_experts} experts, but its config has no num_experts_per_tok, from which "
            "nestsp counts its work; use another model"
        )
    in_experts = sum(parameter.numel() for parameter in experts)
    sizes: dict[str, Any] = {
        "family": config.model_type,
        "num_layers": len(layers),
        "hidden_size": hidden,
        "num_heads": call.num_heads,
        "num_kv_heads": call.num_kv_heads,
        "head_dim": call.head_dim,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * hidden,
        "vocab_size": config.vocab_size,
        "tied_embeddings": tied,
        "sinks": call.sinks,
        "softcap": float(call.softcap or 0),
        "num_moe_layers": expert_layers,
        "num_experts": num_experts,
        "experts_per_token": per_token if experts else 0,
        "expert_intermediate_size": in_experts // max(1, expert_layers * num_experts * 3 * hidden),
        "window": max(windows, default=0),
        "num_window_layers": len(windows),
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(**sizes, other_parameters=total - ModelShape(**sizes).num_parameters)
