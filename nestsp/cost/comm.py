"""Seconds of communication: latency + bytes over the bandwidth of the level's links, all sibling groups active.

A level whose groups lie inside a host uses the host's links; one whose groups cross hosts uses the network, of which
each rank has an equal part. Bytes follow the real head layout: queries are heads × head size wide, keys and values are
sent compact and replicated only where several members need the same head. An exchange takes as long as its busiest
member sends or receives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.profile import CostProfile
from nestsp.shape import ModelShape, head_shares

__all__ = [
    "BACKWARD_IN",
    "BACKWARD_IN_KEPT",
    "BACKWARD_OUT",
    "FORWARD_IN",
    "FORWARD_OUT",
    "CommCost",
    "LinkTime",
    "Payload",
    "make_comm_cost",
    "member_widths",
    "ulysses_bytes",
]


@dataclass(frozen=True, slots=True)
class Payload:
    """What one all-to-all carries for each token: so many tensors of query width and of key/value width.

    Slices of heads carry parts of a tensor.
    """

    query: float
    kv: float

    def slice(self, number: int, num_slices: int, *, kv_with: int) -> Payload:
        """Of one slice of queries; keys and values travel with one of the slices."""
        there = 0 <= number < num_slices
        return Payload(self.query / num_slices if there else 0, self.kv if number == kv_with else 0)


FORWARD_IN = Payload(1, 2)  # q, k, v to their heads
FORWARD_OUT = Payload(1, 0)  # out back to its tokens
BACKWARD_IN = Payload(1, 0)  # dout to its heads; the recompute left q, k, v and out there
BACKWARD_IN_KEPT = Payload(3, 2)  # q, k, v, out and dout to their heads
BACKWARD_OUT = Payload(1, 2)  # dq, dk, dv back to their tokens


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds of one communication: ``latency_s + s_per_token × tokens of the group``.

    Attributes:
        network: It crosses hosts, so it queues on the network rather than on the host's links.
    """

    latency_s: float
    s_per_token: float
    network: bool

    def seconds(self, tokens: float) -> float:
        """Time for a stream of so many tokens."""
        return self.latency_s + self.s_per_token * tokens


