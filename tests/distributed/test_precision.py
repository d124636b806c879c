"""bfloat16 computation: positions and rotary phases stay exact, sums and reductions stay float32."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.plan import Plan
from tests.distributed.equivalence import LLAMA, QWEN3_MOE, Case, load, make_executor, make_model, make_tokens
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

LENGTH = 40
# Beyond 256, bfloat16 has no odd whole numbers: a position that went through it would be another one.
FAR = 1_000_003


def phases(rank: int, num_ranks: int, case: Case) -> dict[int, list[list[float]]]:
    """Cosines and sines that the first layer gets, by position."""
    plan = case.made
    executor = make_executor(case, rank, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    local = load(executor, plan, make_tokens(plan))
    found: dict[int, list[list[float]]] = {}
    model: Any = executor.root.model
    layer: Any = model.model.layers[0]

    def record(module: Any, args: Any, kwargs: Any) -> None:
        cos, sin = kwargs["position_embeddings"]
        assert cos.dtype == sin.dtype == torch.bfloat16
        for row, position in enumerate(microbatch.tokens.positions.tolist()):
            found[position] = [cos[0, row].tolist(), sin[0, row].tolist()]

    layer.register_forward_pre_hook(record, with_kwargs=True)
    for microbatch in local.microbatches:
        microbatch.tokens.positions.add_(FAR)
    with torch.no_grad():
        for microbatch in local.microbatches:
            executor.root(microbatch.tokens, microbatch.attention)
    return found


def test_C6_positions_and_rotary_phases_are_exact_under_bfloat16(pool: RankPool) -> None:
    """Each token's phases are those of float64 at its own position, rounded once."""
    tree = GroupTree((2, 2))
    batch = SequenceBatch.of_lengths([LENGTH])
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): [0]}], "test")
    by_rank = pool.run(phases, Case(LLAMA, plan.to_json()), ranks=4)
    found = {position: values for of_rank in by_rank for position, values in of_rank.items()}
    assert sorted(found) == list(range(FAR, FAR + LENGTH))
    rotary: Any = make_model(LLAMA, "sdpa", dtype=torch.float32).model.rotary_emb  # type: ignore[union-attr]
    assert rotary.inv_freq.dtype == torch.float32
    positions = torch.arange(FAR, FAR + LENGTH)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    for row, position in enumerate(positions.tolist()):
        expected = [cos[0, row].bfloat16().tolist(), sin[0, row].bfloat16().tolist()]
        assert found[position] == expected


def reduced(rank: int, num_ranks: int, case: Case) -> tuple[set[Any], set[Any], Any]:
    """Dtypes of reductions, of gradients, and of the loss."""
    plan = case.made
    executor = make_executor(case, rank, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dtypes = set()
    real = dist.reduce_scatter_single

    def record(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.add(output.dtype)
        return real(output, *args, **kwargs)

    with patch.object(dist, "reduce_scatter_single", record):
        total = executor.run(load(executor, plan, make_tokens(plan)))
    grads = {p.grad.dtype for p in executor.root.parameters() if p.grad is not None}
    return dtypes, grads, total.dtype


@pytest.mark.parametrize("keys", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_reductions_gradients_and_the_loss_are_float32_under_bfloat16(pool: RankPool, keys: dict[str, Any]) -> None:
    case = Case(keys, nested_plan(GroupTree((2, 2))).to_json())
    for found in pool.run(reduced, case, ranks=4):
        assert found == ({torch.float32}, {torch.float32}, torch.float32)
