"""The attention of one layer: all groups of a rank, their exchanges and kernels interleaved, forward and backward.

A layer's call makes two autograd nodes joined by an empty token. Forward, `_Start` leaves with the first exchanges on
the wire and `_Finish` waits for the last; backward, the reverse. Neither decides anything: both move the call's one
driver along the turns of the `Schedule`. Two nodes, not one, so that other work can run between them, both ways.

What a group keeps for the recompute of its layer lies in the microbatch's context, as tensors that autograd does not
know: a layer's first call puts them there, its second takes them, and after backward there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nestsp.attention.hybrid import backward_phases, forward_phases
from nestsp.attention.local import Kernel
from nestsp.attention.place import Place
from nestsp.attention.work import Attended, GroupWork, Kept, Saved
from nestsp.schedule import Pass, Turn

__all__ = ["AttentionContext", "attend_groups"]

Result = TypeVar("Result")


class AttentionContext:
    """What attention needs to know of a microbatch. Reaches it as one keyword argument through the model.

    A plain class on purpose: FSDP's mixed precision copies dataclasses, dicts and tuples and casts their tensors.

    Attributes:
        groups: The used groups on this rank's path, by level.
        turns: For each pass, the order in which they take their turns.
        kernel: The attention kernel.
        recomputed_layers: Layers that are recomputed in backward.
        stash: What layers keep for their recompute; by layer, then level.
        timed: Entered around each of a layer's two nodes, in each pass; measures them.
        place: Is told of every turn.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupWork],
        turns: Mapping[Pass, tuple[Turn, ...]],
        kernel: Kernel,
        recomputed_layers: frozenset[int],
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        place: Place | None = None,
    ) -> None:
        self.groups = groups
        self.turns = turns
        self.kernel = kernel
        self.recomputed_layers = recomputed_layers
        self.timed = timed
        self.place = place or Place()
        self.stash: dict[int, dict[int, Kept]] = {}


def attend_groups(
    context: AttentionContext, layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None
) -> Tensor:
    """Attention of all sequences of which this rank holds tokens or heads.

    Args:
        context: The microbatch.
        layer: Number of the layer.
        scale: Factor of the scores.
        q: [T, N, H], all tokens that this rank holds, in the order of its spans; or one filler token.
        k: [T, K, H].
        v: [T, K, H].
        window: How many keys of its sequence a query sees, itself and those before it; None for all.

    Returns:
        [T, N, H]; zeros for a filler token.
    """
    driver = _Driver(context, layer, scale, q, k, v, window)
    token = _Start.apply(q, k, v, driver)  # type: ignore[no-untyped-call]
    out: Tensor = _Finish.apply(token, driver)  # type: ignore[no-untyped-call]
    return out


