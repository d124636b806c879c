"""The attention of one layer: all groups of a rank, their exchanges and kernels interleaved, forward and backward.

A layer's call makes two autograd nodes joined by an empty token. Forward, `_Start` leaves with the first exchanges on
the wire and `_Finish` waits for the last; backward, the reverse. Neither decides anything: both move the call's one
driver along the turns of the `Schedule`. Two nodes, not one, so that other work can run between them, both ways.

What a group keeps for the recompute of its layer lies in the microbatch's context, as tensors that autograd does not
know: a layer's first call puts them there, its second takes them, and after backward there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nestsp.attention.gathers import Gathers
from nestsp.attention.hybrid import backward_phases, forward_phases
from nestsp.attention.local import Kernel
from nestsp.attention.merge import wide
from nestsp.attention.place import Place
from nestsp.attention.work import Attended, GroupWork, Kept, Saved
from nestsp.comm.exchange import Exchange
from nestsp.schedule import Pass, Turn

__all__ = ["AttentionContext", "Timer", "Untimed", "attend_groups"]

Result = TypeVar("Result")


class Timer(Protocol):
    """Times turns. What an instant is, only the timer knows: seconds, or an event on a GPU."""

    def now(self) -> Any:
        """This instant."""
        ...

    def add(self, layer: int, which: Pass, turn: Turn, began: Any, arrived: Any, ended: Any) -> None:
        """A turn was taken.

        Args:
            layer: Its layer.
            which: Its pass.
            turn: The turn.
            began: When the rank came to it, and began to wait for the group's last exchange.
            arrived: When that was there.
            ended: When it had computed and issued the next exchange.
        """
        ...


class Untimed:
    """A timer that keeps nothing."""

    def now(self) -> Any:
        """See `Timer.now`."""

    def add(self, layer: int, which: Pass, turn: Turn, began: Any, arrived: Any, ended: Any) -> None:
        """See `Timer.add`."""


class AttentionContext:
    """What attention needs to know of a microbatch. Reaches it as one keyword argument through the model.

    A plain class on purpose: FSDP's mixed precision copies dataclasses, dicts and tuples and casts their tensors.

    Attributes:
        groups: The used groups on this rank's path, by level.
        turns: For each pass, the order in which they take their turns.
        kernel: The attention kernel.
        recomputed_layers: Layers that are recomputed in backward.
        stash: What layers keep for their recompute; by layer, then level.
        timer: Times every turn.
        place: Is told of every turn.
        gathers: Issues parameter gathers between turns; None where parameters are not sharded.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupWork],
        turns: Mapping[Pass, tuple[Turn, ...]],
        kernel: Kernel,
        recomputed_layers: frozenset[int],
        timer: Timer | None = None,
        place: Place | None = None,
        gathers: Gathers | None = None,
    ) -> None:
        self.groups = groups
        self.turns = turns
        self.kernel = kernel
        self.recomputed_layers = recomputed_layers
        self.timer = timer or Untimed()
        self.place = place or Place()
        self.gathers = gathers
        self.stash: dict[int, dict[int, Kept]] = {}

    def clear(self) -> None:
        """Forget what a run has left, or one that failed."""
        self.stash.clear()
        if self.gathers is not None:
            self.gathers.clear()


