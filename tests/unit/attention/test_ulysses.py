"""What a Ulysses exchange sends and gives, on ranks that are threads: nothing is copied where the heads are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import get_ident
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.attention.hybrid import backward_phases, forward_phases
from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Segments
from nestsp.attention.streaming import AttentionContext, attend_groups
from nestsp.attention.ulysses import heads_to_tokens, tokens_to_heads
from nestsp.attention.work import GroupWork
from nestsp.cluster import GroupTree
from nestsp.comm.groups import Link
from nestsp.comm.threads import run_as_threads
from nestsp.plan import Keep
from nestsp.schedule import Pass, Turn
from nestsp.shape import head_shares, head_slices

CPU = torch.device("cpu")
DEGREE, SIZE = 3, 4
SIZES = (5, 0, 3)  # a rank without tokens
HEADS = [(6, 3), (5, 1), (2, 2)]  # as many for each rank; one more for some; a rank without heads


@dataclass(frozen=True, slots=True)
class Sent:
    """One all-to-all of a rank."""

    received: Tensor
    sent: Tensor
    in_sizes: Sequence[int]


def on_threads(work: Callable[[int, Link], Any]) -> tuple[list[Any], list[list[Sent]]]:
    """What ranks returned, and their all-to-alls."""
    calls: dict[int, list[Sent]] = {}
    all_to_all = dist.all_to_all_single

    def noted(received: Tensor, sent: Tensor, out_sizes: Any, in_sizes: Any, **options: Any) -> Any:
        calls.setdefault(get_ident(), []).append(Sent(received, sent, in_sizes))
        return all_to_all(received, sent, out_sizes, in_sizes, **options)

    def run(rank: int, links: Mapping[int, Link]) -> tuple[int, Any]:
        return get_ident(), work(rank, links[0])

    with patch.object(dist, "all_to_all_single", noted):
        results = run_as_threads(GroupTree((DEGREE,)), run)
    return [result for _, result in results], [calls[thread] for thread, _ in results]


def group_work(rank: int, link: Link, heads: tuple[int, int], keep: Keep = "none", num_slices: int = 1) -> GroupWork:
    shares = head_shares(*heads, DEGREE)
    slices = head_slices(shares, num_slices) if num_slices > 1 else ()
    rows = slice(0, SIZES[rank])
    return GroupWork(0, link, rank, SIZES, rows, Segments.of((7, 1), CPU), shares, keep, None, slices)


def finished(generator: Generator[Any, None, Any]) -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def draw(*heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(SIZES), n, SIZE, dtype=torch.float64) for n in heads]


def rows_of(rank: int, x: Tensor) -> Tensor:
    stop = list(accumulate(SIZES))[rank]
    return x[stop - SIZES[rank] : stop]


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_one_piece_goes_to_each_peer_and_the_tensors_at_the_heads_are_views_of_what_arrived(
    heads: tuple[int, int],
) -> None:
    whole = draw(heads[0], heads[0], heads[0], heads[1], heads[1])
    shares = head_shares(*heads, DEGREE)

    def work(rank: int, link: Link) -> list[Tensor]:
        mine = [rows_of(rank, x) for x in whole]
        found: list[Tensor] = finished(tokens_to_heads(group_work(rank, link, heads), mine[:3], mine[3:]))
        return found

    results, calls = on_threads(work)
    for rank, (tensors, (call,)) in enumerate(zip(results, calls, strict=True)):
        for peer, part in enumerate(call.sent.split(list(call.in_sizes))):
            query, kv = (slice(r.start, r.stop) for r in (shares[peer].query, shares[peer].kv))
            piece = torch.cat([rows_of(rank, x)[:, h] for x, h in zip(whole, [query] * 3 + [kv] * 2, strict=True)], 1)
            assert torch.equal(part.view(piece.shape), piece)
        query, kv = (slice(r.start, r.stop) for r in (shares[rank].query, shares[rank].kv))
        assert {memory(x) for x in tensors} == {memory(call.received)}
        for x, original, of_rank in zip(tensors, whole, [query] * 3 + [kv] * 2, strict=True):
            assert torch.equal(x, original[:, of_rank])
            assert x.stride(2) == 1


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_one_tensor_leaves_the_heads_from_where_it_lies(heads: tuple[int, int]) -> None:
    (whole,) = draw(heads[0])
    shares = head_shares(*heads, DEGREE)

    def work(rank: int, link: Link) -> tuple[Tensor, Tensor]:
        mine = whole[:, shares[rank].query.start : shares[rank].query.stop].clone()
        (home,) = finished(heads_to_tokens(group_work(rank, link, heads), (mine,), (), heads[1]))
        return mine, home

    results, calls = on_threads(work)
    for rank, ((mine, home), (call,)) in enumerate(zip(results, calls, strict=True)):
        assert memory(call.sent) == memory(mine)
        assert torch.equal(home, rows_of(rank, whole))


class Watching:
    """Notes what the kernel is given and gives."""

    name = "watching"

    def __init__(self) -> None:
        self.given, self.gave = list[Tensor](), list[Tensor]()

    def adapted(self, window: int | None, softcap: float | None) -> Any:
        raise NotImplementedError

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = CpuFlash().forward(*args)
        self.given += args[:3]
        self.gave.append(out)
        return out, lse

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.given += args[:5]
        return CpuFlash().backward(*args)


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_kernel_reads_what_arrived_and_its_output_is_what_leaves(keep: Keep, num_slices: int) -> None:
    """In one piece and in two slices, no communication of which goes both ways."""
    heads = (12, 6)
    q, k, v, dout = draw(heads[0], heads[1], heads[1], heads[0])

    def work(rank: int, link: Link) -> tuple[Watching, Watching]:
        group, mine = group_work(rank, link, heads, keep, num_slices), rows_of(rank, q)
        forward, backward = Watching(), Watching()
        _, saved = finished(forward_phases(group, forward, 0.3, mine, rows_of(rank, k), rows_of(rank, v), None))
        finished(backward_phases(group, backward, 0.3, heads[1], saved, rows_of(rank, dout)))
        return forward, backward

    results, calls = on_threads(work)
    for (forward, backward), sent in zip(results, calls, strict=True):
        ahead, back = sent[: num_slices + 1 + (num_slices > 1)], sent[num_slices + 1 + (num_slices > 1) :]
        assert {memory(x) for x in forward.given} == {memory(call.received) for call in ahead[:num_slices]}
        assert [memory(x) for x in forward.gave] == [memory(call.sent) for call in ahead[-num_slices:]]
        brought = backward.given if keep == "output" else backward.given[::5]  # else dout alone
        assert {memory(x) for x in brought} == {memory(call.received) for call in back[:num_slices]}


def test_backward_keeps_views_that_fill_their_buffer_as_they_are() -> None:
    """And a group of which all is saved holds not a byte more than that."""
    q, k, v = draw(6, 3, 3)

    def work(rank: int, link: Link) -> list[Tensor]:
        group = group_work(rank, link, (6, 3))
        turns = {which: tuple(Turn(0, number, opens=number == 0) for number in range(3)) for which in Pass}
        context = AttentionContext({0: group}, turns, CpuFlash(), frozenset())
        filler = max(SIZES[rank], 1) - SIZES[rank]
        inputs = [torch.cat([rows_of(rank, x), x.new_zeros(filler, *x.shape[1:])]).requires_grad_() for x in (q, k, v)]
        held: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            held.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend_groups(context, 0, 0.3, *inputs)
        return held

    results, calls = on_threads(work)
    for held, (call, _) in zip(results, calls, strict=True):
        assert [memory(x) for x in held[:3]] == [memory(call.received)] * 3
        storages = {memory(x): x.untyped_storage().nbytes() for x in held}
        assert sum(storages.values()) == sum(x.nbytes for x in held)