class _Driver:
    """Moves the groups of one layer call along their turns. Holds no tensor once a pass is over."""

    def __init__(
        self, context: AttentionContext, layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> None:
        num_rows = sum(work.num_rows for work in context.groups.values())
        assert len(q) == max(num_rows, 1), f"attention got {len(q)} tokens, but its groups have {num_rows} here"
        self.context, self.layer, self.scale = context, layer, scale
        self.kernel = context.kernel if window is None else context.kernel.windowed(window)
        self.shapes = (q.shape, k.shape, v.shape)
        self.inputs: tuple[Tensor, Tensor, Tensor] | None = (q.detach(), k.detach(), v.detach())
        kept = context.stash.pop(layer, None)
        self.which = Pass.FORWARD if kept is None else Pass.RECOMPUTE
        self.kept: Mapping[int, Kept] = kept or {}
        # Where nothing needs a gradient (frozen first layers), no recompute may come that would take it.
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        recomputed = layer in context.recomputed_layers
        self.puts = needs_grad and recomputed and kept is None
        # A recompute's tensors live until the layer's own backward, others until the whole model's.
        self.saves_long = needs_grad and not recomputed
        self.forward: _Run[Attended] | None = None
        self.backward: _Run[tuple[Tensor, Tensor, Tensor]] | None = None

    def start_forward(self) -> None:
        assert self.inputs is not None
        q, k, v = self.inputs
        work = self.context.groups
        self.forward = _Run(
            self._enter(self.which),
            self.context.turns[self.which],
            lambda level: forward_phases(
                work[level],
                self.kernel,
                self.scale,
                q[work[level].rows],
                k[work[level].rows],
                v[work[level].rows],
                self.kept.get(level),
            ),
        )
        self.forward.open()

    def finish_forward(self) -> tuple[Tensor, tuple[Saved, ...]]:
        assert self.forward is not None and self.inputs is not None
        done = self.forward.close()
        out = torch.zeros_like(self.inputs[0], memory_format=torch.contiguous_format)
        for level, (part, _) in done.items():
            out[self.context.groups[level].rows] = part
        if self.puts:
            self.context.stash[self.layer] = {
                level: Kept(result.out, result.saved.lse)
                for level, result in done.items()
                if self.context.groups[level].keep == "output"
            }
        self.forward = self.inputs = None
        self.kept = {}
        saved = tuple(done[level].saved for level in sorted(done))
        if self.saves_long:
            saved = tuple(Saved(*(_alone(tensor) for tensor in group)) for group in saved)
        return out, saved

    def start_backward(self, saved: Sequence[Saved], dout: Tensor) -> None:
        work = self.context.groups
        by_level = dict(zip(sorted(work), saved, strict=True))
        num_kv_heads = self.shapes[1][1]
        self.backward = _Run(
            self._enter(Pass.BACKWARD),
            self.context.turns[Pass.BACKWARD],
            lambda level: backward_phases(
                work[level], self.kernel, self.scale, num_kv_heads, by_level.pop(level), dout[work[level].rows]
            ),
        )
        self.backward.open()

    def _enter(self, which: Pass) -> Place:
        place = self.context.place
        place.layer, place.which, place.turn = self.layer, which, None
        return place

    def finish_backward(self, like: Tensor) -> list[Tensor]:
        assert self.backward is not None
        done = self.backward.close()
        grads = [like.new_zeros(shape) for shape in self.shapes]
        for level, parts in done.items():
            for grad, part in zip(grads, parts, strict=True):
                grad[self.context.groups[level].rows] = part
        self.backward = None
        return grads


class _Run(Generic[Result]):
    """The groups' generators in one pass, advanced turn by turn."""

    def __init__(
        self, place: Place, turns: Sequence[Turn], begin: Callable[[int], Generator[None, None, Result]]
    ) -> None:
        self.at, self.turns, self.begin = place, turns, begin
        self.place = 0
        self.running: dict[int, Generator[None, None, Result]] = {}
        self.done: dict[int, Result] = {}

    def open(self) -> None:
        """Take the turns that leave with an exchange on the wire."""
        while self.place < len(self.turns) and self.turns[self.place].opens:
            self._take(self.turns[self.place])

    def close(self) -> dict[int, Result]:
        """Take all other turns; every group has then ended."""
        while self.place < len(self.turns):
            self._take(self.turns[self.place])
        assert not self.running, f"levels {sorted(self.running)} have more exchanges than the schedule"
        return self.done

    def _take(self, turn: Turn) -> None:
        self.place += 1
        self.at.turn = turn
        if turn.number == 0:
            self.running[turn.level] = self.begin(turn.level)
        try:
            next(self.running[turn.level])
        except StopIteration as end:
            self.done[turn.level] = end.value
            del self.running[turn.level]


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it would keep a larger one alive."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Start(torch.autograd.Function):
    """Forward: the first exchanges leave. Backward: the last ones arrive."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, driver: _Driver) -> Tensor:
        ctx.driver = driver
        with driver.context.timed():
            driver.start_forward()
        return q.new_empty(0)  # a token: it orders the two nodes and carries no data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        driver: _Driver = ctx.driver
        with driver.context.timed():
            return (*driver.finish_backward(grads[0]), None)


class _Finish(torch.autograd.Function):
    """Forward: the last exchanges arrive. Backward: the first ones leave."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, driver: _Driver) -> Tensor:
        ctx.driver = driver
        with driver.context.timed():
            out, saved = driver.finish_forward()
        ctx.save_for_backward(*(tensor for group in saved for tensor in group))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        driver: _Driver = ctx.driver
        flat = ctx.saved_tensors  # recomputes the layer, if it is one that is recomputed
        saved = [Saved(*flat[i : i + len(Saved._fields)]) for i in range(0, len(flat), len(Saved._fields))]
        with driver.context.timed():
            driver.start_backward(saved, grads[0])
        return grads[0].new_empty(0), None
