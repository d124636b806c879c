"""What a run may meet besides plain training: frozen parameters, weights, evaluation, bfloat16, errors, no FSDP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.execute.executor import LocalBatch
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients, reference_gradients
from nestsp.model.adapter import decoder_layers
from nestsp.plan import Plan
from tests.distributed.equivalence import (
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    Log,
    compare_with_one_process,
    load,
    logits_by_token,
    make_executor,
    make_model,
    make_tokens,
    order_faults,
    origins,
    planned_gradients,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_cases import in_slices
from tests.distributed.test_equivalence import keeping, nested_plan

PLAN = nested_plan(GroupTree((2, 2))).to_json()
KEPT = nested_plan(GroupTree((2, 2)), keep="output").to_json()
SLICED = in_slices(nested_plan(GroupTree((2, 2)), keep="output"), 2).to_json()

# Names of parameters that are trained; all others are frozen, the embedding first of all, so that the first layers' q,
# k and v need no gradient. The ranks' recomputes and exchanges must still match, and some rank has no tokens.
TRAINED = {
    "the last layer": ("layers.2.",),
    "queries": ("q_proj",),
    "values of the middle layer": ("layers.1.self_attn.v_proj",),
    "the first layer's feed-forward": ("layers.0.mlp",),
    "the last norm": ("model.norm",),
    "the head": ("lm_head",),
    "the embedding": ("embed_tokens",),
}


@pytest.mark.parametrize("plan", [PLAN, KEPT], ids=["none kept", "outputs kept"])
def test_frozen_parameters_change_no_other_gradient(pool: RankPool, plan: dict[str, Any]) -> None:
    cases = [Case(LLAMA, plan, recompute, trainable=names) for names in TRAINED.values() for recompute in (True, False)]
    cases.append(Case(QWEN3_MOE, plan, True, trainable=("q_proj", "gate.weight")))
    outcomes = pool.run(compare_with_one_process, cases, timeout_s=100.0)[0]
    assert len(outcomes) == len(cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.verification.passes(TOLERANCE), (case, outcome)
        assert outcome.faults == (), (case, outcome)


def gathered_after_forward(rank: int, num_ranks: int, case: Case) -> tuple[list[bool], list[bool]]:
    """Whether each layer's parameters are still gathered after the forward pass; and after the backward pass."""
    plan = case.made
    executor = make_executor(case, rank)
    microbatch = load(executor, plan, make_tokens(plan)).microbatches[0]
    layers = decoder_layers(executor.root)

    def gathered() -> list[bool]:
        return [any(not isinstance(parameter, DTensor) for parameter in layer.parameters()) for layer in layers]

    loss = executor.root(microbatch.tokens, microbatch.attention).sum()
    before = gathered()
    loss.backward()
    return before, gathered()


def test_layers_that_keep_everything_are_resharded_all_the_same(pool: RankPool) -> None:
    """Activations stay, parameters go; so every rank gathers as often whatever it keeps."""
    for kept in (0, 1, 3):
        plan = keeping(nested_plan(GroupTree((2, 2))), kept, 0, 0)
        for before, after in pool.run(gathered_after_forward, Case(LLAMA, plan.to_json())):
            assert not any(before)
            assert not any(after)


def test_targets_may_have_any_weights(pool: RankPool) -> None:
    """Zeros, negative and large ones, as reinforcement learning has them; the loss is Σ weight × nll."""
    cases = [Case(keys, KEPT, weighted=True) for keys in (LLAMA, QWEN3, QWEN3_MOE)]
    for case, outcome in zip(cases, pool.run(compare_with_one_process, cases)[0], strict=True):
        assert outcome.verification.passes(TOLERANCE), (case, outcome)
        assert outcome.verification.loss != 0


