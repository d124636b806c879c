from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nestsp.model.adapter import build_model, model_config
from nestsp.model.root import LossRoot
from nestsp.train.export import write_hugging_face
from nestsp.train.generate import generating
from tests.distributed.equivalence import (
    COHERE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    small_config,
)

FAMILIES: list[Mapping[str, Any]] = [
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, GPT_OSS, PHI3, GRANITE, COHERE, OLMO2
]  # fmt: skip


def three_more(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    return tokens


@pytest.mark.parametrize("keys", FAMILIES, ids=lambda keys: keys["model_type"])
def test_every_family_is_exported_and_generates(keys: Mapping[str, Any], tmp_path: Path) -> None:
    config = model_config(small_config(keys))
    model = build_model(config, seed=1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_hugging_face(config, weights, tmp_path / "hf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with generating(LossRoot(model, 8)) as ready:
        ours = three_more(ready, prompt)
    assert torch.equal(ours, three_more(read.train(False), prompt))
