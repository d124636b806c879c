"""This rank's place in the run: read once from what torchrun set, and passed on from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from nestsp.cluster import Cluster
from nestsp.config import ClusterConfig
from nestsp.errors import LaunchError, NestspError
from nestsp.train.agreement import agree, everywhere, together
from nestsp.train.meeting import meet
from nestsp.units import plural

__all__ = ["World", "choose_device_type", "default_num_ranks", "join_world"]

# How often a rank that waits for others' preparation asks whether they are done.
_ASK_EVERY_S = 0.2

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """One rank of a running job.

    Attributes:
        rank: 0 to ``cluster.num_ranks - 1``.
        local_rank: The rank's number on its host.
        cluster: Hosts and ranks.
        device: Where this rank computes.
        backend: Names of the communication backends.
        control: A gloo group of all ranks for what is not tensors: plans, outcomes, errors.
        store: The launcher's key-value store, which needs no other rank to be awake; None if there is none.
        job: The launcher's name for this job.
        num_restarts: How often the launcher has started the job's ranks anew, for whatever reason.
    """

    rank: int
    local_rank: int
    cluster: Cluster
    device: torch.device
    backend: str
    control: dist.ProcessGroup
    store: Store | None = None
    job: str = ""
    num_restarts: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it prints, and writes what is written once."""
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """Give rank 0's value to all ranks."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Give every rank's value to all ranks, by rank."""
        values: list[Any] = [None] * self.cluster.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank that may be refused on some; then it is refused on all.

        Returns:
            Every rank's result, by rank.

        Raises:
            NestspError: The error of the lowest rank that had one, on every rank.
        """
        return agree(self.control, action)

    def first(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 alone; all ranks get its result, or its error.

        Raises:
            NestspError: What rank 0 raised, on every rank.
        """
        outcome: T | NestspError | None = None
        if self.is_first:
            try:
                outcome = action()
            except NestspError as error:
                outcome = error
        shared = self.share(outcome)
        if isinstance(shared, NestspError):
            raise everywhere(shared)
        return shared  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """As `agree`, for a result that stays on its rank."""
        return together(self.control, action)

    def prepare_together(
        self, what: str, action: Callable[[], T], waiting: Callable[[int, int], None] | None = None
    ) -> T:
        """As `together`, for work that may take hours on some hosts: no rank waits for it inside a collective.

        Collectives end after ``cluster.timeout_s``. Ranks that are done ask the key-value store instead, which every
        rank can reach and nobody waits in.

        Args:
            what: Names the work; another name each time.
            action: The work, without collectives.
            waiting: Told (ranks that are done, all ranks) now and then by a rank that waits.
        """
        refused: list[NestspError] = []
        box: list[T] = []
        try:
            box.append(action())
        except NestspError as error:
            refused.append(error)
        store, num_ranks = _get_default_store(), self.cluster.num_ranks
        num_done = store.add(f"nestsp-{what}", 1)
        while num_done < num_ranks:
            if waiting is not None:
                waiting(num_done, num_ranks)
            time.sleep(_ASK_EVERY_S)
            num_done = store.add(f"nestsp-{what}", 0)

        def finish() -> T:
            if refused:
                raise refused[0]
            return box[0]

        return self.together(finish)


def default_num_ranks(config: ClusterConfig) -> int:
    """One rank a GPU, or one without GPUs."""
    return max(1, torch.cuda.device_count()) if config.device != "cpu" and torch.cuda.is_available() else 1


def choose_device_type(config: ClusterConfig, ranks_per_host: int) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        LaunchError: GPUs were asked for and there are too few.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and num_gpus < ranks_per_host:
        raise LaunchError(
            f"cluster.device is cuda and each host has {plural(ranks_per_host, 'rank')}, but this host has "
            f"{plural(num_gpus, 'GPU')}; "
            "start fewer ranks, or set cluster.device = cpu"
        )
    return "cuda" if config.device != "cpu" and num_gpus >= ranks_per_host else "cpu"


def join_world(config: ClusterConfig) -> World:
    """Join the process group that torchrun prepared.

    Raises:
        LaunchError: The ranks were started otherwise than the settings say.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but a rank needs "
            f"{', '.join(_VARIABLES)}; start the ranks by torchrun, or set what it sets"
        )
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, ranks_per_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if config.ranks is not None and config.ranks != ranks_per_host:
        raise LaunchError(
            f"cluster.ranks is {config.ranks}, but torchrun started {plural(ranks_per_host, 'rank')} on this host; "
            f"start it with --nproc-per-node {config.ranks}, or leave cluster.ranks out"
        )
    kind = choose_device_type(config, ranks_per_host)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    attempt = 1
    store: Store | None = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared = PrefixStore(f"nestsp/{job}", _connect(timeout))
        attempt = meet(shared, rank, num_ranks, config.timeout_s)
        store = PrefixStore(f"attempt-{attempt}", shared)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank if store is not None else -1,
        world_size=num_ranks if store is not None else -1,
        timeout=timeout,
        device_id=device if kind == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    numbers: list[Any] = [None] * num_ranks
    dist.all_gather_object(numbers, ranks_per_host, group=control)
    if len(set(numbers)) > 1:  # known only now, and to all ranks, so that none waits for another
        raise everywhere(
            LaunchError(
                f"the hosts have {' and '.join(map(str, sorted(set(numbers))))} ranks, but every host must have as "
                "many as the others; start torchrun with the same --nproc-per-node everywhere"
            )
        )
    cluster = Cluster(num_ranks // ranks_per_host, ranks_per_host)
    return World(
        rank,
        local_rank,
        cluster,
        device,
        "nccl" if kind == "cuda" else "gloo",
        control,
        # A connection of its own: the watchdog must not wait behind what hangs in another.
        PrefixStore(f"nestsp/{job}/watchdog-{attempt}", _connect(timedelta(seconds=10))),
        job,
        attempt - 1,
    )


def _connect(timeout: timedelta) -> Store:
    """A new connection to the launcher's store, or to rank 0's where the launcher has none."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