def evaluate_and_train(rank: int, num_ranks: int, case: Case) -> tuple[float, float, Verification | None]:
    """Loss with and without gradients before a training step, and whether the step is right after it."""
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)
    losses = []
    for training in (True, False):
        executor.root.train(training)
        local = load(executor, plan, tokens)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for microbatch in local.microbatches:
                nll = executor.root(microbatch.tokens, microbatch.attention)
                assert not nll.requires_grad
                assert not microbatch.attention.stash
                total += nll.sum()
        dist.all_reduce(total)
        losses.append(total.item())
    executor.root.train()
    planned = planned_gradients(executor, plan, tokens)
    if rank != 0:
        return losses[0], losses[1], None
    reference = reference_gradients(make_model(case.keys, "sdpa"), tokens)
    assert losses[0] == losses[1] == pytest.approx(reference.loss_sum, rel=1e-12)
    return losses[0], losses[1], compare_gradients(planned, reference, sum(n - 1 for n in plan.batch.lengths))


def test_evaluation_keeps_nothing_and_leaves_training_right(pool: RankPool) -> None:
    *_, result = pool.run(evaluate_and_train, Case(QWEN3_MOE, KEPT))[0]
    assert result is not None
    assert result.passes(TOLERANCE), result


def without_fsdp(rank: int, num_ranks: int, case: Case) -> Verification | None:
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank, sharded=False)
    total = executor.run(load(executor, plan, tokens)).double()
    dist.all_reduce(total)
    found = {}
    for name, parameter in executor.root.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(grad)
        found[name.removeprefix("model.")] = grad
    if rank != 0:
        return None
    reference = reference_gradients(make_model(case.keys, "sdpa"), tokens)
    planned = Gradients(total.item(), found, reference.experts)
    return compare_gradients(planned, reference, sum(n - 1 for n in plan.batch.lengths))


@pytest.mark.parametrize("fanouts", [(), (2, 2)], ids=["1", "4"])
def test_A8_a_model_that_is_not_sharded_gives_the_same_gradients(pool: RankPool, fanouts: tuple[int, ...]) -> None:
    tree = GroupTree(fanouts)
    case = Case(LLAMA, nested_plan(tree).to_json())
    result = pool.run(without_fsdp, case, ranks=tree.num_ranks)[0]
    assert result is not None
    assert result.passes(TOLERANCE), result


