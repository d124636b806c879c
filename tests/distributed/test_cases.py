"""Rows of the shared cases (sections A to G) that apply to Ulysses groups, each by its id."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.executor import LocalBatch
from nestsp.execute.local import load_local
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients, reference_gradients
from nestsp.plan import Plan
from nestsp.shape import head_shares
from nestsp.shard import rank_spans
from tests.distributed.equivalence import (
    COMMON,
    CPU,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    compare_with_one_process,
    load,
    logits_by_token,
    make_executor,
    make_model,
    make_tokens,
    origins,
    planned_gradients,
    reader,
    recorded,
)
from tests.distributed.pool import RankPool

Groups = Mapping[tuple[int, int], Sequence[int]]  # (level, first rank) → positions in the batch


def plan_of(fanouts: Sequence[int], lengths: Sequence[int], *microbatches: Groups, keep: Any = "none") -> Plan:
    tree = GroupTree(tuple(fanouts))
    groups = [{tree.group(level, rank): list(s) for (level, rank), s in m.items()} for m in microbatches]
    return Plan.of_groups(tree, SequenceBatch.of_lengths(lengths), groups, "test", keep=keep)


def verify(pool: RankPool, *plans: Plan, keys: Mapping[str, Any] = LLAMA) -> list[Verification]:
    cases = [Case({**keys, "num_hidden_layers": 2}, plan.to_json()) for plan in plans]
    outcomes = pool.run(compare_with_one_process, cases, ranks=plans[0].tree.num_ranks)[0]
    for plan, outcome in zip(plans, outcomes, strict=True):
        assert outcome.verification.passes(TOLERANCE), (plan, outcome)
        assert outcome.faults == (), (plan, outcome)
    return [outcome.verification for outcome in outcomes]


def local_targets(plan: Plan, tokens: Mapping[int, Tensor], rank: int) -> list[int]:
    """Targets of a rank in the first microbatch."""
    return load_local(rank_spans(plan, rank)[0], plan.batch, reader(tokens), CPU).targets.tolist()


# --- A: normalisation of the loss ---------------------------------------------------------------


def test_A1_A15_several_microbatches_are_one_batch(pool: RankPool) -> None:
    """A15: sums of losses meet in one function, whatever the microbatches."""
    lengths = (8, 512, 9, 300)
    apart = plan_of((2,), lengths, {(0, 0): [0, 1]}, {(0, 0): [2, 3]})
    together = plan_of((2,), lengths, {(0, 0): [0, 1, 2, 3]})
    first, second = verify(pool, apart, together)
    assert first.loss == pytest.approx(second.loss, rel=1e-12)
    assert first.norm == pytest.approx(second.norm, rel=1e-12)


def test_A3_microbatches_with_one_no_and_fifty_targets(pool: RankPool) -> None:
    verify(pool, plan_of((2,), (2, 1, 51), {(1, 1): [0]}, {(0, 0): [1]}, {(0, 0): [2]}))


def test_A5_A6_A12_loss_and_gradient_norm_do_not_depend_on_the_degree(pool: RankPool) -> None:
    lengths = (40, 23, 11, 5)
    plans = [plan_of((2, 2), lengths, {(level, 0): [0, 1, 2, 3]}) for level in (0, 1, 2)]
    results = verify(pool, *plans)
    for result in results:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-12)
        assert result.norm == pytest.approx(results[0].norm, rel=1e-12)


def constant_logits(rank: int, num_ranks: int, case: Case) -> float:
    executor = make_executor(case, rank)
    with torch.no_grad():
        for name, parameter in executor.root.named_parameters():
            if "lm_head" in name:
                parameter.zero_()  # all logits 0: each target costs log V
    plan = case.made
    total = executor.run(load(executor, plan, make_tokens(plan))).double()
    dist.all_reduce(total)
    return total.item()


def test_A9_a_model_with_constant_logits_costs_log_v_for_each_target(pool: RankPool) -> None:
    plan = plan_of((2, 2), (101, 40, 1), {(0, 0): [0], (1, 2): [1], (2, 3): [2]})
    totals = pool.run(constant_logits, Case(LLAMA, plan.to_json()))
    assert totals[0] == pytest.approx((100 + 39) * math.log(COMMON["vocab_size"]), rel=1e-12)


def test_A11_targets_count_equally_whichever_rank_holds_them(pool: RankPool) -> None:
    verify(pool, plan_of((2,), (10, 330, 330, 330), {(1, 0): [0], (1, 1): [1, 2, 3]}))


# --- B: tiny samples ----------------------------------------------------------------------------


def only_last_two(rank: int, num_ranks: int, case: Case) -> Verification | None:
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)
    local = load(executor, plan, tokens)
    tokens_here = local.microbatches[0].tokens
    for row, (_, position) in enumerate(origins(plan, rank)[0]):
        if position < plan.batch.lengths[0] - 3:
            tokens_here.targets[row] = -100
    loss = executor.run(local)
    assert (loss == 0) == bool((tokens_here.targets == -100).all())
    total = loss.double().clone()
    dist.all_reduce(total)
    found = full_gradients(executor.root, keep=rank == 0)
    if rank != 0:
        return None
    model = make_model(case.keys, "sdpa")
    log_p = model(input_ids=tokens[0][None]).logits[0].log_softmax(-1)
    alone = -log_p[[-3, -2], tokens[0][-2:]].sum()
    alone.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    return compare_gradients(Gradients(total.item(), found, {}), Gradients(alone.item(), expected, {}), 2)


def test_B1_ranks_whose_targets_are_all_ignored_add_exactly_zero(pool: RankPool) -> None:
    plan = plan_of((3, 2), (16,), {(0, 0): [0]})
    result = pool.run(only_last_two, Case(LLAMA, plan.to_json()), ranks=6)[0]
    assert result is not None
    assert result.passes(TOLERANCE), result


def test_B7_sequences_of_one_token(pool: RankPool) -> None:
    everywhere = plan_of((2,), (1, 1), {(0, 0): [0], (1, 1): [1]})
    among_others = plan_of((2,), (1, 5, 1, 1), {(0, 0): [0, 1, 2, 3]})
    nothing, something = verify(pool, everywhere, among_others)
    assert nothing.loss == nothing.norm == 0.0  # row B13: no target at all, and no crash
    assert something.norm > 0


def test_B11_sequences_shorter_than_their_degree(pool: RankPool) -> None:
    verify(
        pool, plan_of((3, 2), (1, 2, 3), {(0, 0): [0, 1, 2]}), plan_of((3, 2), (1, 2, 3), {(0, 0): [0], (1, 2): [1, 2]})
    )


# --- C: targets and positions -------------------------------------------------------------------


def test_C1_targets_are_shifted_before_sharding() -> None:
    plan = plan_of((2,), (8,), {(0, 0): [0]})
    tokens = {0: torch.arange(1, 9)}
    targets = [target for rank in (0, 1) for target in local_targets(plan, tokens, rank)]
    assert targets == [2, 3, 4, 5, 6, 7, 8, -100]


def test_C3_a_sequence_does_not_predict_the_next_one() -> None:
    plan = plan_of((2,), (3, 3), {(0, 0): [0, 1]})
    targets = [local_targets(plan, {0: torch.arange(3), 1: torch.arange(10, 13)}, rank) for rank in (0, 1)]
    assert targets == [[1, 2, -100], [11, 12, -100]]


def test_C8_C9_positions_count_from_the_sequences_start_on_every_rank() -> None:
    plan = plan_of((2, 2), (3, 10), {(0, 0): [0, 1]})
    tokens = make_tokens(plan)
    positions = [
        load_local(rank_spans(plan, r)[0], plan.batch, reader(tokens), CPU).positions.tolist() for r in range(4)
    ]
    assert positions == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def all_logits(rank: int, num_ranks: int, case: Case, changed: Sequence[int | None]) -> list[dict[Any, Tensor]]:
    """Logits of all tokens, once for each sequence that is changed; on rank 0."""
    plan = case.made
    executor = make_executor(case, rank)
    results = []
    for identity in changed:
        found = logits_by_token(executor, plan, make_tokens(plan, changed=identity))
        parts: list[Any] = [None] * num_ranks
        dist.all_gather_object(parts, found)
        results.append({key: value for part in parts for key, value in part.items()})
    return results if rank == 0 else []


MIXED = plan_of(
    (2, 2),
    (29, 13, 7, 11, 2, 1, 5),
    {(0, 0): [0, 4], (1, 0): [1], (1, 2): [2], (2, 1): [3], (2, 2): [5]},
    {(0, 0): [6]},
)


def in_slices(plan: Plan, num_slices: int) -> Plan:
    """The same plan; groups of several ranks exchange in slices of heads."""
    return replace(
        plan,
        microbatches=tuple(
            replace(
                m,
                placements=tuple(replace(p, num_slices=num_slices) if p.group.degree > 1 else p for p in m.placements),
            )
            for m in plan.microbatches
        ),
    )


@pytest.mark.parametrize(
    ("keys", "tolerance", "num_slices"),
    [(LLAMA, 0.0, 1), (QWEN3, 0.0, 1), (QWEN3, 0.0, 2), (QWEN3_MOE, 1e-12, 1)],
    ids=["llama", "qwen3", "qwen3 in slices", "moe"],
)
def test_C14_changing_one_sequence_leaves_the_logits_of_all_others(
    pool: RankPool, keys: dict[str, Any], tolerance: float, num_slices: int
) -> None:
    """Bit by bit in dense models; experts' batches change their size."""
    identities = MIXED.batch.ids
    plan = in_slices(MIXED, num_slices)
    before, *after = pool.run(all_logits, Case(keys, plan.to_json()), [None, *identities])[0]
    assert len(before) == MIXED.batch.num_tokens
    for changed, now in zip(identities, after, strict=True):
        for (identity, position), logits in now.items():
            difference = float((logits - before[identity, position]).abs().max())
            if identity != changed:
                assert difference <= tolerance, (changed, identity, position)
        assert any(not torch.equal(now[key], before[key]) for key in now if key[0] == changed)