@dataclass(frozen=True, slots=True)
class CommCost:
    """Communication of one model on one cluster.

    Attributes:
        num_ranks: All ranks, over which parameters are sharded.
        crosses_hosts: There is more than one host, so gathers and reductions use the network.
        ring_bytes_per_s: What a ring over all ranks moves past each of them.
        ring_latency_s: Seconds of the smallest gather or reduction.
        levels: For each level, the time of each all-to-all.
        element_bytes: Of one number that is exchanged or gathered.
    """

    shape: ModelShape
    cluster: Cluster
    tree: GroupTree
    profile: CostProfile
    num_ranks: int
    crosses_hosts: bool
    ring_bytes_per_s: float
    ring_latency_s: float
    levels: tuple[dict[Payload, LinkTime], ...]
    element_bytes: int

    @property
    def sum_bytes(self) -> int:
        """Bytes of one number of a sum over ranks: gradients, also those that travel round a ring."""
        return max(4, self.element_bytes)

    def gather_s(self, num_bytes: float) -> float:
        """Seconds to gather, or to reduce and scatter, so many bytes that are sharded over all ranks."""
        if self.num_ranks == 1:
            return 0.0
        return self.ring_latency_s + num_bytes * (self.num_ranks - 1) / self.num_ranks / self.ring_bytes_per_s

    def forward(self, level: int, ring_degree: int = 1, num_slices: int = 1) -> tuple[LinkTime, ...]:
        """The exchanges of one group in one layer's forward attention, in order."""
        if self.tree.degree(level) == 1:
            return ()
        if num_slices > 1:
            return self._sliced(level, num_slices, FORWARD_IN, FORWARD_OUT)
        if ring_degree == 1:
            return (self.levels[level][FORWARD_IN], self.levels[level][FORWARD_OUT])
        steps = (self._ring_step(level, ring_degree, 2 * self.element_bytes),) * (ring_degree - 1)
        return self._inside(level, ring_degree, FORWARD_IN) + steps + self._inside(level, ring_degree, FORWARD_OUT)

    def backward(
        self, level: int, ring_degree: int = 1, num_slices: int = 1, *, kept: bool = False
    ) -> tuple[LinkTime, ...]:
        """The exchanges of one group in one layer's backward attention, in order.

        Args:
            level: The group's level.
            ring_degree: Ring members.
            num_slices: Slices of heads, of a group without a ring.
            kept: The attention's output was kept, so the recompute did not bring q, k and v to their heads.
        """
        if self.tree.degree(level) == 1:
            return ()
        payload = BACKWARD_IN_KEPT if kept else BACKWARD_IN
        if num_slices > 1:
            return self._sliced(level, num_slices, payload, BACKWARD_OUT)
        if ring_degree == 1:
            return (self.levels[level][payload], self.levels[level][BACKWARD_OUT])
        # The gradients of a block follow it one step behind; the last step brings them home.
        num_steps = ring_degree + 1 if ring_degree > 2 else 2
        steps = tuple(
            self._ring_step(
                level,
                ring_degree,
                2 * self.element_bytes * (number < ring_degree)
                + 2 * self.sum_bytes * (number > 2 or number == num_steps),
            )
            for number in range(1, num_steps + 1)
        )
        return self._inside(level, ring_degree, payload) + steps + self._inside(level, ring_degree, BACKWARD_OUT)

    def _sliced(self, level: int, num_slices: int, coming: Payload, leaving: Payload) -> tuple[LinkTime, ...]:
        """The all-to-alls of `nestsp.attention.slices`: number n brings slice n, and takes slice n - 2 home."""
        times = []
        for number in range(num_slices + 2):
            one = coming.slice(number, num_slices, kv_with=0)
            other = leaving.slice(number - 2, num_slices, kv_with=num_slices - 1)
            payload = Payload(one.query + other.query, one.kv + other.kv)
            degree = self.tree.degree(level)
            times.append(
                _exchange_time(
                    self.shape, self.cluster, self.profile, payload, degree, self.num_ranks, self.element_bytes
                )
            )
        return tuple(times)

    def _inside(self, level: int, ring_degree: int, payload: Payload) -> tuple[LinkTime, ...]:
        """The all-to-all among the members that share a place in the ring; none if each is alone."""
        inner = self.tree.degree(level) // ring_degree
        if inner == 1:
            return ()
        time = _exchange_time(
            self.shape, self.cluster, self.profile, payload, inner, self.num_ranks, self.element_bytes
        )
        return (LinkTime(time.latency_s, time.s_per_token / ring_degree, time.network),)

    def _ring_step(self, level: int, ring_degree: int, bytes_per_element: int) -> LinkTime:
        """One step of a ring: each member passes its block of keys and values on to the next."""
        degree = self.tree.degree(level)
        inner = degree // ring_degree
        heads = max(len(s.kv) for s in head_shares(self.shape.num_heads, self.shape.num_kv_heads, inner))
        num_bytes = heads * self.shape.head_dim * bytes_per_element / ring_degree
        network = _num_hosts(self.cluster, degree, self.num_ranks) > 1
        if network:
            rate = self.profile.network_bytes_per_s * self.profile.network_ring_efficiency / self.cluster.ranks_per_host
            return LinkTime(self.profile.network_latency_s, num_bytes / rate, network)
        return LinkTime(self.profile.host_latency_s, num_bytes / self.profile.host_bytes_per_s, network)


def make_comm_cost(
    shape: ModelShape, cluster: Cluster, tree: GroupTree, profile: CostProfile, *, element_bytes: int = 2
) -> CommCost:
    """The communication of a model on a cluster.

    Args:
        shape: The model.
        cluster: The hosts.
        tree: The groups.
        profile: The hardware.
        element_bytes: Of one number in computation: 2 for bf16, 4 for float32, 8 for float64.
    """
    crosses = cluster.num_hosts > 1
    network = profile.network_bytes_per_s * profile.network_ring_efficiency
    rate = min(profile.host_bytes_per_s, network) if crosses else profile.host_bytes_per_s
    if cluster.ranks_per_host == 1 and crosses:
        rate = network
    latency = profile.host_latency_s * math.ceil(math.log2(max(cluster.ranks_per_host, 1)))
    latency += profile.network_latency_s * math.ceil(math.log2(cluster.num_hosts))
    payloads = (FORWARD_IN, FORWARD_OUT, BACKWARD_IN_KEPT)  # the other two are equal to the first two
    levels = tuple(
        {
            p: _exchange_time(shape, cluster, profile, p, tree.degree(level), tree.num_ranks, element_bytes)
            for p in payloads
        }
        for level in range(tree.num_levels)
    )
    return CommCost(shape, cluster, tree, profile, tree.num_ranks, crosses, rate, latency, levels, element_bytes)


