"""All members of a ring in one process: messages lie in a table instead of on a wire."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nestsp.attention import ring
from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Kernel, Mask, Segments, attend, attend_backward
from nestsp.attention.ring import around_backward, around_forward, make_ring
from nestsp.attention.work import GroupWork
from nestsp.shape import head_shares
from nestsp.shard import zigzag

CPU = torch.device("cpu")
LENGTHS = (250, 61, 3)
HEADS, KV_HEADS, SIZE = 4, 2, 16


class Mail:
    """What one member has sent, in order, and which of its neighbour's messages it takes next."""

    def __init__(self, degree: int) -> None:
        self.degree, self.sent, self.mails = degree, list[Any](), list[Mail]()

    def start_pass(self, target: int, tensors: Sequence[Tensor], source: int, shapes: Sequence[Any]) -> Any:
        number, mails = len(self.sent), self.mails
        self.sent.append([tensor.clone() for tensor in tensors])

        class Arriving:
            def finish(self) -> list[Tensor]:
                came: list[Tensor] = mails[source].sent[number]
                assert [tuple(tensor.shape) for tensor in came] == [tuple(shape) for shape in shapes]
                return came

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


def together(generators: Sequence[Generator[Any, None, Any]]) -> list[Any]:
    """Advance all members to each pass, and return what they return."""
    results: dict[int, Any] = {}
    while len(results) < len(generators):
        for member, generator in enumerate(generators):
            try:
                next(generator)
            except StopIteration as end:
                results[member] = end.value
    return [results[member] for member in range(len(generators))]


def around(
    degree: int, inputs: Sequence[Tensor], *, overlaps: bool = True, noted: list[int] | None = None
) -> list[Tensor]:
    """out, dq, dk and dv of a ring, put back in the order of the sequences; what the first member's kernel noted."""
    q, k, v, dout = inputs
    edges = zigzag(LENGTHS, degree)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    works, rows = [], []
    mails = [Mail(degree) for _ in range(degree)]
    for mail in mails:
        mail.mails = mails
    for place in range(degree):
        layout, segments = make_ring(edges, place, CPU)
        chunks = [
            torch.arange(start + e[c], start + e[c + 1])
            for start, e in zip(starts, edges, strict=True)
            for c in (place, 2 * degree - 1 - place)
        ]
        rows.append(torch.cat(chunks))
        link: Any = mails[place]
        size = len(rows[-1])
        heads = head_shares(HEADS, KV_HEADS, 1)
        works.append(GroupWork(0, link, place, (size,), slice(0, size), segments, heads, "none", layout, (), overlaps))
    kernels: list[Kernel] = [CpuFlash()] * degree
    if noted is not None:
        kernels[0] = Noting(mails[0], noted)
    with patch.object(ring, "start_pass", lambda link, *args: link.start_pass(*args)):
        done = together(
            [around_forward(w, one, 0.3, q[r], k[r], v[r]) for w, one, r in zip(works, kernels, rows, strict=True)]
        )
        for mail in mails:
            mail.sent.clear()
        grads = together(
            [
                around_backward(w, one, 0.3, dout[r], q[r], k[r], v[r], *result)
                for w, one, r, result in zip(works, kernels, rows, done, strict=True)
            ]
        )
    results = [torch.empty_like(x) for x in (q, q, k, v)]
    for r, (out, _), parts in zip(rows, done, grads, strict=True):
        for whole, part in zip(results, (out, *parts), strict=True):
            whole[r] = part
    return results


def draw(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), n, SIZE).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def whole(inputs: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, dout = inputs
    mask, heads = Mask.causal(Segments.of(LENGTHS, CPU)), (0, 0, 1, 1)
    out, lse = attend(CpuFlash(), q, k, v, mask, 0.3, heads)
    return [out, *attend_backward(CpuFlash(), dout, q, k, v, out, lse, mask, 0.3, heads)]


@pytest.mark.parametrize("degree", [2, 3, 4, 5, 6, 7, 8])
def test_E11_a_ring_of_any_size_is_the_whole_attention(degree: int) -> None:
    inputs = draw(torch.float64)
    for found, wanted in zip(around(degree, inputs), whole(inputs), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_ring_that_does_not_overlap_computes_before_it_passes_on(degree: int) -> None:
    inputs, streamed, in_turn = draw(torch.float64), list[int](), list[int]()
    overlapped = around(degree, inputs, noted=streamed)
    found = around(degree, inputs, overlaps=False, noted=in_turn)
    assert all(map(torch.equal, found, overlapped))
    blocks = list(range(degree))
    assert in_turn == blocks * 2
    sent_after = [*range(1, degree), degree - 1]
    # Backward, the last block is computed while the gradients of the one before travel, if there is one between.
    assert streamed == [*sent_after, *sent_after[:-1], degree if degree > 2 else degree - 1]


def test_E14_rounding_of_bf16_does_not_grow_with_the_ring() -> None:
    """Against float64 on the same bf16 inputs; sums that were rounded in each hop would grow with their number."""
    inputs = draw(torch.bfloat16)
    exact = whole([x.double() for x in inputs])

    def errors(found: Sequence[Tensor]) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    alone = errors(whole(inputs))
    for degree in (2, 4, 8, 16):
        for error, least in zip(errors(around(degree, inputs)), alone, strict=True):
            assert error < 1.5 * least, degree
