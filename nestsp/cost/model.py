"""The cost of anything a plan can ask for: what computes, what is sent, what must fit. See `CostModel`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.comm import CommCost, make_comm_cost
from nestsp.cost.compute import ComputeCost, make_compute_cost
from nestsp.cost.memory import PLAIN_MEMORY, MemoryCost, MemoryOptions, make_memory_cost
from nestsp.cost.profile import CostProfile
from nestsp.errors import ConfigError
from nestsp.shape import ModelShape

__all__ = ["FREE_MEMORY_FRACTION", "CostModel", "make_cost_model"]

# What of a device's memory a run may use unless it is told otherwise.
FREE_MEMORY_FRACTION = 0.9
# Forward products of the head: once in the forward pass, once more when its slice is recomputed, twice in backward.
_HEAD_PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Answers what one model costs on one cluster.

    Attributes:
        shape: The model.
        cluster: Hosts and their ranks.
        tree: The groups.
        profile: The hardware.
        memory_per_rank_bytes: Hard limit of each rank.
        compute: Seconds of computation.
        comm: Seconds of communication.
        memory: Bytes.
    """

    shape: ModelShape
    cluster: Cluster
    tree: GroupTree
    profile: CostProfile
    memory_per_rank_bytes: float
    compute: ComputeCost
    comm: CommCost
    memory: MemoryCost

    @property
    def layer_gather_s(self) -> float:
        """Seconds to gather one layer's parameters."""
        return self.comm.gather_s(self.comm.element_bytes * self.shape.layer_parameters / self.shape.num_layers)

    @property
    def layer_reduce_s(self) -> float:
        """Seconds to reduce and scatter one layer's gradients."""
        return self.comm.gather_s(self.comm.sum_bytes * self.shape.layer_parameters / self.shape.num_layers)

    @property
    def root_gather_s(self) -> float:
        """Seconds to gather the root unit's parameters."""
        return self.comm.gather_s(self.comm.element_bytes * self.shape.root_parameters)

    @property
    def root_reduce_s(self) -> float:
        """Seconds to reduce and scatter the root unit's gradients."""
        return self.comm.gather_s(self.comm.sum_bytes * self.shape.root_parameters)

    @property
    def head_s(self) -> float:
        """Seconds per token of head and loss, forward and backward."""
        return _HEAD_PRODUCTS * self.compute.head_s

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer's update: every state is read, and all but the gradient written."""
        num_bytes = (16 + 12) * self.shape.num_parameters / self.tree.num_ranks
        return num_bytes / self.profile.memory_bytes_per_s

    def head_fractions(self, level: int, ring_degree: int = 1) -> npt.NDArray[np.float64]:
        """Query heads of each member of a level's groups, over all heads, read-only."""
        return _head_fractions(self.shape.num_heads, self.tree.degree(level) // ring_degree, ring_degree)


@functools.lru_cache(maxsize=1024)
def _head_fractions(num_heads: int, inner: int, ring_degree: int) -> npt.NDArray[np.float64]:
    heads = np.diff(np.arange(inner + 1, dtype=np.int64) * num_heads // inner)
    fractions = np.tile(heads / num_heads, ring_degree)
    fractions.flags.writeable = False
    return fractions


def make_cost_model(
    shape: ModelShape,
    cluster: Cluster,
    profile: CostProfile,
    *,
    tree: GroupTree | None = None,
    memory_per_rank_bytes: float | None = None,
    loss_slice_tokens: int = 2048,
    element_bytes: int = 2,
    memory: MemoryOptions = PLAIN_MEMORY,
) -> CostModel:
    """The cost model of a run.

    Args:
        shape: The model.
        cluster: The hosts.
        profile: The hardware.
        tree: The groups; by default the cluster's own tree.
        memory_per_rank_bytes: Hard limit of each rank; by default `FREE_MEMORY_FRACTION` of the device's memory.
        loss_slice_tokens: Tokens whose logits exist at one time.
        element_bytes: Of one number in computation: 2 for bf16, 4 for float32; rates are the profile's own.
        memory: What else decides a rank's bytes.

    Raises:
        ConfigError: The tree has another number of ranks than the cluster.
    """
    tree = cluster.default_tree() if tree is None else tree
    if tree.num_ranks != cluster.num_ranks:
        raise ConfigError(
            f"cluster.tree is {tree}, which is {tree.num_ranks} ranks, but the cluster has {cluster.num_ranks}; "
            f"leave it out for {cluster.default_tree()}"
        )
    limit = FREE_MEMORY_FRACTION * profile.memory_bytes if memory_per_rank_bytes is None else memory_per_rank_bytes
    return CostModel(
        shape=shape,
        cluster=cluster,
        tree=tree,
        profile=profile,
        memory_per_rank_bytes=limit,
        compute=make_compute_cost(shape, profile),
        comm=make_comm_cost(shape, cluster, tree, profile, element_bytes=element_bytes),
        memory=make_memory_cost(
            shape, tree, profile, loss_slice_tokens=loss_slice_tokens, element_bytes=element_bytes, options=memory
        ),
    )