@functools.lru_cache(maxsize=1024)
def member_widths(shape: ModelShape, payload: Payload, degree: int) -> npt.NDArray[Any]:
    """Elements per token that each member of a group works for.

    Returns:
        [degree], from the heads of `nestsp.shape.head_shares`; whole numbers if the payload has them. Read-only: the
        same array is given to all who ask.
    """
    edges = np.arange(degree + 1, dtype=np.int64) * shape.num_heads // degree
    first, stop = edges[:-1], edges[1:]
    per_kv = shape.num_heads // shape.num_kv_heads
    kv = np.where(stop > first, (stop - 1) // per_kv - first // per_kv + 1, 0)
    widths: npt.NDArray[Any] = (payload.query * (stop - first) + payload.kv * kv) * shape.head_dim
    widths.flags.writeable = False
    return widths


def ulysses_bytes(
    shape: ModelShape, payload: Payload, sizes: Sequence[int], *, element_bytes: int = 2
) -> npt.NDArray[np.int64]:
    """Bytes of one all-to-all from tokens to heads, exactly; its transpose is the one back.

    Args:
        shape: The model.
        payload: What is carried for each token.
        sizes: Tokens that each member holds.
        element_bytes: Of one number.

    Returns:
        int64 [degree, degree], from member (row) to member (column); what a member keeps is on the diagonal.
    """
    widths = member_widths(shape, payload, len(sizes)) * element_bytes
    sent: npt.NDArray[np.int64] = np.array(sizes, dtype=np.int64)[:, None] * widths[None, :]
    return sent


def _num_hosts(cluster: Cluster, degree: int, num_ranks: int) -> int:
    """The most hosts that a group of adjacent ranks of this degree touches."""
    first = np.arange(0, num_ranks, degree)
    return int(((first + degree - 1) // cluster.ranks_per_host - first // cluster.ranks_per_host).max()) + 1


@functools.lru_cache(maxsize=1024)
def _exchange_time(
    shape: ModelShape,
    cluster: Cluster,
    profile: CostProfile,
    payload: Payload,
    degree: int,
    num_ranks: int,
    element_bytes: int,
) -> LinkTime:
    """Time of one all-to-all per token of the group's stream, every member holding an equal part of the tokens."""
    if degree == 1:
        return LinkTime(0.0, 0.0, False)
    num_hosts = _num_hosts(cluster, degree, num_ranks)
    widths = member_widths(shape, payload, degree).astype(float) * element_bytes / degree
    offsets = {first % cluster.ranks_per_host for first in range(0, num_ranks, degree)}
    network_rate = profile.network_bytes_per_s / cluster.ranks_per_host * profile.exchange_efficiency(num_hosts)
    slowest = 0.0
    for offset in offsets:
        host = (np.arange(degree) + offset) // cluster.ranks_per_host
        of_host, members = np.bincount(host, widths), np.bincount(host)
        # member i sends its 1/degree of the tokens for the heads of every other, and receives every other's for its own
        inside = np.maximum(of_host[host] - widths, widths * (members[host] - 1)).max()
        across = np.maximum(widths.sum() - of_host[host], widths * (degree - members[host])).max()
        slowest = max(slowest, inside / profile.host_bytes_per_s, across / network_rate if num_hosts > 1 else 0.0)
    latency = profile.network_latency_s if num_hosts > 1 else profile.host_latency_s
    return LinkTime(latency + profile.peer_latency_s * (degree - 1), float(slowest), num_hosts > 1)