def attend_groups(
    context: AttentionContext,
    layer: int,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
        softcap: Scores s become ``softcap · tanh(s / softcap)``; None leaves them.
        sinks: [N], a score for each head that takes part in its softmax's sum.

    Returns:
        [T, N, H]; zeros for a filler token.
    """
    kernel = context.kernel if window is None and softcap is None else context.kernel.adapted(window, softcap)
    driver = _Driver(context, layer, scale, kernel, q, k, v, sinks)
    token = _Start.apply(q, k, v, sinks, driver)  # type: ignore[no-untyped-call]
    out: Tensor = _Finish.apply(token, driver)  # type: ignore[no-untyped-call]
    return out


class _Driver:
    """Moves the groups of one layer call along their turns. Holds no tensor but the sinks once a pass is over."""

    def __init__(
        self,
        context: AttentionContext,
        layer: int,
        scale: float,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> None:
        num_rows = sum(work.num_rows for work in context.groups.values())
        assert len(q) == max(num_rows, 1), f"attention got {len(q)} tokens, but its groups have {num_rows} here"
        self.context, self.layer, self.scale, self.kernel = context, layer, scale, kernel
        self.shapes = (q.shape, k.shape, v.shape)
        self.inputs: tuple[Tensor, Tensor, Tensor] | None = (q.detach(), k.detach(), v.detach())
        # A copy: FSDP frees a gathered parameter's storage, and gathers it into another one.
        self.sinks = None if sinks is None else sinks.detach().clone()
        kept = context.stash.pop(layer, None)
        self.which = Pass.FORWARD if kept is None else Pass.RECOMPUTE
        self.kept: Mapping[int, Kept] = kept or {}
        # Where nothing needs a gradient (frozen first layers), no recompute may come that would take it.
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        recomputed = layer in context.recomputed_layers
        self.puts = needs_grad and recomputed and kept is None
        # A recompute's tensors live until the layer's own backward, others until the whole model's.
        self.saves_long = needs_grad and not recomputed
        self.forward: _Run[Attended] | None = None
        self.backward: _Run[tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = None

    def start_forward(self) -> None:
        assert self.inputs is not None
        q, k, v = self.inputs
        work = self.context.groups
        self.forward = _Run(
            self.context,
            self.layer,
            self.which,
            lambda level: forward_phases(
                work[level],
                self.kernel,
                self.scale,
                q[work[level].rows],
                k[work[level].rows],
                v[work[level].rows],
                self.kept.get(level),
                self.sinks,
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
        return out, tuple(map(_alone, saved)) if self.saves_long else saved

    def start_backward(self, saved: Sequence[Saved], dout: Tensor) -> None:
        work = self.context.groups
        by_level = dict(zip(sorted(work), saved, strict=True))
        num_kv_heads = self.shapes[1][1]
        self.backward = _Run(
            self.context,
            self.layer,
            Pass.BACKWARD,
            lambda level: backward_phases(
                work[level],
                self.kernel,
                self.scale,
                num_kv_heads,
                by_level.pop(level),
                dout[work[level].rows],
                self.sinks,
            ),
        )
        self.backward.open()

    def finish_backward(self, like: Tensor) -> list[Tensor | None]:
        """Gradients of q, k, v and the sinks."""
        assert self.backward is not None
        done = self.backward.close()
        grads = [like.new_zeros(shape) for shape in self.shapes]
        dsinks = None if self.sinks is None else wide(torch.zeros_like(self.sinks))
        for level, (*parts, of_sinks) in done.items():
            for grad, part in zip(grads, parts, strict=True):
                grad[self.context.groups[level].rows] = part
            if dsinks is not None and of_sinks is not None:
                dsinks += of_sinks
        self.backward = None
        return [*grads, None if dsinks is None else dsinks.to(like.dtype)]


class _Run(Generic[Result]):
    """The groups' generators in one pass, advanced turn by turn."""

    def __init__(
        self,
        context: AttentionContext,
        layer: int,
        which: Pass,
        begin: Callable[[int], Generator[Exchange, None, Result]],
    ) -> None:
        self.turns, self.timer, self.at = context.turns[which], context.timer, context.place
        self.gathers = context.gathers
        self.at.layer, self.at.which, self.at.turn = layer, which, None
        self.layer, self.which, self.begin = layer, which, begin
        self.place = 0
        self.running: dict[int, Generator[Exchange, None, Result]] = {}
        self.on_the_wire: dict[int, Exchange] = {}
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
        began = arrived = self.timer.now()
        if turn.number == 0:
            self.running[turn.level] = self.begin(turn.level)
        else:
            self.on_the_wire.pop(turn.level).wait()
            arrived = self.timer.now()
        try:
            self.on_the_wire[turn.level] = next(self.running[turn.level])
        except StopIteration as end:
            self.done[turn.level] = end.value
            del self.running[turn.level]
        self.timer.add(self.layer, self.which, turn, began, arrived, self.timer.now())
        if self.gathers is not None:
            self.gathers.took(self.layer, self.which, self.place)


def _alone(saved: Saved) -> Saved:
    """What a group saves, with copies of those tensors that would keep memory alive that holds something else, too."""
    used: Counter[int] = Counter()
    for x in {(x.data_ptr(), x.nbytes): x for x in saved}.values():  # each memory once
        used[x.untyped_storage().data_ptr()] += x.nbytes

    def alone(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        return x if storage.nbytes() == used[storage.data_ptr()] else x.clone()

    return Saved(*map(alone, saved))


class _Start(torch.autograd.Function):
    """Forward: the first exchanges leave. Backward: the last ones arrive."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, driver: _Driver) -> Tensor:
        ctx.driver = driver
        driver.start_forward()
        return q.new_empty(0)  # a token: it orders the two nodes and carries no data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        driver: _Driver = ctx.driver
        return (*driver.finish_backward(grads[0]), None)


class _Finish(torch.autograd.Function):
    """Forward: the last exchanges arrive. Backward: the first ones leave."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, driver: _Driver) -> Tensor:
        ctx.driver = driver
        out, saved = driver.finish_forward()
        ctx.save_for_backward(*(tensor for group in saved for tensor in group))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        driver: _Driver = ctx.driver
        flat = ctx.saved_tensors  # recomputes the layer, if it is one that is recomputed
        saved = [Saved(*flat[i : i + len(Saved._fields)]) for i in range(0, len(flat), len(Saved._fields))]
        driver.start_backward(saved, grads[0])
        return grads[0].new_empty(0), None
