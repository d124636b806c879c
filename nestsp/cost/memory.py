"""Bytes of one rank at the named moments of a step, of which the largest is its peak.

- *loss slice*: the forward pass is over, one slice of logits exists;
- *last backward*: the layers that keep everything are worked back, nothing of them is freed yet;
- *recompute*: they are freed, and one layer that recomputes has everything it saves for its backward pass;
- *update*: no activations, but the optimizer's temporaries.

Each holds the model states and what is always there. What layers keep adds up over all groups that a rank works for:
every count of tokens below is a rank's own sum over its groups. Sizes are those of Transformers' layers with a fused
attention kernel, in bf16 unless told otherwise; normalisations keep a float32 copy of their input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nestsp.cluster import GroupTree
from nestsp.cost.profile import CostProfile
from nestsp.shape import ModelShape

__all__ = ["MOMENTS", "PLAIN_MEMORY", "MemoryCost", "MemoryOptions", "RankTokens", "make_memory_cost"]

Real = float | npt.NDArray[Any]

MOMENTS = ("loss slice", "last backward", "recompute", "update")
# Master parameter, gradient and AdamW's two moments, all float32.
_STATE_BYTES = 16
_FROZEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What of a run's settings changes the bytes of a rank.

    Attributes:
        num_shards: Ranks that hold one copy of the model's states together; None for all of them.
        num_trained: Parameters that are trained, of which alone there are gradients and moments; None for all.
        mlp_slice_tokens: Tokens that go through a feed-forward block at one time; None for all.
        offloads_inputs: What recomputation keeps of each layer lies in the host's memory.
        forward_only: There is no backward pass (evaluation), so nothing is kept for one.
    """

    num_shards: int | None = None
    num_trained: int | None = None
    mlp_slice_tokens: int | None = None
    offloads_inputs: bool = False
    forward_only: bool = False


PLAIN_MEMORY = MemoryOptions()
"""Everything is sharded over all ranks, trained and kept as a whole."""