def test_C6_E10_order_and_company_of_a_sequence_do_not_change_its_logits(pool: RankPool) -> None:
    """Also row E8 (packed against apart), on the reports' own lengths 3 and 5."""
    plans = [
        plan_of((2,), (3, 5), {(0, 0): [0, 1]}),
        plan_of((2,), (3, 5), {(0, 0): [1, 0]}),
        plan_of((2,), (3, 5), {(0, 0): [0]}, {(1, 1): [1]}),
    ]
    verify(pool, *plans)
    logits = [pool.run(all_logits, Case(LLAMA, plan.to_json()), [None], ranks=2)[0][0] for plan in plans]
    for other in logits[1:]:
        assert other.keys() == logits[0].keys()
        for key, value in other.items():
            assert torch.allclose(value, logits[0][key], rtol=1e-12, atol=1e-12)


# --- D: divisibility ----------------------------------------------------------------------------


def test_D1_D4_D5_lengths_need_not_divide_by_the_degree(pool: RankPool) -> None:
    verify(pool, *(plan_of((2, 2), (length,), {(0, 0): [0]}) for length in (7, 13, 29)))
    verify(pool, plan_of((2,), (7,), {(0, 0): [0]}))


def test_D3_four_sequences_over_two_ranks(pool: RankPool) -> None:
    verify(pool, plan_of((2,), (4, 8, 6, 10), {(0, 0): [0, 1, 2, 3]}))


