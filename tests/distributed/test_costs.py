"""What is sent is what the cost model says, to the byte; how often, and which kernels run, as the schedule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from nestsp.cost.comm import (
    BACKWARD_IN,
    BACKWARD_IN_KEPT,
    BACKWARD_OUT,
    FORWARD_IN,
    FORWARD_OUT,
    Payload,
    ulysses_bytes,
)
from nestsp.plan import Placement, Plan
from nestsp.schedule import Pass, num_exchanges
from nestsp.shape import ModelShape, head_shares
from nestsp.shard import rank_spans
from tests.distributed.equivalence import LLAMA, QWEN3, Case, Log, load, make_executor, make_tokens, recorded
from tests.distributed.pool import RankPool
from tests.distributed.test_ring import ring_plan

ELEMENT_BYTES = 8  # the ranks compute in float64, and so are sums that travel round a ring
LENGTHS = (31, 23, 17, 11, 6, 5)
MQA = {**QWEN3, "num_attention_heads": 5, "num_key_value_heads": 1}


def run_recorded(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[tuple[list[Log], ModelShape]]:
    """Of each case, what every rank did; on all ranks alike."""
    results = []
    for case in cases:
        plan = case.made
        executor = make_executor(case, rank)
        with recorded(executor, plan) as log:
            executor.run(load(executor, plan, make_tokens(plan)))
        logs: list[Log] = [log] * num_ranks
        dist.all_gather_object(logs, log)
        results.append((logs, executor.shape))
    return results


def pass_bytes(shape: ModelShape, plan: Plan, placement: Placement, rank: int, which: Pass) -> list[int]:
    """Bytes that a rank sends to others in each exchange of one group, layer and pass, by the formulas."""
    degree, ring = placement.group.degree, placement.ring_degree
    if not num_exchanges(placement, which):
        return []
    inner = degree // ring
    sizes = [
        sum(
            shard.num_tokens
            for spans in rank_spans(plan, other)
            for shard in spans.shards
            if shard.placement == placement
        )
        for other in placement.group.ranks
    ]
    place, inside = divmod(rank - placement.group.first_rank, inner)
    mine = sizes[place * inner : (place + 1) * inner]

    def exchanged(payload: Payload, back: bool) -> list[int]:
        if inner == 1:
            return []
        sent = ulysses_bytes(shape, payload, mine, element_bytes=ELEMENT_BYTES)
        row = (sent.T if back else sent)[inside]
        return [int(row.sum() - row[inside])]

    # A member's block of keys and values, and that of their gradients; of the heads of this rank.
    width = 2 * len(head_shares(shape.num_heads, shape.num_kv_heads, inner)[inside].kv) * shape.head_dim
    blocks = [sum(sizes[m * inner : (m + 1) * inner]) * width * ELEMENT_BYTES for m in range(ring)]
    if which is Pass.BACKWARD:
        kept = placement.keep == "output"
        passes = []
        for hop in range(1, ring + 2):
            keys = blocks[(place - hop + 1) % ring] if hop < ring else 0
            gradients = blocks[(place - hop + 2) % ring] if hop > 2 else 0
            if keys or gradients or hop == ring + 1:
                passes.append(keys + gradients)
        first, last = exchanged(BACKWARD_IN_KEPT if kept else BACKWARD_IN, False), exchanged(BACKWARD_OUT, True)
        return first + (passes if ring > 1 else []) + last
    return (
        exchanged(FORWARD_IN, False)
        + [blocks[(place - hop + 1) % ring] for hop in range(1, ring)]
        + exchanged(FORWARD_OUT, True)
    )


PLANS = {
    "ulysses of 4": ring_plan((4,), LENGTHS, [(0, 0, range(6), 1, "none")]),
    "ulysses of 4, kept": ring_plan((4,), LENGTHS, [(0, 0, range(6), 1, "output")]),
    "ring of 4": ring_plan((4,), LENGTHS, [(0, 0, range(6), 4, "none")]),
    "ring of 4, kept": ring_plan((4,), LENGTHS, [(0, 0, range(6), 4, "output")]),
    "hybrid of 2 x 2": ring_plan((2, 2), LENGTHS, [(0, 0, range(6), 2, "none")]),
    "all kinds": ring_plan(
        (2, 2),
        LENGTHS,
        [(0, 0, [0], 2, "output"), (1, 0, [1], 1, "none"), (1, 2, [2], 2, "output"), (2, 1, [3, 4], 1, "none")],
        [(0, 0, [5], 1, "output")],
    ),
}


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept whole"])
def test_every_exchange_sends_the_bytes_of_the_cost_model(pool: RankPool, recompute: bool) -> None:
    """Heads that divide and that do not, one key/value head for all, and every kind of group."""
    cases = [Case(keys, plan.to_json(), recompute) for keys in (LLAMA, MQA) for plan in PLANS.values()]
    results = pool.run(run_recorded, cases, ranks=4, timeout_s=120.0)[0]
    for case, (logs, shape) in zip(cases, results, strict=True):
        plan = case.made
        for rank, log in enumerate(logs):
            found: dict[tuple[int, int], list[int]] = {}
            for group, sent in zip(log.exchanges, log.sent_bytes, strict=True):
                found.setdefault(group, []).append(sent)
            expected: dict[tuple[int, int], list[int]] = {}
            for microbatch in plan.microbatches:
                for placement in microbatch.on_rank(rank):
                    group = (placement.group.level, placement.group.first_rank)
                    forward, again, backward = (pass_bytes(shape, plan, placement, rank, which) for which in Pass)
                    layers = shape.num_layers * forward
                    layers += shape.num_layers * ((again if recompute else []) + backward)
                    if layers:
                        expected.setdefault(group, []).extend(layers)
            assert found == expected, (case, rank)


def test_a_kept_output_spares_the_kernel_and_two_of_six_exchanges_of_a_layer_and_group(pool: RankPool) -> None:
    plans = [PLANS["ulysses of 4"], PLANS["ulysses of 4, kept"]]
    none, kept = pool.run(run_recorded, [Case(LLAMA, plan.to_json()) for plan in plans], ranks=4)[0]
    layers = none[1].num_layers
    for log_none, log_kept in zip(none[0], kept[0], strict=True):
        assert len(log_none.exchanges) == 6 * layers
        assert len(log_kept.exchanges) == 4 * layers
        assert log_none.kernel == Counter(forward=2 * layers, backward=layers)
        assert log_kept.kernel == Counter(forward=layers, backward=layers)


def test_slices_of_heads_send_the_same_bytes_in_more_exchanges(pool: RankPool) -> None:
    plan = ring_plan((2, 2), LENGTHS, [(1, 0, [0, 1, 2], 1, "none"), (1, 2, [3, 4, 5], 1, "output")])
    (microbatch,) = plan.microbatches
    sliced = replace(
        plan,
        microbatches=(replace(microbatch, placements=tuple(replace(p, num_slices=2) for p in microbatch.placements)),),
    )
    cases = [Case(LLAMA, each.to_json()) for each in (plan, sliced)]
    (whole, shape), (cut, _) = pool.run(run_recorded, cases, ranks=4)[0]
    for rank, (one, two) in enumerate(zip(whole, cut, strict=True)):
        (placement,) = plan.microbatches[0].on_rank(rank)
        per_layer = sum(sum(pass_bytes(shape, plan, placement, rank, which)) for which in Pass)
        assert sum(one.sent_bytes) == shape.num_layers * per_layer
        assert sum(two.sent_bytes) == sum(one.sent_bytes)
        assert len(two.exchanges) > len(one.exchanges)
