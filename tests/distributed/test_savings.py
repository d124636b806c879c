"""What saves memory changes no gradient, and does save: slices of feed-forward blocks, offloaded inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestsp.cluster import GroupTree
from nestsp.cost.memory import MOMENTS, MemoryCost, MemoryOptions, RankTokens, make_memory_cost
from nestsp.cost.profile import load_profile
from nestsp.errors import ModelError
from nestsp.execute.recompute import LayerRunner
from nestsp.known_models import known_model
from nestsp.model.mini_sequence import install_mlp_slices
from tests.distributed.equivalence import LLAMA, MIXTRAL, QWEN3_MOE, Case, make_model
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import TWO_LAYERS, check, nested_plan

MODELS = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}


def test_slices_and_offloading_change_no_gradient(pool: RankPool) -> None:
    """Slices that divide nothing, of one token, and longer than all; recomputed layers and kept ones."""
    plan = nested_plan(GroupTree((2, 2)), keep="output").to_json()
    plain = [Case({**keys, **TWO_LAYERS}, plan) for keys in MODELS.values()]
    cases = [replace(case, mlp_slice_tokens=5, offload=True) for case in plain]
    cases += [replace(plain[0], mlp_slice_tokens=slice_tokens) for slice_tokens in (1, 1000)]
    cases += [replace(case, mlp_slice_tokens=3, recompute=False) for case in plain[:2]]
    check(pool, cases)


def blocks_seen(keys: dict[str, Any], slice_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens of each call of the first layer's block, forward and in backward."""
    model = make_model(keys, "sdpa")
    install_mlp_slices(model, slice_tokens)
    seen: list[int] = []
    block = model.model.layers[0].mlp  # type: ignore[union-attr,index]
    part: nn.Module = block.gate_proj if hasattr(block, "gate_proj") else block.gate
    part.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[-2]))
    loss: Tensor = model(input_ids=torch.arange(13)[None], use_cache=False).logits.sum()
    forward = len(seen)
    loss.backward()
    return seen[:forward], seen[forward:]


@pytest.mark.parametrize("keys", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_a_block_never_sees_more_tokens_than_a_slice(keys: dict[str, Any]) -> None:
    assert blocks_seen(keys, 5) == ([5, 5, 3], [3, 5, 5])
    assert blocks_seen(keys, 13) == ([13], [])


def test_a_model_without_such_a_block_is_refused() -> None:
    model = make_model(LLAMA, "sdpa")
    del model.model.layers[1].mlp  # type: ignore[union-attr,index]
    with pytest.raises(ModelError, match=r"mlp_slice_tokens is set, but layer 1 \(LlamaDecoderLayer\) has no feed"):
        install_mlp_slices(model, 4)


def test_what_is_offloaded_is_the_layers_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from nestsp.execute import recompute

    packed: list[torch.Size] = []

    class Recording(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False) -> None:
            def pack(tensor: Tensor) -> Tensor:
                packed.append(tensor.shape)
                return tensor

            super().__init__(pack, lambda tensor: tensor)

    class Context:
        recomputed_layers = frozenset([0])

    monkeypatch.setattr(recompute, "save_on_cpu", Recording)
    monkeypatch.setattr(recompute, "AttentionContext", Context)
    block = nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 4))

    def run(hidden: Tensor, *, nestsp: Any) -> Tensor:
        return block(hidden)  # type: ignore[no-any-return]

    from functools import partial

    hidden = torch.randn(7, 4, requires_grad=True)
    LayerRunner(0, offloads=True)(partial(run, nestsp=Context()), hidden).sum().backward()
    assert packed == [(7, 4)]
    assert hidden.grad is not None


def test_the_memory_model_knows_slices_offloading_shards_and_forward_passes() -> None:
    shape, tree, profile = known_model("qwen3-8b"), GroupTree((2, 2, 2)), load_profile("h100")

    def cost(**options: Any) -> MemoryCost:
        return make_memory_cost(shape, tree, profile, options=MemoryOptions(**options))

    def recompute(**options: Any) -> float:
        return float(cost(**options).moments(RankTokens(50_000, 0, 0, 0))[MOMENTS.index("recompute")])

    plain = cost()
    # A layer's feed-forward block (gate, up, activation, product) and its three gradients, less one slice of them.
    feed_forward = 2 * (4 + 3) * shape.intermediate_size
    assert recompute() - recompute(mlp_slice_tokens=1000) == pytest.approx(49_000 * feed_forward)
    assert recompute() - recompute(offloads_inputs=True) == pytest.approx(36 * plain.layer_input * 50_000)
    assert recompute(offloads_inputs=True) - recompute(forward_only=True) == pytest.approx(plain.gradients * 50_000)
    assert cost(num_shards=1).states - plain.states == pytest.approx(16 * shape.num_parameters * 7 / 8)
    assert plain.states - cost(num_trained=0).states == pytest.approx(12 * shape.num_parameters / 8)
    assert cost(num_shards=1).update == 8 * plain.update
    assert cost(num_trained=0).update == cost(forward_only=True).update == 0
