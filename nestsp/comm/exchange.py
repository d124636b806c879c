"""One all-to-all with unequal splits that carries several tensors at once. Starting and finishing it are two lines.

Tensors for one peer are laid one after another in one buffer, so an exchange is one collective whatever it carries.
Each element is copied once before it is sent, and not again until its reader asks for it in another layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nestsp.comm.groups import Link

__all__ = ["Exchange", "start_exchange"]

Shape = tuple[int, ...]


class Exchange:
    """An all-to-all on the wire. Holds its buffers until it is finished."""

    __slots__ = ("_done", "_received", "_sent", "_shapes")

    def __init__(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        shapes: Sequence[Sequence[Shape]],
        done: dist.Work | torch.cuda.Event,
    ) -> None:
        self._sent: torch.Tensor | None = sent
        self._received: torch.Tensor | None = received
        self._shapes, self._done = shapes, done

    def finish(self) -> list[list[torch.Tensor]]:
        """Wait until everything has arrived. On GPUs the current stream waits, not the host.

        Returns:
            For each member, the tensors it sent, in the shapes that were announced.
        """
        if isinstance(self._done, torch.cuda.Event):
            self._done.wait()
        else:
            self._done.wait()
        received = self._received
        assert received is not None, "an exchange is finished once"
        self._sent = self._received = None  # whoever still holds the exchange holds no memory
        pieces: list[list[torch.Tensor]] = []
        start = 0
        for member_shapes in self._shapes:
            tensors = []
            for shape in member_shapes:
                size = math.prod(shape)
                tensors.append(received[start : start + size].view(shape))
                start += size
            pieces.append(tensors)
        return pieces


def start_exchange(link: Link, parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Shape]]) -> Exchange:
    """Send some tensors to each member of a group, and begin to receive theirs.

    Args:
        link: The group.
        parts: For each member, the tensors for it, one dtype in all; empty tensors are fine.
        shapes: For each member, the shapes of the tensors that it sends here.
    """
    assert len(parts) == len(shapes) == link.degree
    like = parts[0][0]
    in_sizes = [sum(tensor.numel() for tensor in member) for member in parts]
    out_sizes = [sum(math.prod(shape) for shape in member) for member in shapes]
    sent = like.new_empty(sum(in_sizes))
    start = 0
    for member in parts:
        for tensor in member:
            stop = start + tensor.numel()
            sent[start:stop].view(tensor.shape).copy_(tensor)
            start = stop
    received = like.new_empty(sum(out_sizes))
    if link.stream is None:
        work = dist.all_to_all_single(received, sent, out_sizes, in_sizes, group=link.group, async_op=True)
        assert work is not None
        return Exchange(sent, received, shapes, work)
    # Issued on the link class's own stream: exchanges of all its groups go out in the order of issue. The buffers stay
    # alive until `finish`, when the current stream has waited for them, so the allocator cannot reuse them early.
    link.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(link.stream):
        dist.all_to_all_single(received, sent, out_sizes, in_sizes, group=link.group)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(link.stream)
    return Exchange(sent, received, shapes, done)