def three_steps(rank: int, num_ranks: int, case: Case) -> tuple[float, float]:
    """Largest difference between parameters after three steps of plain SGD and those of one process."""
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)
    alone = make_model(case.keys, "sdpa")
    targets, rate = sum(n - 1 for n in plan.batch.lengths), 0.05
    for model in (executor.root, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            if model is alone:
                reference_gradients(alone, tokens)
            else:
                executor.run(load(executor, plan, tokens))
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= targets
            optimizer.step()
    fresh = dict(make_model(case.keys, "sdpa").named_parameters())
    worst = moved = 0.0
    for mine, (name, right) in zip(executor.root.parameters(), alone.named_parameters(), strict=True):
        assert isinstance(mine, DTensor)
        worst = max(worst, float((mine.full_tensor() - right).detach().abs().max()))
        moved = max(moved, float((right - fresh[name]).detach().abs().max()))
    return worst, moved


def test_parameters_after_three_steps_are_those_of_one_process(pool: RankPool) -> None:
    worst, moved = pool.run(three_steps, Case(QWEN3, KEPT))[0]
    assert worst < 1e-9
    assert moved > 1e-3


def low_precision_errors(rank: int, num_ranks: int, case: Case) -> tuple[dict[str, float], dict[str, float]] | None:
    """Relative gradient errors in bfloat16 by parameter, of one process and of the plan, against float64; on rank 0."""
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    executor.run(load(executor, plan, tokens))
    planned = full_gradients(executor.root, keep=rank == 0)
    if rank != 0:
        return None
    right = reference_gradients(make_model(case.keys, "sdpa"), tokens).by_parameter
    sums: dict[str, Tensor] = {}
    for ids in tokens.values():  # each sequence alone, its gradients summed in float32 as the plan's are
        model = make_model(case.keys, "sdpa", dtype=torch.bfloat16)
        if len(ids) > 1:
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            F.cross_entropy(logits, ids[1:], reduction="sum").backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()

    def errors(found: Mapping[str, Tensor | None]) -> dict[str, float]:
        result, square, whole = {}, 0.0, 0.0
        for name, expected in right.items():
            grad = found[name]
            assert grad is not None
            assert expected is not None
            difference = float((grad.double() - expected).norm())
            result[name] = difference / float(expected.norm())
            square, whole = square + difference**2, whole + float(expected.norm()) ** 2
        return {**result, "all": math.sqrt(square / whole)}

    return errors(sums), errors(planned)


@pytest.mark.parametrize("plan", [PLAN, KEPT, SLICED], ids=["none kept", "outputs kept", "in slices"])
@pytest.mark.parametrize("keys", [LLAMA, {**QWEN3, "num_key_value_heads": 1}], ids=["llama", "one kv head"])
def test_E14_bfloat16_is_at_most_three_times_as_far_off_as_one_process_in_bfloat16(
    pool: RankPool, keys: dict[str, Any], plan: dict[str, Any]
) -> None:
    errors = pool.run(low_precision_errors, Case(keys, plan))[0]
    assert errors is not None
    alone, planned = errors
    assert 1e-4 < alone["all"] < 0.2  # the comparison means something
    for name, error in planned.items():
        assert error <= 3 * alone[name], (name, error, alone[name])


def filler_only(rank: int, num_ranks: int, case: Case) -> tuple[float, int]:
    """This rank's loss, and its exchanges, in a plan that gives work to rank 0 alone."""
    plan = case.made
    executor = make_executor(case, rank)
    local = load(executor, plan, make_tokens(plan))
    assert bool(local.microbatches[0].tokens.num_tokens) == (rank == 0)
    return executor.run(local).item(), len(origins(plan, rank)[0])


def test_ranks_without_tokens_in_any_microbatch_add_nothing(pool: RankPool) -> None:
    tree = GroupTree((2, 2))
    plan = Plan.of_groups(
        tree, SequenceBatch.of_lengths([9, 5]), [{tree.group(2, 0): [0]}, {tree.group(2, 0): [1]}], "test"
    )
    for rank, (loss, tokens) in enumerate(pool.run(filler_only, Case(LLAMA, plan.to_json()))):
        assert (loss > 0) == (tokens > 0) == (rank == 0)
        assert math.isfinite(loss)


def run_twice(rank: int, num_ranks: int, case: Case) -> bool:
    """Whether the same batch gives the same bits again, and adds to the gradients that are there."""
    plan = case.made
    executor = make_executor(case, rank)
    local = load(executor, plan, make_tokens(plan))
    executor.run(local)
    first = full_gradients(executor.root, keep=True)
    executor.root.zero_grad()
    executor.run(LocalBatch(local.microbatches))
    again = full_gradients(executor.root, keep=True)
    executor.run(local)
    doubled = full_gradients(executor.root, keep=True)
    for name, grad in first.items():
        second, third = again[name], doubled[name]
        assert grad is not None
        assert second is not None
        assert third is not None
        assert torch.equal(grad, second), name
        assert torch.allclose(third, 2 * grad, rtol=1e-12, atol=1e-12), name
    return True


def test_a_batch_may_run_again_and_gives_the_same_bits(pool: RankPool) -> None:
    assert all(pool.run(run_twice, Case(LLAMA, KEPT)))


def test_logits_without_gradients_are_those_of_one_process(pool: RankPool) -> None:
    assert max(pool.run(logit_error, Case(QWEN3, PLAN))) < 1e-12


def logit_error(rank: int, num_ranks: int, case: Case) -> float:
    plan = case.made
    tokens = make_tokens(plan)
    found = logits_by_token(make_executor(case, rank), plan, tokens)
    model = make_model(case.keys, "sdpa")
    with torch.no_grad():
        right = {identity: model(input_ids=ids[None]).logits[0] for identity, ids in tokens.items()}
    return max((float((x - right[i][p]).abs().max()) for (i, p), x in found.items()), default=0.0)


A, B = (0, 0), (1, 0)


@pytest.mark.parametrize(
    ("sequences", "fits"),
    [([[A, B], [A, B]], True), ([[A, B], [B, A]], False), ([[A, B, A], [A, A]], True), ([[A, B, A], [A, A, B]], False)],
)
def test_the_check_of_one_total_order_can_fail(sequences: Sequence[Sequence[tuple[int, int]]], fits: bool) -> None:
    assert (order_faults([Log(list(sequence)) for sequence in sequences]) == []) == fits
