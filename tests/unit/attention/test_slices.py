"""All members of a sliced Ulysses group in one process: what is exchanged lies in a table instead of on a wire."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nestsp.attention import ulysses
from nestsp.attention.hybrid import backward_phases, forward_phases
from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Kernel, Segments
from nestsp.attention.work import GroupWork, Kept
from nestsp.cluster import share_sizes
from nestsp.comm.exchange import pieces
from nestsp.plan import Keep
from nestsp.shape import head_shares, head_slices

CPU = torch.device("cpu")
LENGTHS = (7, 5, 1)
SIZE = 8


class Mail:
    """What one member has sent, in order, in place of its group's link."""

    def __init__(self, degree: int, member: int) -> None:
        self.degree, self.member = degree, member
        self.sent, self.mails = list[Any](), list[Mail]()

    def start_exchange(
        self, sent: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], shapes: Sequence[Any]
    ) -> Any:
        number, mails, member = len(self.sent), self.mails, self.member
        self.sent.append(sent.clone().split(list(in_sizes)))

        class Arriving:
            def finish(self) -> list[Tensor]:
                came = [mail.sent[number][member] for mail in mails]
                assert list(map(len, came)) == list(out_sizes)
                return pieces(torch.cat(came), shapes)

        return Arriving()


class Noting:
    """Notes how many messages its member had sent when it ran."""

    name = "noting"

    def __init__(self, mail: Mail, noted: list[int]) -> None:
        self.mail, self.noted = mail, noted

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        raise NotImplementedError

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.noted.append(len(self.mail.sent))
        return CpuFlash().forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.noted.append(len(self.mail.sent))
        return CpuFlash().backward(*args)


def together(generators: Sequence[Generator[Any, None, Any]]) -> tuple[list[Any], int]:
    """Advance all members to each exchange; what they return, and the number of exchanges."""
    results: dict[int, Any] = {}
    rounds = 0
    while len(results) < len(generators):
        for member, generator in enumerate(generators):
            try:
                next(generator)
            except StopIteration as end:
                results[member] = end.value
        rounds += 1
    return [results[member] for member in range(len(generators))], rounds - 1


def attention(
    degree: int,
    num_slices: int,
    keep: Keep,
    inputs: Sequence[Tensor],
    sinks: Tensor | None,
    *,
    recomputed: bool = False,
    overlaps: bool = True,
    noted: list[int] | None = None,
) -> tuple[list[Tensor], tuple[int, int]]:
    """out, dq, dk, dv and the sinks' gradient of a group; and its exchanges, forward and backward."""
    q, k, v, dout = inputs
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    heads = head_shares(num_heads, num_kv_heads, degree)
    sizes = share_sizes(len(q), degree)
    mails = [Mail(degree, member) for member in range(degree)]
    works, rows = [], []
    for member, stop in enumerate(accumulate(sizes)):
        mails[member].mails = mails
        link: Any = mails[member]
        slices = head_slices(heads, num_slices) if num_slices > 1 else ()
        rows.append(slice(stop - sizes[member], stop))
        segments = Segments.of(LENGTHS, CPU)
        works.append(GroupWork(0, link, member, sizes, rows[-1], segments, heads, keep, None, slices, overlaps))
    kernels: list[Kernel] = [CpuFlash()] * degree
    if noted is not None:
        kernels[0] = Noting(mails[0], noted)
    with patch.object(ulysses, "start_exchange", lambda link, *args: link.start_exchange(*args)):
        kept: Sequence[Kept | None] = [None] * degree
        for _ in range(1 + recomputed):
            done, forward = together(
                [
                    forward_phases(w, one, 0.3, q[r], k[r], v[r], had, sinks)
                    for w, one, r, had in zip(works, kernels, rows, kept, strict=True)
                ]
            )
            if keep == "output":
                kept = [Kept(out, saved.lse) for out, saved in done]
        for mail in mails:
            mail.sent.clear()
        grads, backward = together(
            [
                backward_phases(w, one, 0.3, num_kv_heads, saved, dout[r], sinks)
                for w, one, r, (_, saved) in zip(works, kernels, rows, done, strict=True)
            ]
        )
    results = [
        torch.cat(parts)
        for parts in zip(*((out, *g[:3]) for (out, _), g in zip(done, grads, strict=True)), strict=True)
    ]
    if sinks is not None:
        results.append(torch.stack([g[3] for g in grads]).sum(0))
    return results, (forward, backward)


def draw(heads: int, kv_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), n, SIZE, dtype=torch.float64) for n in (heads, kv_heads, kv_heads, heads)]


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("num_slices", [2, 3, 5])
@pytest.mark.parametrize("heads", [(12, 4), (6, 3), (7, 7), (6, 1), (2, 1)], ids=str)
def test_slices_give_the_attention_of_one_piece_and_of_one_rank(
    heads: tuple[int, int], num_slices: int, keep: Keep
) -> None:
    """Heads that do not divide, one key/value head for several slices and ranks, ranks without a head; with sinks."""
    inputs = draw(*heads)
    for sinks in (None, torch.randn(heads[0], dtype=torch.float64)):
        whole, nothing = attention(1, 1, keep, inputs, sinks)
        assert nothing == (0, 0)
        for degree in (2, 3):
            one_piece, (forward, backward) = attention(degree, 1, keep, inputs, sinks)
            assert (forward, backward) == (2, 2)
            sliced, (forward, backward) = attention(degree, num_slices, keep, inputs, sinks)
            assert (forward, backward) == (num_slices + 2, num_slices + 2)
            for found, other, wanted in zip(sliced, one_piece, whole, strict=True):
                assert torch.allclose(found, wanted, rtol=0, atol=1e-13)
                assert torch.allclose(other, wanted, rtol=0, atol=1e-13)


def test_slices_that_do_not_overlap_are_attended_to_before_the_next_is_asked_for() -> None:
    inputs, streamed, in_turn = draw(12, 4), list[int](), list[int]()
    overlapped, _ = attention(2, 3, "none", inputs, None, noted=streamed)
    found, exchanges = attention(2, 3, "none", inputs, None, overlaps=False, noted=in_turn)
    assert all(map(torch.equal, found, overlapped))
    assert exchanges == (5, 5)
    assert streamed == [2, 3, 4] * 2
    assert in_turn == [1, 2, 3] * 2


def test_a_recompute_of_kept_slices_exchanges_nothing() -> None:
    inputs = draw(6, 3)
    whole, _ = attention(1, 1, "none", inputs, None)
    found, (forward, backward) = attention(2, 3, "output", inputs, None, recomputed=True)
    assert (forward, backward) == (0, 5)
    for one, other in zip(found, whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_gradients_of_keys_that_several_slices_share_are_summed_wide() -> None:
    """In bf16, four slices of one key/value head: a sum rounded after each slice would be further off."""
    inputs = [x.bfloat16() for x in draw(8, 1)]
    exact, _ = attention(1, 1, "none", [x.double() for x in inputs], None)

    def errors(num_slices: int) -> list[float]:
        found, _ = attention(2, num_slices, "none", inputs, None)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    for error, least in zip(errors(4), errors(1), strict=True):
        assert error < 1.5 * least
