"""Whether streaming gains on real links what the simulator says: two network namespaces of two ranks, limited rates.

    python -m benchmarks.shaped_links

The namespaces stand for hosts: what leaves one is limited by ``tc``, so that time on the wire is idle time of the
processor. Attention is nestsp's own, in groups of four ranks, two and one; only its kernel is replaced by one that
sleeps as long as the cost model says. Rates and latencies of the links are measured first, in the same run, and given
to the simulator. Compared are forward and backward passes with groups that take turns and without, in turn. Target: at
least 0.85 of the speed-up that is predicted.

Needs Linux and root; says so otherwise. Leaves with status 1 if the target is missed. Its namespaces have new names in
every run and are removed at its end.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import where
from nestsp.attention.local import Kernel, Mask, Segments
from nestsp.attention.streaming import AttentionContext, attend_groups
from nestsp.attention.work import GroupWork
from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.comm.groups import Link, make_links
from nestsp.cost.compute import ComputeCost, Direction, StreamSize
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import CostProfile, load_profile
from nestsp.plan import Plan
from nestsp.schedule import Pass, make_schedule
from nestsp.shape import ModelShape, head_shares
from nestsp.shard import rank_spans
from nestsp.simulate import simulate

__all__ = ["PacedKernel", "predicted_s"]

TARGET = 0.85
RATE_MBIT, BURST_KB = 200, 64
LAYERS, NUM_PAIRS = 3, 9
TREE = GroupTree((2, 2))
CPU = torch.device("cpu")
# Heads, and next to no parameters: none are gathered here.
SHAPE = ModelShape("llama", LAYERS, 1, 8, 8, 64, 1, 1)
# Of the root, the two pairs and the four ranks: about equal seconds for each, at 2, 4 and 8 heads a rank.
LENGTHS = (1216, 864, 864, 608, 608, 608, 608)
FLOPS_PER_S = 1.3e10  # 30 ms a level, forward
FREE = 1e30  # what is priced, and not done here


class PacedKernel:
    """Takes the time that the cost model says and computes nothing."""

    name = "paced"

    def __init__(self, compute: ComputeCost) -> None:
        self.compute = compute

    def adapted(self, window: int | None, softcap: float | None) -> Kernel:
        """See `Kernel`."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        self._sleep("forward", q, mask.queries)
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        self._sleep("backward", q, mask.queries)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _sleep(self, direction: Direction, q: Tensor, segments: Segments) -> None:
        size = StreamSize.of(segments.lengths)
        time.sleep(float(self.compute.attention_s(direction, q.shape[1], size.tokens, size.squares, size.longest)))


def make_plan() -> Plan:
    """One sequence on each group of the tree; every layer keeps everything."""
    places = [TREE.group(level, first) for level in range(3) for first in range(0, 4, TREE.degree(level))]
    groups = {group: [number] for number, group in enumerate(places)}
    plan = Plan.of_groups(TREE, SequenceBatch.of_lengths(LENGTHS), [groups], "benchmark")
    kept = (dataclasses.replace(m, num_kept_layers=LAYERS) for m in plan.microbatches)
    return dataclasses.replace(plan, microbatches=tuple(kept))


def make_cost(network: tuple[float, float], host: tuple[float, float]) -> CostModel:
    """A cost model in which attention and its exchanges take time, and nothing else.

    Args:
        network: Latency of an exchange of four ranks, seconds, and what one host sends to the other, bytes/s.
        host: Latency inside a host, and what one rank sends there.
    """
    figures: dict[str, float] = {f.name: FREE for f in dataclasses.fields(CostProfile) if f.name.endswith("_per_s")}
    figures |= {f.name: 0.0 for f in dataclasses.fields(CostProfile) if f.name.endswith(("_latency_s", "launch_s"))}
    figures |= {"attention_forward_half_length": 0.0, "attention_backward_half_length": 0.0}
    figures |= {"attention_forward_flops_per_s": FLOPS_PER_S, "attention_backward_flops_per_s": FLOPS_PER_S}
    # A latency for each peer: it is not in the gathers, which do not take place here.
    figures |= {"peer_latency_s": network[0] / 3, "network_bytes_per_s": network[1], "network_ring_efficiency": FREE}
    figures |= {"host_bytes_per_s": host[1]}
    profile = dataclasses.replace(load_profile("cpu"), **figures)  # type: ignore[arg-type]
    return make_cost_model(SHAPE, Cluster(2, 2), profile, tree=TREE, element_bytes=4)


def predicted_s(cost: CostModel, plan: Plan, *, streaming: bool) -> float:
    """Seconds of the attention of all layers, forward and backward, by the simulator."""
    return simulate(make_schedule(plan, streaming=streaming), cost).makespan_s


def make_context(plan: Plan, rank: int, links: dict[int, Link], kernel: Kernel, *, streaming: bool) -> AttentionContext:
    """The plan's microbatch, as one rank sees it."""
    schedule = make_schedule(plan, streaming=streaming)
    (spans,) = rank_spans(plan, rank)
    groups = {
        shard.placement.group.level: GroupWork(
            level=shard.placement.group.level,
            link=links.get(shard.placement.group.level),
            member=shard.member,
            sizes=shard.sizes,
            rows=slice(shard.offset, shard.offset + shard.num_tokens),
            segments=Segments.of(shard.lengths, CPU),
            heads=head_shares(SHAPE.num_heads, SHAPE.num_kv_heads, shard.placement.group.degree),
            keep="none",
            overlaps=streaming,
        )
        for shard in spans.shards
    }
    turns = {which: schedule.turns(0, rank, which) for which in Pass}
    return AttentionContext(groups, turns, kernel, frozenset())


