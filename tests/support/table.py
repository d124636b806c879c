"""The support table: which model family runs in which kind of group. ``python -m tests.support.table`` writes the page.

Each row is a model's config; each cell is filled by running it: a small copy of the model in groups of that kind, all
gradients compared with each sequence alone, or the sentence by which it is refused. `test_support` fills the cells anew
and holds them against the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestsp.cli.check import features
from nestsp.errors import NestspError
from nestsp.execute.probe import KINDS, probe_model
from nestsp.known_models import KNOWN_MODELS
from nestsp.model.adapter import model_config
from nestsp.model.derive import model_shape

__all__ = ["MODELS", "PAGE", "Row", "fill", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

_LLAMA: Mapping[str, Any] = KNOWN_MODELS["llama-3.1-8b"]
_MOE: Mapping[str, Any] = KNOWN_MODELS["qwen3-30b-a3b"]
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3": _LLAMA,
    "Llama 3.2, tied": KNOWN_MODELS["llama-3.2-1b"],
    "Qwen2": {"model_type": "qwen2"},
    "Qwen2, window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 16,
    },
    "Qwen2.5": KNOWN_MODELS["qwen2.5-7b"],
    "Qwen3": KNOWN_MODELS["qwen3-8b"],
    "Qwen3-MoE": _MOE,
    "Mistral": {"model_type": "mistral", "sliding_window": None},
    "Mistral, window": {"model_type": "mistral"},
    "Mixtral": KNOWN_MODELS["mixtral-8x7b"],
    "Gemma": {"model_type": "gemma"},
    "Gemma 2": KNOWN_MODELS["gemma-2-9b"],
    "Gemma 3 text": KNOWN_MODELS["gemma-3-1b"],
    "gpt-oss": KNOWN_MODELS["gpt-oss-20b"],
    "Phi-3": {"model_type": "phi3"},
    "Phi-3, window": KNOWN_MODELS["phi-3-mini"],
    "Granite": KNOWN_MODELS["granite-3-8b"],
    "Cohere": KNOWN_MODELS["command-r"],
    "Cohere 2": {"model_type": "cohere2"},
    "OLMo 2": KNOWN_MODELS["olmo-2-7b"],
    "OLMoE": {"model_type": "olmoe"},
    "DeepSeek-V3 (latent attention)": {"model_type": "deepseek_v3"},
    "GLM-4": {"model_type": "glm4"},
    "SmolLM3": {"model_type": "smollm3"},
    "StarCoder 2": {"model_type": "starcoder2"},
    "GPT-NeoX": {"model_type": "gpt_neox"},
    "GPT-2, without dropout": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPT-2": {"model_type": "gpt2"},
    "attention dropout": {**_LLAMA, "attention_dropout": 0.1},
    "router jitter": {**_MOE, "router_jitter_noise": 0.01},
    "dynamic RoPE": {**_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "Phi-3, long context": {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": _LONGROPE},
    "Llama 4 (chunked attention)": {"model_type": "llama4_text"},
    "Qwen3-Next (linear attention)": {"model_type": "qwen3_next"},
    "Jamba (state space)": {"model_type": "jamba"},
    "Mamba (state space)": {"model_type": "mamba"},
    "BERT (not causal)": {"model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Falcon": {"model_type": "falcon"},
    "StableLM": {"model_type": "stablelm"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one model gave.

    Attributes:
        features: What it has that attention or loss must know of; empty for a model that is refused.
        cells: For each kind of group, ``right``, or the sentence of refusal.
    """

    features: tuple[str, ...]
    cells: tuple[str, ...]


def fill(name: str) -> Row:
    """Run one model in all kinds of groups."""
    try:
        config = model_config(MODELS[name])
        present = features(model_shape(config))
        probe = probe_model(config)
    except NestspError as error:
        return Row((), (str(error),) * len(KINDS))
    return Row(tuple(present[1:]), tuple(probe.refusals.get(kind, "right") for kind in KINDS))


def page(rows: Mapping[str, Row]) -> str:
    """The page of the docs."""
    sentences = list(dict.fromkeys(cell for row in rows.values() for cell in row.cells if cell != "right"))
    lines = [
        "# What runs",
        "",
        "Made by `python -m tests.support.table` from what the tests measure; a test fails when it differs. Every cell "
        "was run: a small copy of the model with every kind of its layers, in a group of that kind, recomputed and "
        "kept, has the logits, the loss and all gradients of each sequence alone in Transformers (float64, error below "
        "1e-9); or the model is refused, before any collective, by the sentence whose number stands there.",
        "",
        "*local* is one rank, *ulysses* 3 ranks, *ring* 3 ranks, *hybrid* a ring of 2 × Ulysses of 2. All attention is "
        "causal and packed. A model that is not here is tried by the same probe: `nestsp check path/to/config.json` "
        "prints its table, and `nestsp train` probes every model before its first step.",
        "",
        f"| model | besides causal, packed attention | {' | '.join(KINDS)} |",
        f"|---|---|{'---|' * len(KINDS)}",
    ]
    for name, row in rows.items():
        cells = [cell if cell == "right" else f"refused ({sentences.index(cell) + 1})" for cell in row.cells]
        lines.append(f"| {name} | {', '.join(row.features)} | {' | '.join(cells)} |")
    lines += ["", "Refusals:", ""]
    lines += [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page({name: fill(name) for name in MODELS}), encoding="utf-8")
