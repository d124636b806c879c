"""Ring and hybrid groups, alone and beside others, give the gradients of one process; shared cases by their id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.local import load_local
from nestsp.execute.verify import reference_gradients
from nestsp.plan import Keep, Microbatch, Placement, Plan
from nestsp.shard import rank_spans
from tests.distributed.equivalence import (
    CPU,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    compare_with_one_process,
    logits_by_token,
    make_executor,
    make_model,
    make_tokens,
    planned_gradients,
    reader,
    recorded,
)
from tests.distributed.pool import RankPool

# A layer between the first and the last adds nothing to what a ring does in a layer.
DENSE, MOE = ({**keys, "num_hidden_layers": 2} for keys in (LLAMA, QWEN3_MOE))
# Prime lengths, one and two tokens, lengths below 2r, more ranks than tokens.
LENGTHS = (29, 13, 7, 5, 3, 2, 1, 1)
KEEPS: tuple[Keep, ...] = ("none", "output")
Where = tuple[int, int, Sequence[int], int, Keep]  # level, first rank, positions, ring degree, keep


def ring_plan(fanouts: tuple[int, ...], lengths: Sequence[int], *microbatches: Sequence[Where]) -> Plan:
    tree = GroupTree(fanouts)
    made = tuple(
        Microbatch(
            tuple(
                Placement(tree.group(level, rank), tuple(s), ring_degree, keep)
                for level, rank, s, ring_degree, keep in microbatch
            )
        )
        for microbatch in microbatches
    )
    plan = Plan(tree, SequenceBatch.of_lengths(lengths), made, tuple(range(tree.num_levels)), "test")
    plan.check()
    return plan


def alone(num_ranks: int, ring_degree: int, lengths: Sequence[int] = LENGTHS, keep: Keep = "none") -> Plan:
    """All sequences on one group of all ranks."""
    return ring_plan((num_ranks,) if num_ranks > 1 else (), lengths, [(0, 0, range(len(lengths)), ring_degree, keep)])


def check(pool: RankPool, cases: Sequence[Case]) -> None:
    ranks = cases[0].made.tree.num_ranks
    outcomes = pool.run(compare_with_one_process, cases, ranks=ranks, timeout_s=30.0 + 10.0 * len(cases))[0]
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.verification.passes(TOLERANCE), (case, outcome)
        assert outcome.faults == (), (case, outcome)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
def test_E11_rings_of_any_size_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int) -> None:
    cases = [Case(DENSE, alone(num_ranks, num_ranks, keep=k).to_json(), recompute=k == "output") for k in KEEPS]
    check(pool, [*cases, Case(MOE, alone(num_ranks, num_ranks).to_json())])


@pytest.mark.parametrize(("num_ranks", "ring_degree"), [(4, 2), (6, 2), (6, 3)], ids=["2x2", "3x2", "2x3"])
def test_hybrids_give_the_gradients_of_one_process(pool: RankPool, num_ranks: int, ring_degree: int) -> None:
    plans = [alone(num_ranks, ring_degree, keep=keep) for keep in KEEPS]
    check(pool, [Case(DENSE, plan.to_json(), recompute) for plan in plans for recompute in (True, False)])


def test_all_kinds_of_groups_in_one_microbatch(pool: RankPool) -> None:
    """Hybrid, ring, Ulysses and local groups, kept and not, and then groups that leave ranks and levels empty."""
    lengths = (31, 23, 17, 11, 6, 5, 3, 1, 9, 2, 7, 1)
    four = ring_plan(
        (2, 2),
        lengths,
        [(0, 0, [0, 6], 2, "none"), (1, 0, [1], 2, "output"), (1, 2, [2], 1, "none"), (2, 1, [3], 1, "none")],
        [(0, 0, [4], 4, "output"), (1, 2, [5, 7], 2, "none"), (2, 3, [8], 1, "output")],
        [(0, 0, [9], 2, "output"), (2, 0, [10, 11], 1, "none")],
    )
    six = ring_plan(
        (2, 3),
        lengths,
        [(0, 0, [0, 6], 3, "output"), (1, 0, [1], 3, "none"), (1, 3, [2, 3], 1, "output"), (2, 4, [4], 1, "none")],
        [(0, 0, [5, 8], 6, "none"), (1, 3, [7, 9], 3, "output"), (2, 0, [10], 1, "none")],
        [(0, 0, [11], 2, "none")],
    )
    for plan in (four, six):
        reordered = replace(plan, level_order=tuple(reversed(plan.level_order)))
        check(pool, [Case(keys, p.to_json()) for p in (plan, reordered) for keys in (DENSE, MOE)])


def test_D9_any_heads_in_rings_and_hybrids(pool: RankPool) -> None:
    """One key/value head, fewer heads than ranks, heads that do not divide; 28 and 4 heads as hybrid of 2 x 2."""
    cases = []
    for heads, kv_heads in ((28, 4), (6, 1), (3, 3), (1, 1), (10, 5)):
        keys = {**QWEN3, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        for ring, keep in zip((2, 4), KEEPS, strict=True):
            cases.append(Case(keys, alone(4, ring, (13, 6, 1), keep).to_json()))
    check(pool, cases)
    keys = {**QWEN3, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    check(pool, [Case(keys, alone(6, ring, (13, 6, 1), keep).to_json()) for ring in (2, 3) for keep in KEEPS])


def test_D3_D4_lengths_that_do_not_divide_by_twice_the_ring(pool: RankPool) -> None:
    """No padding: 4, 8, 6 and 10 tokens on two ranks, 29 on four, 1 on four."""
    check(pool, [Case(DENSE, alone(2, 2, (4, 8, 6, 10)).to_json())])
    check(pool, [Case(DENSE, alone(4, 4, lengths).to_json()) for lengths in ((29,), (3,), (2, 1))])


def test_E13_every_dimension_has_another_size_in_a_ring(pool: RankPool) -> None:
    keys = {**QWEN3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 20, "intermediate_size": 28}
    check(pool, [Case(keys, alone(2, 2, (6,)).to_json())])
    check(pool, [Case(keys, alone(4, 2, (6, 5)).to_json())])


def test_C3_targets_are_shifted_before_the_zigzag() -> None:
    plan = alone(2, 2, (8,))
    columns = [load_local(rank_spans(plan, r)[0], plan.batch, reader({0: torch.arange(8)}), CPU) for r in range(2)]
    assert [c.targets.tolist() for c in columns] == [[1, 2, 7, -100], [3, 4, 5, 6]]
    packed = alone(2, 2, (3, 3))
    tokens = {0: torch.tensor([0, 1, 2]), 1: torch.tensor([3, 4, 5])}
    seen: dict[int, int] = {}
    for rank in range(2):
        local = load_local(rank_spans(packed, rank)[0], packed.batch, reader(tokens), CPU)
        seen.update(zip(local.ids.tolist(), local.targets.tolist(), strict=True))
    assert seen == {0: 1, 1: 2, 2: -100, 3: 4, 4: 5, 5: -100}


def test_C8_positions_count_from_the_sequences_start_in_every_chunk() -> None:
    plan = alone(4, 4, (3, 10))
    for rank in range(4):
        spans = rank_spans(plan, rank)[0]
        local = load_local(spans, plan.batch, reader({0: torch.arange(3), 1: torch.arange(10)}), CPU)
        assert local.positions.tolist() == [p for s in spans.spans for p in range(s.start, s.stop)]
        assert local.positions.tolist() == local.ids.tolist()


def all_logits(rank: int, num_ranks: int, case: Case, changed: Sequence[int | None]) -> list[dict[Any, Tensor]]:
    plan = case.made
    executor = make_executor(case, rank)
    results = []
    for which in changed:
        parts: list[Any] = [None] * num_ranks
        dist.all_gather_object(parts, logits_by_token(executor, plan, make_tokens(plan, changed=which)))
        results.append({key: value for part in parts for key, value in part.items()})
    return results


@pytest.mark.parametrize(("keys", "tolerance"), [(LLAMA, 0.0), (QWEN3_MOE, 1e-12)], ids=["dense", "moe"])
def test_C14_changing_one_sequence_leaves_the_logits_of_all_others_in_a_ring(
    pool: RankPool, keys: Mapping[str, Any], tolerance: float
) -> None:
    plan = ring_plan((2, 2), (11, 7, 5, 3), [(0, 0, [0, 1], 4, "none"), (1, 0, [2, 3], 2, "none")])
    before, *after = pool.run(all_logits, Case(keys, plan.to_json()), [None, 0, 1, 2, 3])[0]
    for changed, now in enumerate(after):
        for key, logits in now.items():
            if key[0] != changed:
                assert float((logits - before[key]).abs().max()) <= tolerance, (changed, key)
        assert any(not torch.equal(now[key], before[key]) for key in now if key[0] == changed)


# --- E14: rounding ------------------------------------------------------------------------------


def error_in_bf16(rank: int, num_ranks: int, case: Case) -> float:
    """Error of all gradients of a bf16 step, against float64 in one process with the same (bf16) weights."""
    plan = case.made
    executor = make_executor(case, rank, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = planned_gradients(executor, plan, make_tokens(plan))
    if rank != 0:
        return 0.0
    model = make_model(case.keys, "sdpa").bfloat16().double()
    reference = reference_gradients(model, make_tokens(plan))
    pairs = [(g, reference.by_parameter[name]) for name, g in found.by_parameter.items()]
    difference = sum(float((g - r).double().square().sum()) for g, r in pairs if g is not None and r is not None)
    return float(difference**0.5 / reference.norm)


def test_E14_the_error_of_bf16_does_not_grow_with_the_ring(pool: RankPool) -> None:
    """Sums from hop to hop are float32; a rounding to bf16 in each would grow with the ring."""
    keys = {**LLAMA, "num_hidden_layers": 4}
    errors = {}
    for num_ranks in (1, 2, 4, 6):
        plan = alone(num_ranks, num_ranks, (97, 30))
        errors[num_ranks] = pool.run(error_in_bf16, Case(keys, plan.to_json()), ranks=num_ranks)[0]
    assert 0 < errors[1] < 0.2, errors
    assert max(errors.values()) < 2 * errors[1], errors


# --- F9: communicators --------------------------------------------------------------------------


def groups_made(rank: int, num_ranks: int, case: Case) -> tuple[int, int, int]:
    """(process groups made with the tree, made in a step, point-to-point calls in a step)."""
    calls = {"groups": 0, "messages": 0}
    make = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["groups"] += 1
        return make(*args, **kwargs)

    def refused(*args: Any, **kwargs: Any) -> Any:
        calls["messages"] += 1
        raise AssertionError("a message from rank to rank would get a communicator of its own")

    plan = case.made
    with patch.object(dist, "new_group", counted):
        executor = make_executor(case, rank, sharded=False)
        with_tree = calls["groups"]
        point_to_point: dict[str, Any] = dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), refused)
        with patch.multiple(dist, **point_to_point):
            planned_gradients(executor, plan, make_tokens(plan))
    return with_tree, calls["groups"] - with_tree, calls["messages"]


@pytest.mark.parametrize(("num_ranks", "ring_degree"), [(4, 4), (6, 3)])
def test_F9_rings_and_hybrids_use_the_groups_own_communicator(pool: RankPool, num_ranks: int, ring_degree: int) -> None:
    plan = alone(num_ranks, ring_degree, (13, 5))
    found = pool.run(groups_made, Case(LLAMA, plan.to_json()), ranks=num_ranks)
    assert found == [(1, 0, 0)] * num_ranks


def ring_bytes(rank: int, num_ranks: int, case: Case) -> tuple[int, int]:
    """(bytes sent in one step, as recorded; as the formula says)."""
    plan = case.made
    executor = make_executor(case, rank)
    with recorded(executor, plan) as log:
        planned_gradients(executor, plan, make_tokens(plan))
    (spans,) = rank_spans(plan, rank)
    sizes, shape = spans.shards[0].sizes, executor.shape
    # Every block but the next member's own passes here; gradients of every block but this member's own.
    keys = sum(sizes) - sizes[(rank + 1) % num_ranks]
    gradients = sum(sizes) - sizes[rank]
    recompute = case.recompute and plan.microbatches[0].placements[0].keep == "none"
    tokens = (3 if recompute else 2) * keys + gradients
    return sum(log.sent_bytes), tokens * 2 * shape.num_kv_heads * shape.head_dim * 8 * shape.num_layers


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_messages_of_a_ring_are_exact(pool: RankPool, num_ranks: int, keep: Keep) -> None:
    plan = alone(num_ranks, num_ranks, (29, 3, 1), keep)
    for measured, expected in pool.run(ring_bytes, Case(QWEN3, plan.to_json()), ranks=num_ranks):
        assert measured == expected