def run_layers(context: AttentionContext, num_tokens: int) -> float:
    """Seconds of all layers, forward and backward, from one barrier to when this rank is done."""
    q, k, v = (torch.ones(num_tokens, SHAPE.num_heads, SHAPE.head_dim, requires_grad=True) for _ in range(3))
    dist.barrier()
    start = time.perf_counter()
    hidden = q
    for layer in range(LAYERS):
        hidden = attend_groups(context, layer, 1.0, hidden, k, v)
    hidden.backward(torch.ones_like(hidden))
    return time.perf_counter() - start


def slowest_s(seconds: float) -> float:
    """The most of all ranks."""
    each = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(each, op=dist.ReduceOp.MAX)
    return float(each)


def measured_link(link: Link, sent_to_others: float, repetitions: int = 7) -> tuple[float, float]:
    """Latency of an all-to-all of a group, seconds, and bytes/s of what ``sent_to_others`` of its bytes are."""
    times = []
    sizes = (link.degree * 65_536, link.degree * 262_144)  # numbers of float32
    for size in sizes:
        source, target, runs = torch.zeros(size), torch.zeros(size), []
        for _ in range(repetitions):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(target, source, group=link.group)
            runs.append(slowest_s(time.perf_counter() - start))
        times.append(float(np.median(runs)))
    rate = 4 * (sizes[1] - sizes[0]) * sent_to_others / max(times[1] - times[0], 1e-9)
    return max(0.0, times[0] - 4 * sizes[0] * sent_to_others / rate), rate


def rank_main(rank: int, address: str) -> None:
    """One rank: measure the links, then both orders in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=4)
    links = dict(make_links(TREE, rank, CPU, ranks_per_host=2, timeout=timedelta(seconds=120)))
    # Half of what a rank of the root sends leaves its host, where two ranks share the way out.
    latency_s, rank_rate = measured_link(links[0], 0.5)
    cost = make_cost((latency_s, 2 * rank_rate), measured_link(links[1], 0.5))
    plan = make_plan()
    kernel = PacedKernel(cost.compute)
    num_tokens = plan.rank_tokens(0)[rank]
    contexts = {s: make_context(plan, rank, links, kernel, streaming=s) for s in (True, False)}
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(NUM_PAIRS + 1):
        for streaming in (True, False) if pair % 2 else (False, True):
            seconds = slowest_s(run_layers(contexts[streaming], num_tokens))
            if pair:  # the first is the warm-up
                times[streaming].append(seconds)
    reached = rank != 0 or report(cost, plan, times[True], times[False], latency_s, 2 * rank_rate)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if reached else 1)


def report(
    cost: CostModel, plan: Plan, streamed: Sequence[float], in_turn: Sequence[float], latency_s: float, rate: float
) -> bool:
    """Print what was measured and predicted, and whether the target is reached."""
    predicted = predicted_s(cost, plan, streaming=False) / predicted_s(cost, plan, streaming=True)
    speed_ups = np.array(in_turn) / np.array(streamed)
    measured = float(np.median(speed_ups))
    print(f"{LAYERS} layers of paced attention, two namespaces of two ranks, {RATE_MBIT} Mbit/s a way out; {where()}")
    print(f"between hosts {rate / 1e6:.1f} MB/s, {latency_s * 1e3:.1f} ms, measured in this run")
    for name, times, streaming in (("in turn", in_turn, False), ("streamed", streamed, True)):
        said = predicted_s(cost, plan, streaming=streaming)
        print(f"{name}: predicted {said * 1e3:.0f} ms, measured {np.median(times) * 1e3:.0f} ms")
    print(
        f"speed-up: predicted {predicted:.3f}, measured {measured:.3f} ({speed_ups.min():.3f} to {speed_ups.max():.3f})"
    )
    reached = measured / predicted >= TARGET
    gained = (measured - 1) / (predicted - 1)
    print(f"{measured / predicted:.3f} of the speed-up ({gained:.2f} of its gain over 1); target {TARGET}", end=": ")
    print("reached" if reached else "MISSED", flush=True)
    return reached


@contextmanager
def namespaces(rate_mbit: int) -> Iterator[tuple[str, ...]]:
    """Two network namespaces with a bridge between them; what leaves either is limited."""
    names = tuple(f"nestsp-{os.getpid()}-{number}" for number in range(2))
    bridge = f"nsp{os.getpid()}"[:15]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            outside = f"{bridge[:12]}v{number}"
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.83.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{rate_mbit}mbit"]
            limit += ["burst", f"{BURST_KB}kb", "limit", "16mb"]
            subprocess.run(["ip", "netns", "exec", name, *limit], check=True, capture_output=True, text=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def why_not() -> str | None:
    """Why this cannot run here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} is not installed (iproute2)" if missing else None


def main() -> None:
    """Start the ranks in their namespaces, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="10.83.0.1:29541", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.address)
        return
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with namespaces(RATE_MBIT) as names:
        here = [sys.executable, "-m", "benchmarks.shaped_links", "--address", given.address, "--rank"]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", names[rank // 2], *here, str(rank)], env=environment)
            for rank in range(4)
        ]
        try:
            codes = [process.wait(timeout=600) for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
