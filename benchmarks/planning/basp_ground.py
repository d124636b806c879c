"""BASP's ground: equal sequences of 16K tokens on 2 hosts of 4 A100-40GB, one to eight of them in a batch.

    python -m benchmarks.planning.basp_ground

Ghimire & Calhoun (arXiv:2609.03151) measured, at 2 sequences, steps 1.17-1.32 times as fast as with one Ulysses group
of all ranks (Llama-3.1-8B: 1.21), with 2.2-3.1 times less all-to-all time, and nothing at 1 sequence. What they had
between hosts is not known to us: the bandwidth of a host's network is fitted on Llama-3.1-8B at 2 sequences alone, and
everything else follows from the preset. Estimated by the simulator, nothing measured.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.plan import Plan
from nestsp.planners.baselines import BaspGroups, StaticDegree
from nestsp.planners.ground import cost_ground
from nestsp.planners.search import NestedGroups
from nestsp.report.tables import format_table
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate

__all__ = ["FITTED", "MODELS", "PUBLISHED", "Row", "fit_network", "measure"]

MODELS = ("llama-3.1-8b", "llama-3.2-3b", "qwen2.5-3b")
FITTED = ("llama-3.1-8b", 2, 1.21)  # model, sequences, published speed-up
PUBLISHED = (1.17, 1.32)  # speed-ups at 2 sequences, the least and the most of all models
PUBLISHED_EXCHANGES = (2.2, 3.1)
TOLERANCE = 0.10
LENGTH = 16_384
# Bytes/s of a host between which the fit looks: 200 to 3,200 Gb/s.
_SLOWEST, _FASTEST = 25e9, 400e9


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one number of sequences.

    Attributes:
        model: The model.
        num_sequences: Sequences of the batch.
        static_s: A step of all ranks as one group.
        basp_s: A step of BASP.
        nsp_s: A step of nested groups.
        exchange_ratio: Time of all-to-alls of a rank on the wire, static over BASP; None where BASP has none.
        basp_degree: Ranks of BASP's groups.
    """

    model: str
    num_sequences: int
    static_s: float
    basp_s: float
    nsp_s: float
    exchange_ratio: float | None
    basp_degree: int

    @property
    def speedup(self) -> float:
        """Static over BASP."""
        return self.static_s / self.basp_s


def make_cost(model: str, network_bytes_per_s: float) -> CostModel:
    """The cost model of this ground."""
    profile = dataclasses.replace(load_profile("a100-40g"), network_bytes_per_s=network_bytes_per_s)
    return make_cost_model(known_model(model), Cluster(2, 4), profile)


def measure(model: str, num_sequences: int, network_bytes_per_s: float) -> Row:
    """Plan and simulate one cell."""
    cost = make_cost(model, network_bytes_per_s)
    ground, batch = cost_ground(cost), SequenceBatch.of_lengths([LENGTH] * num_sequences)
    static = StaticDegree(ground, cost.tree.num_ranks).judge(batch)
    basp = BaspGroups(ground).judge(batch)
    nsp = NestedGroups(ground).judge(batch)
    exchanges = [_exchange_s(judged.plan, cost) for judged in (static, basp)]
    return Row(
        model,
        num_sequences,
        static.makespan_s,
        basp.makespan_s,
        nsp.makespan_s,
        exchanges[0] / exchanges[1] if exchanges[1] else None,
        max(basp.plan.num_sequences_by_degree()),
    )


def fit_network() -> float:
    """The bandwidth at which the one published speed-up is met, bytes/s of a host."""
    model, num_sequences, wanted = FITTED
    batch = SequenceBatch.of_lengths([LENGTH] * num_sequences)

    def speedup(network_bytes_per_s: float) -> float:
        ground = cost_ground(make_cost(model, network_bytes_per_s))
        return StaticDegree(ground, 8).judge(batch).makespan_s / BaspGroups(ground).judge(batch).makespan_s

    slow, fast = _SLOWEST, _FASTEST
    assert speedup(slow) > wanted > speedup(fast)
    while fast / slow > 1.001:
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if speedup(middle) > wanted else (slow, middle)
    return math.sqrt(slow * fast)


def _exchange_s(plan: Plan, cost: CostModel) -> float:
    """Seconds that exchanges of rank 0's groups are on the wire."""
    timeline = simulate(make_schedule(plan), cost, record=True)
    return sum(
        float((event.ends_s - event.starts_s)[event.ranks == 0].sum())
        for event in timeline.events
        if event.level >= 0 and event.track != "computation"
    )


def main() -> None:
    """Fit, plan, and print the table."""
    network = fit_network()
    model, num_sequences, wanted = FITTED
    print(f"fitted on {model} at {num_sequences} sequences ({wanted} x): {network * 8 / 1e9:,.0f} Gb/s a host\n")
    rows = [measure(model, number, network) for model in MODELS for number in (1, 2, 4, 8)]
    head = (
        "model, sequences",
        "static 8",
        "basp",
        "over static",
        "published",
        "all-to-all",
        "groups of",
        "nsp over static",
    )
    body = []
    for row in rows:
        published = {1: "1.00", 2: "{}-{}".format(*PUBLISHED)}.get(row.num_sequences, "-")
        if (row.model, row.num_sequences) == FITTED[:2]:
            published = f"{wanted} (fitted)"
        body.append(
            [
                f"{row.model}, {row.num_sequences}",
                f"{row.static_s * 1e3:.0f} ms",
                f"{row.basp_s * 1e3:.0f} ms",
                f"{row.speedup:.2f} x",
                published,
                "none left" if row.exchange_ratio is None else f"{row.exchange_ratio:.1f} x less",
                str(row.basp_degree),
                f"{row.static_s / row.nsp_s:.2f} x",
            ]
        )
    print(format_table(head, body))
    low, high = PUBLISHED[0] * (1 - TOLERANCE), PUBLISHED[1] * (1 + TOLERANCE)
    two = [row for row in rows if row.num_sequences == 2]
    inside = sum(low <= row.speedup <= high for row in two)
    print(
        f"\nat 2 sequences, {inside} of {len(two)} within 10 % of {PUBLISHED[0]}-{PUBLISHED[1]} ({low:.2f}-{high:.2f})"
    )
    print("all-to-all time at 2 sequences, published: {}-{} x less".format(*PUBLISHED_EXCHANGES))


if __name__ == "__main__":
    main()
