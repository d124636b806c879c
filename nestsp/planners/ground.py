"""What a planner plans on: prices for its search, and a judge for its finalists.

Search needs thousands of answers a second, so it uses a closed form. A sequence of ``s`` tokens on a group of some
level adds ``(linear_s + exchange_s) × s + square_s × s²`` seconds and ``bytes_per_token × s`` bytes to each of the
group's ranks; what a rank works for adds up over the groups on its path; a microbatch lasts ``fixed_s`` and as long as
its slowest rank. Finished plans are compared by `Ground.evaluate`, which sees everything.

`cost_ground` is the ground of a cost model: it judges by simulation. A ground may also come from elsewhere, as that of
FlexSP's published model does in the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.cost.bound import check_fits
from nestsp.cost.comm import Payload, member_widths
from nestsp.cost.model import CostModel
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners.recompute import spend_memory
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate

__all__ = ["Ground", "cost_ground"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ground:
    """Prices of a level's groups, and what judges a plan.

    Attributes:
        tree: The groups.
        linear_s: For each level, seconds per token, exchanges left out.
        square_s: For each level, seconds per squared token.
        exchange_s: For each level, seconds of exchanges per token.
        bytes_per_token: For each level, bytes on each rank of a group for each token of a sequence.
        free_bytes: What a rank may hold in one microbatch.
        fixed_s: Seconds of a microbatch beside its work.
        least_part: What part of the closed form a finished plan has at least, where no rank has two groups and so
            nothing hides an exchange.
        exposed_parts: What parts of the exchanges a search may take to be in nobody's shadow.
        check: Raises what tells a user why a batch does not fit at all.
        finish: Makes a placement a plan to be judged: what recomputation keeps is decided here.
        evaluate: Seconds of a finished plan; infinite if it does not fit into memory.
    """

    tree: GroupTree
    linear_s: tuple[float, ...]
    square_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    bytes_per_token: tuple[float, ...]
    free_bytes: float
    fixed_s: float
    least_part: float
    exposed_parts: tuple[float, ...]
    check: Callable[[SequenceBatch], None]
    finish: Callable[[Plan], Plan]
    evaluate: Callable[[Plan], float]

    def seconds(self, lengths: Floats, *, exchanges: float = 1.0) -> Floats:
        """float64 [levels, sequences], what each sequence adds to each rank of a group of each level.

        Args:
            lengths: float64 [sequences].
            exchanges: Which part of the exchanges to count; the rest is taken to be hidden.
        """
        linear = np.array(self.linear_s) + exchanges * np.array(self.exchange_s)
        return linear[:, None] * lengths + np.array(self.square_s)[:, None] * lengths**2

    def bytes(self, lengths: Floats) -> Floats:
        """float64 [levels, sequences]; a split sequence counts a token more for each rank, since parts are whole."""
        degrees = np.array([self.tree.degree(level) for level in range(self.tree.num_levels)])[:, None]
        more = np.where(degrees > 1, degrees, 0)
        return np.array(self.bytes_per_token)[:, None] * (lengths + more)

    def least_microbatches(self, batch: SequenceBatch) -> int:
        """The least number of microbatches that memory admits."""
        per_token = min(price * self.tree.degree(level) for level, price in enumerate(self.bytes_per_token))
        return max(1, int(-(-batch.num_tokens * per_token // (self.free_bytes * self.tree.num_ranks))))


def cost_ground(cost: CostModel, *, streaming: bool = True) -> Ground:
    """The ground of a cost model, for plans in which every layer is recomputed.

    Args:
        cost: The model, cluster and hardware.
        streaming: Whether exchanges are hidden behind other groups' attention.

    Raises:
        InfeasibleError: The model itself does not fit.
    """
    check_fits((), (), cost)
    shape, compute, comm, memory, tree = cost.shape, cost.compute, cost.comm, cost.memory, cost.tree
    layers, heads = shape.num_layers, shape.num_heads
    unit = np.ones(1)
    forward = float(compute.best_attention_s("forward", heads, 0 * unit, unit)[0])
    backward = float(compute.best_attention_s("backward", heads, 0 * unit, unit)[0])
    forward_linear = float(compute.best_attention_s("forward", heads, unit, 0 * unit)[0])
    backward_linear = float(compute.best_attention_s("backward", heads, unit, 0 * unit)[0])
    linear, square, exchange, num_bytes = [], [], [], []
    for level in range(tree.num_levels):
        degree = tree.degree(level)
        share = float(cost.head_fractions(level).max())
        attention = layers * (2 * forward_linear + backward_linear) * share
        linear.append((4 * layers * compute.linear_s + cost.head_s) / degree + attention)
        square.append(layers * (2 * forward + backward) * share)
        links = (*comm.forward(level), *comm.forward(level), *comm.backward(level))
        exchange.append(layers * sum(link.s_per_token for link in links))
        key_share = member_widths(shape, Payload(0, 1), degree).max() / shape.kv_width
        split = (memory.layer_exchanged + memory.exchange_buffers) * max(share, key_share) if degree > 1 else 0.0
        num_bytes.append(memory.least_bytes_per_token / degree + memory.layer_input / degree + split)
    free = cost.memory_per_rank_bytes - memory.fixed
    # The loss slice is another moment, with fewer bytes per token but those of the slice.
    at_loss = (free - memory.loss_slice) / (layers * memory.layer_input + memory.loss_hidden)
    free = min(free, at_loss * num_bytes[-1])
    fixed = cost.root_gather_s + cost.layer_gather_s + cost.layer_reduce_s + cost.root_reduce_s
    if free <= 0:
        raise InfeasibleError("a slice of the loss does not fit into memory; make train.loss_slice_tokens smaller")
    return Ground(
        tree=tree,
        linear_s=tuple(linear),
        square_s=tuple(square),
        exchange_s=tuple(exchange),
        bytes_per_token=tuple(num_bytes),
        free_bytes=free,
        fixed_s=fixed,
        least_part=min(
            (3 * layers * compute.linear_s + cost.head_s) / (4 * layers * compute.linear_s + cost.head_s),
            (forward + backward) / (2 * forward + backward),
            2 / 3,  # of the exchanges: those of the recompute can be spared
        ),
        exposed_parts=(1.0, 0.3) if streaming else (1.0,),
        check=lambda batch: check_fits(batch.ids, batch.lengths, cost),
        finish=lambda plan: spend_memory(plan, cost),
        evaluate=lambda plan: _judge(plan, cost, streaming),
    )


def _judge(plan: Plan, cost: CostModel, streaming: bool) -> float:
    timeline = simulate(make_schedule(plan, streaming=streaming), cost)
    return timeline.makespan_s if timeline.peak_bytes.max() <= cost.memory_per_rank_bytes else math.inf
