"""Bytes that attention copies in each turn of a Ulysses group are those that the cost model charges."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestsp.attention.hybrid import backward_phases, forward_phases
from nestsp.attention.local import Segments
from nestsp.attention.work import GroupWork
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree, share_sizes
from nestsp.comm.exchange import Exchange
from nestsp.comm.groups import Link
from nestsp.comm.threads import run_as_threads
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.moves import LevelSizes, layer_moves
from nestsp.plan import Keep, Microbatch, Placement, Plan
from nestsp.schedule import Pass, make_schedule
from nestsp.shape import head_shares, head_slices

DTYPE = torch.bfloat16
SHAPE = dataclasses.replace(known_model("qwen3-30b-a3b"), num_heads=16, num_kv_heads=4, head_dim=8)
TOKENS, DEGREE = 12, 2


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the computing dtype that are copied, and not those of sums and log-sum-exps."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::cat", "aten::clone", "aten::copy_", "aten::_foreach_copy_"):
            written = args[0] if function._schema.name == "aten::_foreach_copy_" else [result]
            self.num_bytes += sum(x.nbytes for x in written if x.dtype == DTYPE)
        return result


class LikeCudaFlash:
    """Computes nothing; backward makes dense what PyTorch's kernel for GPUs wants so."""

    name = "nothing"

    def adapted(self, window: int | None, softcap: float | None) -> Any:
        raise NotImplementedError

    def forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), torch.zeros(q.shape[1], q.shape[0])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out))
        dout.contiguous()
        out.contiguous()
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def copied(generator: Generator[Exchange, None, Any]) -> tuple[list[int], Any]:
    """Bytes copied in each turn; waiting, as on a wire, is none of them."""
    found: list[int] = []
    while True:
        with Copies() as copies:  # type: ignore[no-untyped-call]
            try:
                exchange = next(generator)
            except StopIteration as end:
                return [*found, copies.num_bytes], end.value
        found.append(copies.num_bytes)
        exchange.wait()


def attention(keep: Keep, num_slices: int) -> Mapping[Pass, list[list[int]]]:
    """Bytes copied by each rank in each turn."""
    heads, sizes = head_shares(SHAPE.num_heads, SHAPE.num_kv_heads, DEGREE), share_sizes(TOKENS, DEGREE)
    slices = head_slices(heads, num_slices) if num_slices > 1 else ()

    def work(rank: int, links: Mapping[int, Link]) -> tuple[list[int], list[int]]:
        segments, rows = Segments.of((TOKENS,), torch.device("cpu")), slice(0, sizes[rank])
        group = GroupWork(0, links[0], rank, sizes, rows, segments, heads, keep, None, slices)
        counts = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads, SHAPE.num_heads)
        q, k, v, dout = (torch.zeros(sizes[rank], n, SHAPE.head_dim, dtype=DTYPE) for n in counts)
        forward, (_, saved) = copied(forward_phases(group, LikeCudaFlash(), 1.0, q, k, v, None))
        backward, _ = copied(backward_phases(group, LikeCudaFlash(), 1.0, SHAPE.num_kv_heads, saved, dout))
        return forward, backward

    forward, backward = zip(*run_as_threads(GroupTree((DEGREE,)), work), strict=True)
    return {Pass.FORWARD: list(forward), Pass.BACKWARD: list(backward)}


def charged(cost: CostModel, placement: Placement, which: Pass) -> list[list[float]]:
    """The same by the cost model, for which nothing else takes time."""
    batch = SequenceBatch.of_lengths([TOKENS])
    plan = Plan(cost.tree, batch, (Microbatch((placement,), 0),), tuple(range(cost.tree.num_levels)), "test")
    moves = layer_moves(make_schedule(plan), 0, which, LevelSizes.of(plan, 0, cost), cost)
    return [[float(move.before_s[0, rank]) / cost.compute.copy_s for move in moves] for rank in range(DEGREE)]


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_each_turn_copies_the_bytes_that_the_cost_model_charges(keep: Keep, num_slices: int) -> None:
    free = {"launch_s": 0.0, "attention_forward_launch_s": 0.0, "attention_backward_launch_s": 0.0}
    fast = {"attention_forward_flops_per_s": 1e60, "attention_backward_flops_per_s": 1e60}
    profile = dataclasses.replace(load_profile("h100"), **free, **fast)  # type: ignore[arg-type]
    cost = make_cost_model(SHAPE, Cluster(1, DEGREE), profile, element_bytes=DTYPE.itemsize)
    placement = Placement(cost.tree.group(0, 0), (0,), 1, keep, num_slices)
    for which, found in attention(keep, num_slices).items():
        for copied_here, charged_here in zip(found, charged(cost, placement, which), strict=True):
            assert charged_here == pytest.approx(copied_here, rel=1e-9), which
