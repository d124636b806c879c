"""The two communications that attention needs. Starting and finishing one are two lines.

- `start_exchange`: an all-to-all with unequal splits. Who asks for it lays out what leaves, and says what arrives.
- `start_pass`: a ring's step; tensors go to one member, others come from one.

Each is one collective whatever it carries: what leaves is one buffer, in the order of the members, and so is what
arrives. Tensors that come are views of the one that arrived.

A pass is an all-to-all as well, with nothing for all but the two neighbours: on every backend it runs on the group's
own communicator, in the order in which the group's collectives are issued, with the same errors and timeouts; NCCL and
gloo send nothing where a split is empty. Point-to-point calls would bring NCCL to set up a communicator for each pair
(unless all of them are batched) and gloo to match messages by tag rather than by order. The price is two lists of
``degree`` numbers for each pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.comm.groups import Link

__all__ = ["Exchange", "Shape", "pieces", "start_exchange", "start_pass"]

Shape = tuple[int, ...]
Layout = Sequence[tuple[Shape, torch.dtype]]  # tensors that lie one after another in a buffer


class Exchange:
    """A communication on the wire. Holds its buffers until it is finished."""

    __slots__ = ("_done", "_layout", "_received", "_sent")

    def __init__(self, sent: Tensor, received: Tensor, layout: Layout, done: dist.Work | torch.cuda.Event) -> None:
        self._sent: Tensor | None = sent
        self._received: Tensor | None = received
        self._layout = layout
        self._done: dist.Work | torch.cuda.Event | None = done

    def wait(self) -> None:
        """Wait until everything has arrived, if that is not known yet. On GPUs the stream waits, not the host."""
        if self._done is not None:
            self._done.wait()
        self._done = None

    def finish(self) -> list[Tensor]:
        """Wait until everything has arrived, and take it.

        Returns:
            What came, in the shapes that were announced: views of one buffer, which lives as long as any of them.
        """
        self.wait()
        received = self._received
        assert received is not None, "an exchange is finished once"
        self._sent = self._received = None  # whoever still holds the exchange holds no memory
        return _views(received, self._layout)


def pieces(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors that lie one after another in a buffer and fill it, as views."""
    return _views(buffer, [(shape, buffer.dtype) for shape in shapes])


def _views(buffer: Tensor, layout: Layout) -> list[Tensor]:
    sizes = [math.prod(shape) * dtype.itemsize // buffer.itemsize for shape, dtype in layout]
    cut = zip(buffer.split(sizes), layout, strict=True)
    return [(x if x.dtype == dtype else x.view(dtype)).view(shape) for x, (shape, dtype) in cut]


def start_exchange(
    link: Link, sent: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], shapes: Sequence[Shape]
) -> Exchange:
    """Send a part of a buffer to each member of a group, and begin to receive theirs.

    Args:
        link: The group.
        sent: [sum(in_sizes)], what goes to each member, one part after another. Nobody may write to it before the
            exchange is finished.
        in_sizes: Elements for each member; may be 0.
        out_sizes: Elements from each member.
        shapes: Of the tensors that come, in the order of the members; what several send may be one of them.
    """
    assert len(in_sizes) == len(out_sizes) == link.degree
    return _start(link, sent, in_sizes, out_sizes, [(shape, sent.dtype) for shape in shapes])


def start_pass(link: Link, target: int, tensors: Sequence[Tensor], source: int, shapes: Sequence[Shape]) -> Exchange:
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
    layout = list(zip(shapes, dtypes, strict=True))
    sent = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)
    torch._foreach_copy_(_views(sent, [(tensor.shape, tensor.dtype) for tensor in tensors]), list(tensors))
    in_sizes, out_sizes = [0] * link.degree, [0] * link.degree
    in_sizes[target] = sent.numel()
    out_sizes[source] = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)
    return _start(link, sent, in_sizes, out_sizes, layout)


def _start(link: Link, sent: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], layout: Layout) -> Exchange:
    received = sent.new_empty(sum(out_sizes))
    if link.stream is None:
        work = dist.all_to_all_single(received, sent, list(out_sizes), list(in_sizes), group=link.group, async_op=True)
        assert work is not None
        return Exchange(sent, received, layout, work)
    # Issued on the link class's own stream: exchanges of all its groups go out in the order of issue. The buffers stay
    # alive until `finish`, when the current stream has waited for them, so the allocator cannot reuse them early.
    link.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(link.stream):
        dist.all_to_all_single(received, sent, list(out_sizes), list(in_sizes), group=link.group)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(link.stream)
    return Exchange(sent, received, layout, done)
