"""One process group for every group of the tree that has more than one rank.

All ranks create all of them, in one order, and run one collective in each before training starts, of the kind that
attention uses, so that nothing is set up lazily in the middle of a step. A tree of N ranks with fan-out 2 has N - 1
such groups, and a rank is in log2(N) of them; on NCCL each is a communicator that takes GPU memory, which is why only
groups of the tree get one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nestsp.cluster import GroupTree

__all__ = ["Link", "let_computation_wait", "make_links"]


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """What a rank needs to exchange data inside one of its groups.

    Attributes:
        group: The process group.
        degree: Its number of ranks.
        stream: On GPUs, the stream on which the exchanges of this link class (inside a host, or between hosts) are
            issued, so that the order of issue is the order on the wire. None on CPUs.
    """

    group: dist.ProcessGroup
    degree: int
    stream: torch.cuda.Stream | None


def make_links(
    tree: GroupTree, rank: int, device: torch.device, *, ranks_per_host: int, timeout: timedelta
) -> Mapping[int, Link]:
    """Create and warm the process groups of a tree; every rank must call it.

    Args:
        tree: Its ranks are those of the default process group.
        rank: This rank.
        device: Where this rank's tensors are.
        ranks_per_host: Decides which groups cross hosts.
        timeout: After which a collective is an error.

    Returns:
        A link for each level at which this rank's group has more than one rank.
    """
    assert tree.num_ranks == dist.get_world_size()
    streams: tuple[torch.cuda.Stream | None, torch.cuda.Stream | None] = (None, None)
    if device.type == "cuda":  # ahead of computation, whose kernels would else leave an exchange no room to begin
        streams = (torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
    links: dict[int, Link] = {}
    for level in range(tree.num_levels):
        if tree.degree(level) == 1:
            continue
        for group in tree.groups(level):
            made = dist.new_group(list(group.ranks), timeout=timeout)
            if rank in group:
                assert isinstance(made, dist.ProcessGroup)
                crosses = group.first_rank // ranks_per_host != (group.ranks.stop - 1) // ranks_per_host
                links[level] = Link(made, group.degree, streams[1] if crosses else streams[0])
    for _, link in sorted(links.items()):
        everyone = torch.zeros(link.degree, device=device)
        dist.all_to_all_single(torch.empty_like(everyone), everyone, group=link.group)
    return links


def let_computation_wait(links: Mapping[int, Link]) -> None:
    """Let the current stream wait for all exchanges that were issued, as after a failure, which leaves some unfinished.

    Their buffers are the current stream's memory, and free by now: what it writes there next must not come too early.
    """
    for stream in {link.stream for link in links.values() if link.stream is not None}:
        torch.cuda.current_stream().wait_stream(stream)
