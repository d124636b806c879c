"""A model whose feed-forward blocks cannot run in slices is refused before it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from nestsp.errors import ModelError
from nestsp.model.adapter import model_config
from nestsp.model.mini_sequence import check_mlp_slices
from tests.distributed.equivalence import GEMMA2, GRANITE, LLAMA, MIXTRAL, QWEN3_MOE, small_config


@pytest.mark.parametrize("keys", [LLAMA, GEMMA2, GRANITE, MIXTRAL, QWEN3_MOE], ids=lambda keys: keys["model_type"])
def test_blocks_of_single_tokens_are_taken(keys: dict[str, Any]) -> None:
    check_mlp_slices(model_config(small_config(keys)))


def test_blocks_that_mix_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: hidden - hidden.mean(-2, keepdim=True))
    with pytest.raises(ModelError, match=r"of LlamaForCausalLM compute something else for slices of tokens than for a"):
        check_mlp_slices(model_config(small_config(LLAMA)))


def test_blocks_that_take_more_than_hidden_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Tensor] = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden, positions: whole(self, hidden))

    def layer(self: LlamaDecoderLayer, hidden: Tensor, **kwargs: Any) -> Any:
        return self.mlp(hidden, kwargs["position_ids"])

    monkeypatch.setattr(LlamaDecoderLayer, "forward", layer)
    with pytest.raises(ModelError, match=r"set, but the feed-forward blocks of LlamaForCausalLM take more than hidden"):
        check_mlp_slices(model_config(small_config(LLAMA)))
