"""What the root module refuses before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestsp.attention.kernels import CpuFlash
from nestsp.attention.streaming import AttentionContext
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import ModelError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.schedule import Pass

KEYS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
}
CPU = torch.device("cpu")


def loaded(model: Any) -> tuple[Executor, LocalBatch]:
    """Two sequences of four, packed on one rank."""
    install_layer_runner(model)
    executor = Executor(
        LossRoot(model, 4), model_shape(model_config(KEYS)), {}, 0, CPU, CpuFlash(), AttentionTimer(CPU)
    )
    tree = GroupTree(())
    plan = Plan.of_groups(tree, SequenceBatch.of_lengths((4, 4)), [{tree.group(0, 0): [0, 1]}], "test")
    tokens = torch.arange(8).view(2, 4) + 1
    return executor, executor.load(plan, lambda identity, start, stop: tokens[identity][start:stop].numpy())


@pytest.mark.parametrize("attention", ["flex_attention", "sdpa", "eager"])
def test_E21_another_attention_than_nestsps_is_refused(attention: str) -> None:
    """It would take the pack for one sequence, and a rank's part for the whole."""
    model = build_model(model_config(KEYS), seed=0)
    model.set_attn_implementation(attention)
    executor, batch = loaded(model)
    sentence = (
        rf"the model's attention is '{attention}', but nestsp runs its own; call model.set_attn_implementation\('"
    )
    with pytest.raises(ModelError, match=sentence):
        executor.run(batch)
    model.set_attn_implementation("nestsp")
    executor.run(batch)


def test_E8_a_mask_of_ones_does_not_join_packed_sequences() -> None:
    model = build_model(model_config(KEYS), seed=0).double()
    _, batch = loaded(model)
    (microbatch,) = batch.microbatches
    ids, positions = microbatch.tokens.ids[None], microbatch.tokens.positions[None]
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False, "nestsp": microbatch.attention}
    packed = model.base_model(**arguments).last_hidden_state[0]
    masked = model.base_model(**arguments, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    assert torch.equal(masked, packed)
    model.set_attn_implementation("sdpa")
    for row in (0, 1):
        alone = model.base_model(input_ids=ids[:, 4 * row : 4 * row + 4], use_cache=False).last_hidden_state[0]
        assert torch.allclose(packed[4 * row : 4 * row + 4], alone, rtol=0, atol=1e-12)


def test_a_filler_token_runs_through_every_layer() -> None:
    model = build_model(model_config(KEYS), seed=0)
    context = AttentionContext({}, {which: () for which in Pass}, CpuFlash(), frozenset())
    out = model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False, nestsp=context)
    assert out.last_hidden_state.isfinite().all()