def test_D6_four_tokens_and_heads_of_four(pool: RankPool) -> None:
    verify(pool, plan_of((2,), (4,), {(0, 0): [0]}), keys={**LLAMA, "head_dim": 4})


def test_D11_one_key_value_head_on_four_ranks(pool: RankPool) -> None:
    verify(
        pool,
        plan_of((4,), (19, 4), {(0, 0): [0, 1]}),
        keys={**QWEN3, "num_attention_heads": 4, "num_key_value_heads": 1},
    )


def test_D14_groups_use_their_own_ranks_not_the_worlds(pool: RankPool) -> None:
    """Groups that do not start at rank 0, with nothing anywhere else."""
    verify(pool, plan_of((2, 2), (9, 4), {(1, 2): [0, 1]}), plan_of((2, 2), (9,), {(2, 3): [0]}))
    verify(pool, plan_of((2, 3), (9, 4), {(1, 3): [0, 1]}))


def sent_bytes(rank: int, num_ranks: int, case: Case) -> list[tuple[int, int]]:
    """(bytes sent to other ranks in one step, as recorded; as the formula says)."""
    plan = case.made
    executor = make_executor(case, rank)
    with recorded(executor, plan) as log:
        planned_gradients(executor, plan, make_tokens(plan))
    shape = executor.shape
    (placement,) = plan.microbatches[0].placements
    (spans,) = rank_spans(plan, rank)
    sizes = spans.shards[0].sizes
    heads = head_shares(shape.num_heads, shape.num_kv_heads, placement.group.degree)
    mine = heads[rank]
    others = [member for member in range(num_ranks) if member != rank]
    # A token's queries go to the members that work for them, its keys and values compact to those that need them.
    query_out = sum(len(heads[m].query) for m in others) * sizes[rank]
    kv_out = 2 * sum(len(heads[m].kv) for m in others) * sizes[rank]
    back_query = sum(sizes[m] for m in others) * len(mine.query)
    back_kv = 2 * sum(sizes[m] for m in others) * len(mine.kv)
    forward = query_out + kv_out + back_query
    recompute = forward if placement.keep == "none" and case.recompute else 0
    backward = (query_out if placement.keep == "none" else 3 * query_out + kv_out) + back_query + back_kv
    elements = (forward + recompute + backward) * shape.head_dim * shape.num_layers
    return [(sum(log.sent_bytes), elements * 8)]


