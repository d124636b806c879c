"""What nestsp's attention costs beside the kernel that it calls: one rank, packed tokens, forward and backward.

    python -m benchmarks.attention

Ours is the whole path of a layer's attention, from the model's q, k and v to its output and back: both autograd nodes,
driver, schedule, `CpuFlash`. The rival is the same kernel's own differentiable operator, called on each sequence of the
same packed tokens. Compared are CPU seconds of the process, one thread. Target: at most 1.05 × the rival's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import interleave, ratio, where
from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Segments
from nestsp.attention.streaming import AttentionContext, attend_groups
from nestsp.attention.work import GroupWork
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.plan import Plan
from nestsp.schedule import Pass, make_schedule
from nestsp.shape import head_shares

__all__ = ["inputs", "make_context", "ours", "rival", "timed"]

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
PACKS = {
    "one sequence": (2048,),
    "a long tail": (1201, 397, 199, 128, 67, 41, 13, 7, 2, 1),
    "all short": (64,) * 32,
}
TARGET = 1.05
NUM_PAIRS = 21


def make_context(lengths: tuple[int, ...], heads: int = HEADS, kv_heads: int = KV_HEADS) -> AttentionContext:
    """The microbatch of one rank that holds these sequences whole."""
    tree = GroupTree(())
    batch = SequenceBatch.of_lengths(lengths)
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): list(range(len(lengths)))}], "benchmark")
    schedule = make_schedule(plan)
    device = torch.device("cpu")
    work = GroupWork(
        level=0,
        link=None,
        member=0,
        sizes=(sum(lengths),),
        rows=slice(0, sum(lengths)),
        segments=Segments.of(lengths, device),
        heads=head_shares(heads, kv_heads, 1),
        keep="none",
    )
    turns = {which: schedule.turns(0, 0, which) for which in Pass}
    return AttentionContext({0: work}, turns, CpuFlash(), frozenset())


def ours(context: AttentionContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [T, N, H] through nestsp."""
    return attend_groups(context, 0, HEAD_DIM**-0.5, q, k, v)


def rival(lengths: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [T, N, H] by the kernel's own differentiable operator, each sequence alone."""
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*each, 0.0, True)[0]
        for each in zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1)


def inputs(num_tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves [T, heads, H], laid out as a model's projections leave them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in (heads, kv_heads, kv_heads))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def timed(attention: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Callable[[], float]:
    """A function that runs forward and backward, and returns the CPU seconds of the process."""

    def run() -> float:
        for leaf in leaves:
            leaf.grad = None
        start = time.process_time()
        attention().backward(dout)
        return time.process_time() - start

    return run


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"attention of one layer, forward and backward, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, float32; {where()}")
    worst = 0.0
    for name, lengths in PACKS.items():
        context, leaves = make_context(lengths), inputs(sum(lengths))
        dout = torch.randn(sum(lengths), HEADS, HEAD_DIM)
        mine = timed(partial(ours, context, *leaves), leaves, dout)
        theirs = timed(partial(rival, lengths, *leaves), leaves, dout)
        a, b = interleave(mine, theirs, NUM_PAIRS)
        result = ratio(a, b)
        worst = max(worst, result.median)
        both = f"{np.median(a) * 1e3:.1f} and {np.median(b) * 1e3:.1f} ms"
        print(f"{name}, {len(lengths)} of {sum(lengths):,} tokens: {both}, ratio {result}")
    print(f"largest ratio {worst:.3f}; target at most {TARGET}: {'reached' if worst <= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
