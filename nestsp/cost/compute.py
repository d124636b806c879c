"""Seconds of computation of one decoder layer on one rank.

The linear part is tokens × active FLOPs over a measured rate. The attention of a packed stream is one kernel call,

    launch + FLOPs of the rank's heads × (1 + half_length / length) / peak,

where ``length`` is the stream's mean length weighted by tokens: short packed sequences run far below the kernel's peak,
whatever the stream's total. Splitting heads keeps that efficiency; splitting tokens, as a ring does, makes more and
shorter blocks. A call never takes less than its longest tile: few heads of a short sequence do not fill the device. A
degree that does not divide the heads costs what its fullest member has, since shares are real ones.
With a sliding window a query's pairs are those inside it; where only some layers have one, the mean layer is priced.

All functions take numbers or arrays alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nestsp.cost.profile import CostProfile
from nestsp.shape import ModelShape

__all__ = ["ComputeCost", "Direction", "StreamSize", "make_compute_cost"]

Direction = Literal["forward", "backward"]
Real = float | npt.NDArray[Any]

# Matrix products of the backward attention kernel over those of the forward one: five against two.
_BACKWARD_PRODUCTS = 2.5


@dataclass(frozen=True, slots=True)
class StreamSize:
    """What the cost of a packed stream depends on.

    Attributes:
        tokens: Sum of the lengths.
        squares: Sum of the squared lengths.
        longest: The longest length.
    """

    tokens: int
    squares: int
    longest: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> StreamSize:
        """The size of a stream of these sequences, without a window.

        >>> StreamSize.of([3, 4])
        StreamSize(tokens=7, squares=25, longest=4)
        """
        values = tuple(lengths)
        return cls(sum(values), sum(n * n for n in values), max(values, default=0))


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Coefficients of one layer, of the mean layer where layers differ.

    Attributes:
        profile: The hardware.
        head_dim: Width of one head.
        before_s: Forward seconds per token of what comes before attention: projections of q, k and v.
        after_s: Forward seconds per token of what comes after it: output projection and feed-forward block.
        head_s: Forward seconds per token of the model's head.
        copy_s: Seconds per byte of a packing copy, which reads and writes.
        window: Keys that a query sees in layers with a sliding window; 0 if there is none.
        window_part: Layers with a sliding window, of all layers.
    """

    profile: CostProfile
    head_dim: int
    before_s: float
    after_s: float
    head_s: float
    copy_s: float
    window: int
    window_part: float

    @property
    def linear_s(self) -> float:
        """Forward seconds per token of a layer without attention."""
        return self.before_s + self.after_s

    def squares(self, lengths: Any) -> Any:
        """Of each length the square, less what a sliding window cuts off: pairs of query and key are half of it and
        the length together, in the mean layer.
        """
        if not self.window_part:
            return lengths**2
        seen = np.minimum(lengths, self.window)
        return (1 - self.window_part) * lengths**2 + self.window_part * (seen * (2 * lengths - seen + 1) - lengths)

    def attention_s(
        self,
        direction: Direction,
        num_heads: Real,
        tokens: Real,
        squares: Real,
        longest: Real,
        *,
        ring_degree: Real = 1,
    ) -> Any:
        """Seconds that one member of a group spends in attention kernels.

        Args:
            direction: The forward or the backward kernel.
            num_heads: Query heads that the member works for; none takes no time.
            tokens: Of the group's stream.
            squares: Sum of `squares` of its lengths.
            longest: Longest length of the stream.
            ring_degree: Among how many ring members the queries are dealt, zigzag, so that each does an equal part of
                the products. Its calls see the keys block by block: ``1 + 3/4 (r - 1)`` passes over a member's queries.
        """
        profile = self.profile
        if direction == "forward":
            products, rate = 1.0, profile.attention_forward_flops_per_s
            half, launch_s = profile.attention_forward_half_length, profile.attention_forward_launch_s
        else:
            products, rate = _BACKWARD_PRODUCTS, profile.attention_backward_flops_per_s
            half, launch_s = profile.attention_backward_half_length, profile.attention_backward_launch_s
        passes = 1 + 0.75 * (ring_degree - 1)
        pairs = num_heads * (squares + tokens + half * passes * tokens) / ring_degree
        longest = longest - self.window_part * np.maximum(0, longest - self.window)
        pairs = np.maximum(pairs, profile.attention_parallel_head_tokens * longest / ring_degree)
        seconds = launch_s * ring_degree + products * 2 * self.head_dim * pairs / rate
        return np.where(np.logical_and(np.greater(num_heads, 0), np.greater(tokens, 0)), seconds, 0.0)

    def best_attention_s(self, direction: Direction, num_heads: float, tokens: Real, squares: Real) -> Any:
        """Rank-seconds that no way to pack, split and launch can undercut: full device, calls for free."""
        rate = getattr(self.profile, f"attention_{direction}_flops_per_s")
        half = getattr(self.profile, f"attention_{direction}_half_length")
        products = 1.0 if direction == "forward" else _BACKWARD_PRODUCTS
        return products * 2 * self.head_dim * num_heads * (squares + tokens + half * tokens) / rate


def make_compute_cost(shape: ModelShape, profile: CostProfile) -> ComputeCost:
    """The coefficients of a model on some hardware."""
    rate = profile.linear_flops_per_s
    projections = shape.hidden_size * (shape.query_width + 2 * shape.kv_width)
    dense = (shape.num_layers - shape.num_moe_layers) * shape.dense_mlp_parameters
    router = shape.num_moe_layers * shape.hidden_size * shape.num_experts
    experts = shape.num_moe_layers * shape.experts_per_token * shape.expert_parameters
    feed_forward_s = ((dense + router) / rate + experts / profile.expert_flops_per_s) / shape.num_layers
    return ComputeCost(
        profile=profile,
        head_dim=shape.head_dim,
        before_s=2 * projections / rate,
        after_s=2 * (shape.query_width * shape.hidden_size / rate + feed_forward_s),
        head_s=2 * shape.vocab_size * shape.hidden_size / rate,
        copy_s=2 / profile.memory_bytes_per_s,
        window=shape.window,
        window_part=shape.num_window_layers / shape.num_layers,
    )