@pytest.mark.parametrize("keep", ["none", "output"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (8, 4), (8, 1)])
def test_D15_keys_and_values_travel_compact(pool: RankPool, keep: Any, heads: int, kv_heads: int) -> None:
    plan = plan_of((4,), (29, 3), {(0, 0): [0, 1]}, keep=keep)
    (microbatch,) = plan.microbatches
    placement = replace(microbatch.placements[0], num_slices=2)
    sliced = replace(plan, microbatches=(replace(microbatch, placements=(placement,)),))
    keys = {**QWEN3, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    for each in (plan, sliced):  # slices of heads carry the same, in more exchanges
        for ((measured, expected),) in pool.run(sent_bytes, Case(keys, each.to_json())):
            assert measured == expected


def test_D15_a_quarter_of_the_key_value_heads_is_a_quarter_of_their_bytes() -> None:
    """Heads 32 / 8 at degree 8: one key/value head for each member, not four."""
    assert all(len(share.query) == 4 and len(share.kv) == 1 for share in head_shares(32, 8, 8))


# --- E: attention -------------------------------------------------------------------------------


def test_E2_all_ranks_together_hold_every_token_once() -> None:
    for microbatch in range(len(MIXED.microbatches)):
        held = [origin for rank in range(4) for origin in origins(MIXED, rank)[microbatch]]
        assert len(held) == len(set(held))
        assert len(held) == sum(MIXED.group_tokens(p) for p in MIXED.microbatches[microbatch].placements)


def test_E13_every_dimension_has_another_size(pool: RankPool) -> None:
    """6 tokens, 4 and 2 heads of 8, hidden size 20, vocabulary 67: a swapped pair of dimensions cannot go unseen."""
    keys = {**QWEN3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 20, "intermediate_size": 28}
    verify(pool, plan_of((2,), (6,), {(0, 0): [0]}), plan_of((2,), (5, 6), {(0, 0): [0], (1, 1): [1]}), keys=keys)


# --- F: ranks without work ----------------------------------------------------------------------


def test_F1_leaves_without_sequences(pool: RankPool) -> None:
    verify(pool, plan_of((2, 2), (900, 1, 1), {(2, 0): [0], (2, 1): [1, 2]}))


def test_F3_a_rank_that_never_has_tokens(pool: RankPool) -> None:
    groups: list[Groups] = [{(2, 0): [0]}, {(1, 0): [1]}, {(2, 1): [2, 3]}]
    for keys in (LLAMA, QWEN3_MOE):
        verify(pool, plan_of((2, 2), (11, 7, 5, 2), *groups), keys=keys)


def test_F8_a_tree_of_n_ranks_makes_n_minus_one_process_groups() -> None:
    tree = GroupTree((2, 2, 2))
    assert sum(1 for level in range(tree.num_levels) for g in tree.groups(level) if g.degree > 1) == 7


class Broken(Exception):
    pass


def fail_and_go_on(rank: int, num_ranks: int, case: Case, where: str) -> Verification | None:
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)
    local = load(executor, plan, tokens)

    def fail(module: Any, *args: Any) -> None:
        raise Broken

    layer = executor.root.get_submodule("model.model.layers.1.mlp")
    handle = layer.register_forward_pre_hook(fail) if where == "forward" else layer.register_full_backward_hook(fail)
    with pytest.raises(Broken):
        executor.run(LocalBatch(local.microbatches[:1]))
    handle.remove()
    executor.root.zero_grad()
    # The same batch again: what the failed run left must not be taken for what this one keeps.
    total = executor.run(local).double()
    dist.all_reduce(total)
    found = full_gradients(executor.root, keep=rank == 0)
    if rank != 0:
        return None
    reference = reference_gradients(make_model(case.keys, "sdpa"), tokens)
    assert all(not microbatch.attention.stash for microbatch in local.microbatches)
    planned = Gradients(total.item(), found, reference.experts)
    return compare_gradients(planned, reference, sum(n - 1 for n in plan.batch.lengths))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_F12_after_an_error_in_one_microbatch_the_next_ones_are_right(pool: RankPool, where: str) -> None:
    plan = plan_of((2, 2), (29, 13, 7), {(0, 0): [0], (1, 0): [1]}, {(2, 3): [2]}, keep="output")
    result = pool.run(fail_and_go_on, Case(LLAMA, plan.to_json()), where)[0]
    assert result is not None
    assert result.passes(TOLERANCE), result


# --- G35: recomputation -------------------------------------------------------------------------


def test_G35_every_layer_recomputed_under_fsdp(pool: RankPool) -> None:
    """That recomputes repeat the same exchanges in one order is part of every comparison; see `schedule_faults`."""
    plans = [
        plan_of((2, 2), (17, 12, 5, 3), {(0, 0): [0], (1, 2): [1], (2, 1): [2, 3]}, keep=k) for k in ("none", "output")
    ]
    for keys in (LLAMA, QWEN3_MOE):
        verify(pool, *plans, keys=keys)
