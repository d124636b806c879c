"""Bytes of one rank at the named moments of a step, of which the largest is its peak.

- *loss slice*: the forward pass is over, one slice of logits exists;
- *last backward*: the last layer, if it keeps everything, is worked back; nothing before it is freed yet;
- *recompute*: those are freed, and one layer that recomputes has everything it saves for its backward pass;
- *update*: no activations, but the optimizer's temporaries.

Each holds the model states and what is always there. A layer's backward pass has two summits, of which the higher
counts: its feed-forward block, when all that the layer saved is there, and its attention, when that block's part is
freed and the groups' exchanges and sums are in flight. Both what is kept and what is in flight adds up over all groups
that a rank works for, since their exchanges overlap.

Sizes are those of what autograd saves in Transformers' layers with nestsp's attention, in bf16 unless told otherwise.
Normalisations keep a float32 copy of their input, which in a float32 run is the input itself. A sliding window changes
nothing that is held. `benchmarks.activations` measures how near all of it is: what is held at the end of the forward
pass within 5 %.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nestsp.cluster import GroupTree, ring_degrees
from nestsp.cost.comm import Payload, member_widths
from nestsp.cost.profile import CostProfile
from nestsp.shape import ModelShape

__all__ = ["MOMENTS", "PLAIN_MEMORY", "MemoryCost", "MemoryOptions", "RankTokens", "make_memory_cost"]

Real = float | npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

MOMENTS = ("loss slice", "last backward", "recompute", "update")
# Master parameter, gradient and AdamW's two moments, all float32.
_STATE_BYTES = 16
_FROZEN_BYTES = 4
# Of a token: its id, position, target and sequence, int64, and its weight and likelihood, float32.
_TOKEN_BYTES = 4 * 8 + 2 * 4


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
        kept: Tokens of its groups that keep their attention's output.
        operands: Bytes of all its groups in one whole layer; see `MemoryCost.operand_bytes`.
        in_flight: Bytes of all its groups in one layer's backward pass; see `MemoryCost.in_flight_bytes`.
    """

    local: Real
    kept: Real
    operands: Real
    in_flight: Real


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Coefficients in bytes.

    Attributes:
        shape: The model.
        element_bytes: Of one number in computation.
        states: Model states, communicators and what no term explains.
        gathered: The root unit with its gradient, two layers' parameters, one gradient and its float32 copy.
        token: Per local token, outside the layers: its numbers and the rotary phases of its position.
        last_hidden: Per local token: what the last normalisation saves, until the loss is worked back.
        layer_input: Of each layer, per token: all that recomputation keeps of it.
        kept_output: Of each layer, per kept token: attention output and log-sum-exp.
        layer_attention: Of one whole layer, per local token: what its attention block saves beside the operands.
        layer_feed_forward: Of one whole layer, per local token: what its feed-forward block saves.
        attention_gradients: Per local token, while a layer's attention is worked back.
        gradients: Per local token, while a layer's feed-forward block is worked back.
        loss_hidden: Per local token: the gradient of the last hidden states, in slices and whole.
        loss_slice: One slice of logits and its gradients.
        update: Temporaries of the optimizer.
    """

    shape: ModelShape
    element_bytes: int
    states: float
    gathered: float
    token: float
    last_hidden: float
    layer_input: float
    kept_output: float
    layer_attention: float
    layer_feed_forward: float
    attention_gradients: float
    gradients: float
    loss_hidden: float
    loss_slice: float
    update: float

    @property
    def fixed(self) -> float:
        """Bytes that a rank without tokens has during a forward and backward pass."""
        return self.states + self.gathered

    @property
    def layer_local(self) -> float:
        """Bytes of one whole layer per token of a group of one rank."""
        return self.layer_attention + self.layer_feed_forward + float(self.operand_bytes(1.0, 1)[0])

    def operand_bytes(self, tokens: Real, degree: int, ring_degree: int = 1, *, kept: bool = False) -> Any:
        """What each member of a group saves of its attention in one whole layer: q, k, v, output and log-sum-exp.

        Where heads were exchanged they lie as the heads have them; in a ring, and where the output is kept, as the
        tokens have them.

        Args:
            tokens: Of the group's stream; an array has a last dimension of 1.
            degree: Members.
            ring_degree: Ring members.
            kept: The group keeps its attention's output, so its backward pass brings the operands to their heads.

        Returns:
            float64 [degree], or broadcast with ``tokens``.
        """
        queries, keys = _head_parts(self.shape, degree, ring_degree)
        size, shape = self.element_bytes, self.shape
        log_sums = max(4, size) * shape.num_heads * queries
        if kept or degree == ring_degree:
            return tokens * (2 * size * (shape.query_width + shape.kv_width) / degree + log_sums)
        return tokens * (2 * size * (shape.query_width * queries + shape.kv_width * keys) + log_sums)

    def in_flight_bytes(self, tokens: Real, degree: int, ring_degree: int = 1, *, kept: bool = False) -> Any:
        """What each member of a group has besides, at the summit of one layer's attention backward.

        - One rank: the gradients of q, k and v, and as much again inside the kernel.
        - Heads exchanged: the gradient of the output and those of q, k and v where the heads are, these once more in
          the buffer that leaves, and where they arrive; if the output is kept, the operands themselves too.
        - A ring: sums of all three gradients and those of two blocks of keys and values, in float32; the block that is
          there, the one that arrives and the one that leaves; the rows that one block is computed from.

        Args:
            tokens: As in `operand_bytes`.
            degree: Members.
            ring_degree: Ring members.
            kept: The group keeps its attention's output.
        """
        size, wide = self.element_bytes, max(4, self.element_bytes)
        shares = _head_parts(self.shape, degree, ring_degree)
        query, key = self.shape.query_width * shares[0], self.shape.kv_width * shares[1]
        home = (self.shape.query_width + 2 * self.shape.kv_width) / degree
        if degree == 1:
            return tokens * (2 * size * home)
        needed = 0.0 * query
        if ring_degree < degree:
            needed = needed + size * home + size * query
            if kept:
                needed = needed + 2 * size * (query + key)
        if ring_degree == 1:
            needed = needed + 2 * size * (query + 2 * key)
        else:
            needed = needed + wide * (query + 2 * key) + 3 * wide * 2 * key + 3 * size * 2 * key
            needed = needed + size * (4 * query + 2 * key) / 2
        return tokens * needed

    def moments(self, tokens: RankTokens, num_kept_layers: int = 0) -> tuple[Real, ...]:
        """Bytes at each of `MOMENTS`."""
        kept = num_kept_layers
        recomputed = self.shape.num_layers - kept
        held = self.fixed + self.token * tokens.local
        inputs = recomputed * (self.layer_input * tokens.local + self.kept_output * tokens.kept)
        layer = (self.layer_attention + self.layer_feed_forward) * tokens.local + tokens.operands
        summit = np.maximum(
            self.gradients * tokens.local,
            (self.attention_gradients - self.layer_feed_forward) * tokens.local + tokens.in_flight,
        )
        # The layer that is recomputed finds its own kept output, one of its operands, and in float32 its own input.
        found = self.kept_output * tokens.kept + (self.layer_input * tokens.local if self.element_bytes == 4 else 0.0)
        return (
            held + inputs + kept * layer + (self.last_hidden + self.loss_hidden) * tokens.local + self.loss_slice,
            held + inputs + (kept * layer + summit if kept else 0.0),
            held + inputs + (layer - found + summit if recomputed else 0.0),
            self.states + self.update + 0.0 * tokens.local,
        )

    def peak_bytes(self, tokens: RankTokens, num_kept_layers: int = 0) -> Any:
        """Bytes at the largest of the moments."""
        return np.maximum.reduce([np.asarray(m, float) for m in self.moments(tokens, num_kept_layers)])

    def held_bytes(self, tokens: RankTokens, num_kept_layers: int = 0) -> Any:
        """Bytes of activations at the end of the forward pass: what backward needs, and no more."""
        slice_and_gradient = self.loss_hidden * tokens.local + self.loss_slice
        return self.moments(tokens, num_kept_layers)[0] - self.fixed - slice_and_gradient

    def stream_bytes(self, degree: int, ring_degree: int = 1, *, num_kept_layers: int = 0, kept: bool = False) -> float:
        """Bytes of the fullest member of a group for each token of its stream in the backward pass, fixed ones left
        out.

        Args:
            degree: Members.
            ring_degree: Of its ring; members exchange heads within the parts of it.
            num_kept_layers: Layers that keep everything.
            kept: Whether the group keeps its attention's output.
        """
        local = 1.0 / degree
        tokens = RankTokens(
            local,
            local * kept,
            float(np.max(self.operand_bytes(1.0, degree, ring_degree, kept=kept))),
            float(np.max(self.in_flight_bytes(1.0, degree, ring_degree, kept=kept))),
        )
        _, last_backward, recompute, _ = self.moments(tokens, num_kept_layers)
        return float(np.maximum(last_backward, recompute)) - self.fixed

    def least_stream_bytes(self, degree: int) -> float:
        """The same, whatever its kind and whatever is kept; the input of one layer that is kept is part of it."""
        rings = ring_degrees(degree)
        least = min(self.stream_bytes(degree, ring, kept=kept) for ring in rings for kept in (False, True))
        return least - self.layer_input / degree

    def attention_bytes_per_token(self, *, split: bool) -> float:
        """Bytes that each token costs all ranks together at least, while one layer's attention is worked back.

        Args:
            split: Its sequence is on several ranks, as the kind of group that needs least.
        """
        in_flight = [self.in_flight_bytes(1.0, 2, ring) for ring in (1, 2)] if split else [self.in_flight_bytes(1.0, 1)]
        least = min(float(np.sum(each)) for each in in_flight)
        return self.least_bytes_per_token - self.gradients - self.layer_feed_forward + self.attention_gradients + least

    def loss_bytes_per_token(self, num_kept_layers: int = 0) -> float:
        """Bytes of each token of a group of one rank while a slice of the loss exists, the slice left out."""
        layers = self.shape.num_layers - num_kept_layers
        held = layers * self.layer_input + num_kept_layers * self.layer_local
        return self.token + held + self.last_hidden + self.loss_hidden

    @property
    def kept_output_bytes(self) -> float:
        """Bytes that a kept output costs each of its tokens at most, over all layers and at whichever moment.

        In backward the operands start from where the tokens are, and are there and with the heads at one time.
        """
        others = (self.shape.num_layers - 1) * self.kept_output
        return others + max(self.kept_output, 2 * self.element_bytes * (self.shape.query_width + self.shape.kv_width))

    @property
    def least_bytes_per_token(self) -> float:
        """Bytes that each local token costs at least, however many layers keep everything.

        With none, all inputs and one whole layer exist at once; with some, the input of one is part of that layer.
        """
        return self.token + (self.shape.num_layers - 1) * self.layer_input + self.layer_local + self.gradients


@functools.lru_cache(maxsize=1024)
def _head_parts(shape: ModelShape, degree: int, ring_degree: int) -> tuple[Floats, Floats]:
    """Of each member, per token of the group: the tokens that it sees × its heads / all heads; queries, then keys.

    Returns:
        Two of float64 [degree], read-only.
    """
    parts = []
    for payload, width in ((Payload(1, 0), shape.query_width), (Payload(0, 1), shape.kv_width)):
        widths = member_widths(shape, payload, degree // ring_degree)
        parts.append(np.tile(widths / width, ring_degree) / ring_degree)
        parts[-1].flags.writeable = False
    return parts[0], parts[1]


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
    size, wide = element_bytes, max(4, element_bytes)
    hidden, query, kv = shape.hidden_size, shape.query_width, shape.kv_width
    layer, root = shape.layer_parameters / shape.num_layers, shape.root_parameters
    num_communicators = sum(tree.degree(level) > 1 for level in range(tree.num_levels))
    num_shards = tree.num_ranks if options.num_shards is None else options.num_shards
    num_trained = shape.num_parameters if options.num_trained is None else options.num_trained
    states = (_STATE_BYTES * num_trained + _FROZEN_BYTES * (shape.num_parameters - num_trained)) / num_shards
    # A normalisation: its input in float32 and its scale; what it normalised; what it gives to a projection.
    norm = (4 + 2 * size) * hidden + 4
    norms_a_block = shape.layer_norms / 2
    head_norms = (4 + size) * (query + kv) + 4 * (shape.num_heads + shape.num_kv_heads)
    head_norms = head_norms if shape.head_norms or shape.width_norms else 0
    dense = size * (4 if shape.gated_mlp else 2) * shape.intermediate_size, size * 3 * shape.intermediate_size
    blocks = [dense] if shape.num_moe_layers < shape.num_layers else []
    if shape.num_moe_layers:
        width, top_k = shape.expert_intermediate_size, shape.experts_per_token
        experts = size * top_k * (2 * hidden + 4 * width)  # of each expert: input, output, gate, up, act, product
        # Router probabilities and weights, float32; the order of tokens by expert and back, int64.
        routing = 4 * shape.num_experts + (2 * 4 + 4 * 8) * top_k
        blocks.append((experts + routing, size * top_k * 3 * hidden))  # in backward, unsorting makes three copies
    feed_forward, feed_forward_gradients = max(blocks)
    gathered = 2 * size * root + 2 * size * layer + (size + wide) * layer
    if options.mlp_slice_tokens is not None:  # one slice exists, whatever the tokens of the rank
        gathered += options.mlp_slice_tokens * (feed_forward + feed_forward_gradients)
        feed_forward = feed_forward_gradients = 0
    keeps_inputs = not (options.offloads_inputs or options.forward_only)
    works_back = not options.forward_only
    return MemoryCost(
        shape=shape,
        element_bytes=size,
        states=states + num_communicators * profile.communicator_bytes + profile.margin_bytes,
        gathered=gathered,
        token=_TOKEN_BYTES + 2 * size * shape.head_dim,
        last_hidden=norm,
        layer_input=size * hidden if keeps_inputs else 0,
        kept_output=size * query + wide * shape.num_heads,
        layer_attention=norms_a_block * norm + head_norms + size * query,
        layer_feed_forward=norms_a_block * norm + feed_forward,
        attention_gradients=size * (hidden + query) if works_back else 0,
        gradients=2 * size * hidden + feed_forward_gradients if works_back else 0,
        loss_hidden=(1 if options.forward_only else 2) * size * hidden,
        loss_slice=loss_slice_tokens * shape.vocab_size * 3 * wide,
        update=0 if options.forward_only else 2 * 4 * num_trained / num_shards,
    )