@dataclass(frozen=True, slots=True)
class RankTokens:
    """What one rank (or each of an array of ranks) holds in a microbatch.

    Attributes:
        local: Tokens, of all its groups.
        exchanged: Tokens of its groups of several ranks, as its heads see them: the group's tokens × the rank's heads /
            all heads; for keys and values likewise, but by key/value heads, the larger of the two.
        kept: Tokens of its groups that keep their attention's output.
    """

    local: Real
    exchanged: Real
    kept: Real


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Coefficients in bytes.

    Attributes:
        num_layers: Decoder layers.
        states: Model states, communicators and what no term explains.
        gathered: The root unit with its gradient, two layers' parameters, one gradient and its float32 copy.
        layer_input: Of each layer, per token: all that recomputation keeps of it.
        kept_output: Of each layer, per kept token: attention output and log-sum-exp.
        layer_local: Of one whole layer, per local token: all that its backward pass needs.
        layer_exchanged: Of one whole layer, per exchanged token: its copies with the tokens of all members.
        gradients: Of one layer in its backward pass, per local token.
        exchange_buffers: Per exchanged token, of all exchanges in flight.
        loss_hidden: Per local token: last hidden states and their gradient.
        loss_slice: One slice of logits, in bf16 and float32, and its gradient.
        update: Temporaries of the optimizer.
    """

    num_layers: int
    states: float
    gathered: float
    layer_input: float
    kept_output: float
    layer_local: float
    layer_exchanged: float
    gradients: float
    exchange_buffers: float
    loss_hidden: float
    loss_slice: float
    update: float

    @property
    def fixed(self) -> float:
        """Bytes that a rank without tokens has during a forward and backward pass."""
        return self.states + self.gathered

    def moments(self, tokens: RankTokens, num_kept_layers: int = 0) -> tuple[Real, ...]:
        """Bytes at each of `MOMENTS`."""
        recomputed = self.num_layers - num_kept_layers
        whole = self.layer_local * tokens.local + self.layer_exchanged * tokens.exchanged
        inputs = recomputed * (self.layer_input * tokens.local + self.kept_output * tokens.kept)
        working = self.gradients * tokens.local + self.exchange_buffers * tokens.exchanged
        kept = inputs + num_kept_layers * whole
        return (
            self.fixed + kept + self.loss_hidden * tokens.local + self.loss_slice,
            self.fixed + kept + working,
            self.fixed + inputs + (whole if recomputed else 0.0) + working,
            self.states + self.update + 0.0 * tokens.local,
        )

    def peak_bytes(self, tokens: RankTokens, num_kept_layers: int = 0) -> Any:
        """Bytes at the largest of the moments."""
        return np.maximum.reduce([np.asarray(m, float) for m in self.moments(tokens, num_kept_layers)])

    @property
    def least_bytes_per_token(self) -> float:
        """Bytes that each local token costs at least, however many layers keep everything.

        With none, all inputs and one whole layer exist at once; with some, the input of one is part of that layer.
        """
        return (self.num_layers - 1) * self.layer_input + self.layer_local + self.gradients


def make_memory_cost(
    shape: ModelShape,
    tree: GroupTree,
    profile: CostProfile,
    *,
    loss_slice_tokens: int = 2048,
    element_bytes: int = 2,
    options: MemoryOptions = PLAIN_MEMORY,
) -> MemoryCost:
    """The coefficients of a model on a tree of ranks.

    Args:
        shape: The model.
        tree: All ranks; parameters are sharded over them.
        profile: Communicators and margin.
        loss_slice_tokens: Tokens whose logits exist at one time.
        element_bytes: Of one number in computation: 2 for bf16, 4 for float32, 8 for float64.
        options: What else decides a rank's bytes.
    """
    size = element_bytes
    num_shards = tree.num_ranks if options.num_shards is None else options.num_shards
    num_trained = shape.num_parameters if options.num_trained is None else options.num_trained
    hidden, query, kv = shape.hidden_size, shape.query_width, shape.kv_width
    layer, root = shape.layer_parameters / shape.num_layers, shape.root_parameters
    num_communicators = sum(tree.degree(level) > 1 for level in range(tree.num_levels))
    states = (_STATE_BYTES * num_trained + _FROZEN_BYTES * (shape.num_parameters - num_trained)) / num_shards
    wide = max(4, size)  # of what stays float32 in a lower precision
    norms = 2 * (wide + size) * hidden + (2 * wide * (query + kv) if shape.head_norms else 0)
    attention = size * (query + 2 * kv) + size * query + wide * shape.num_heads  # q, k, v, out, log-sum-exp
    if shape.num_moe_layers:
        width, top_k = shape.expert_intermediate_size, shape.experts_per_token
        feed_forward = size * top_k * (2 * hidden + 4 * width)  # of each expert: input, output, gate, up, act, product
        feed_forward_gradients = size * top_k * (hidden + 2 * width)
    else:
        feed_forward = size * (4 if shape.gated_mlp else 2) * shape.intermediate_size
        feed_forward_gradients = size * 2 * shape.intermediate_size
    gathered = 2 * size * root + 2 * size * layer + (size + wide) * layer
    if options.mlp_slice_tokens is not None:  # one slice exists, whatever the tokens of the rank
        gathered += options.mlp_slice_tokens * (feed_forward + feed_forward_gradients)
        feed_forward = feed_forward_gradients = 0
    keeps_inputs = not (options.offloads_inputs or options.forward_only)
    return MemoryCost(
        num_layers=shape.num_layers,
        states=states + num_communicators * profile.communicator_bytes + profile.margin_bytes,
        gathered=gathered,
        layer_input=size * hidden if keeps_inputs else 0,
        kept_output=size * query + wide * shape.num_heads,
        layer_local=size * hidden + norms + attention + size * hidden + feed_forward,
        layer_exchanged=size * (query + 2 * kv) + size * query + wide * shape.num_heads,
        gradients=0 if options.forward_only else 2 * size * hidden + feed_forward_gradients,
        exchange_buffers=2 * size * (3 * query + 2 * kv),
        loss_hidden=2 * size * hidden,
        loss_slice=loss_slice_tokens * shape.vocab_size * (size + 2 * wide),
        update=2 * 4 * num_trained / num_shards,
    )
