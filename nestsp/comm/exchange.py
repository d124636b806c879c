"""The two communications that attention needs. Starting and finishing one are two lines.

- `start_exchange`: an all-to-all with unequal splits that carries several tensors at once.
- `start_pass`: a ring's step; tensors go to one member, others come from one.

Tensors for one peer are laid one after another in one buffer, so each is one collective whatever it carries. Each
element is copied once before it is sent, and not again until its reader asks for it in another layout.

A pass is an all-to-all as well, with nothing for all but the two neighbours: on every backend it runs on the group's
own communicator, in the order in which the group's collectives are issued, with the same errors and timeouts; NCCL and
gloo send nothing where a split is empty. Point-to-point calls would bring NCCL to set up a communicator for each pair
(unless all of them are batched) and gloo to match messages by tag rather than by order. The price is two lists of
``degree`` numbers for each pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist

from nestsp.comm.groups import Link

__all__ = ["Exchange", "Shape", "start_exchange", "start_pass"]

Shape = tuple[int, ...]
Announced = Sequence[Sequence[tuple[Shape, torch.dtype]]]  # for each member, what it sends here


class Exchange:
    """A communication on the wire. Holds its buffers until it is finished."""

    __slots__ = ("_announced", "_done", "_received", "_sent")

    def __init__(
        self, sent: torch.Tensor, received: torch.Tensor, announced: Announced, done: dist.Work | torch.cuda.Event
    ) -> None:
        self._sent: torch.Tensor | None = sent
        self._received: torch.Tensor | None = received
        self._announced = announced
        self._done: dist.Work | torch.cuda.Event | None = done

    def wait(self) -> None:
        """Wait until everything has arrived, if that is not known yet. On GPUs the stream waits, not the host."""
        if self._done is not None:
            self._done.wait()
        self._done = None

    def finish(self) -> list[list[torch.Tensor]]:
        """Wait until everything has arrived, and take it.

        Returns:
            For each member, the tensors it sent, in the shapes that were announced.
        """
        self.wait()
        received = self._received
        assert received is not None, "an exchange is finished once"
        self._sent = self._received = None  # whoever still holds the exchange holds no memory
        pieces = iter(_pieces(received, [piece for announced in self._announced for piece in announced]))
        return [list(islice(pieces, len(announced))) for announced in self._announced]


def _pieces(buffer: torch.Tensor, layout: Sequence[tuple[Shape, torch.dtype]]) -> list[torch.Tensor]:
    """Tensors that lie one after another in a buffer and fill it."""
    sizes = [math.prod(shape) * dtype.itemsize // buffer.itemsize for shape, dtype in layout]
    cut = zip(buffer.split(sizes), layout, strict=True)
    return [(x if x.dtype == dtype else x.view(dtype)).view(shape) for x, (shape, dtype) in cut]


def start_exchange(link: Link, parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Shape]]) -> Exchange:
    """Send some tensors to each member of a group, and begin to receive theirs.

    Args:
        link: The group.
        parts: For each member, the tensors for it, one dtype in all; empty tensors, and none for some members, are
            fine.
        shapes: For each member, the shapes of the tensors that it sends here.
    """
    assert len(parts) == len(shapes) == link.degree
    like = next(tensor for member in parts for tensor in member)
    announced = [[(shape, like.dtype) for shape in member] for member in shapes]
    return _start(link, parts, announced, like.dtype, like.device)


def start_pass(
    link: Link, target: int, tensors: Sequence[torch.Tensor], source: int, shapes: Sequence[Shape]
) -> Exchange:
    """Send tensors to one member of a group, and begin to receive as many from another.

    Every member must call it, and the targets must be a permutation. The buffer is of bytes, so that tensors of several
    dtypes travel together.

    Args:
        link: The group.
        target: The member that gets the tensors.
        tensors: Wider dtypes first, so that each lies at a multiple of its element's size.
        source: The member whose tensors come here; as many, of the same dtypes.
        shapes: Of what comes.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    assert dtypes == sorted(dtypes, key=lambda dtype: -dtype.itemsize)
    announced = list(zip(shapes, dtypes, strict=True))
    members = range(link.degree)
    return _start(
        link,
        [tensors if member == target else () for member in members],
        [announced if member == source else () for member in members],
        torch.uint8,
        tensors[0].device,
    )


def _start(
    link: Link,
    parts: Sequence[Sequence[torch.Tensor]],
    announced: Announced,
    wire_dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    width = wire_dtype.itemsize
    in_sizes = [sum(tensor.nbytes for tensor in member) // width for member in parts]
    out_sizes = [sum(math.prod(shape) * dtype.itemsize for shape, dtype in member) // width for member in announced]
    sent = torch.empty(sum(in_sizes), dtype=wire_dtype, device=device)
    tensors = [tensor for member in parts for tensor in member]
    places = _pieces(sent, [(tensor.shape, tensor.dtype) for tensor in tensors])
    if tensors:  # in one call: a large group's exchange has hundreds, and each would cost the host some microseconds
        torch._foreach_copy_(places, tensors)
    received = torch.empty(sum(out_sizes), dtype=wire_dtype, device=device)
    if link.stream is None:
        work = dist.all_to_all_single(received, sent, out_sizes, in_sizes, group=link.group, async_op=True)
        assert work is not None
        return Exchange(sent, received, announced, work)
    # Issued on the link class's own stream: exchanges of all its groups go out in the order of issue. The buffers stay
    # alive until `finish`, when the current stream has waited for them, so the allocator cannot reuse them early.
    link.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(link.stream):
        dist.all_to_all_single(received, sent, out_sizes, in_sizes, group=link.group)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(link.stream)
    return Exchange(sent, received, announced, done)
