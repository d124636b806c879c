"""Losses of whole sequences have the gradients of one process, wherever their tokens lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import NumericsError
from nestsp.execute.local import LocalTokens
from nestsp.execute.losses import SequenceSums, run_sequence_loss
from nestsp.execute.verify import Gradients, compare_gradients, full_gradients
from nestsp.plan import Plan
from tests.distributed.equivalence import (
    LLAMA,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
    make_weights,
    recorded,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

TIED = {**LLAMA, "tie_word_embeddings": True}
PAIRS = ((0, 5), (4, 1), (2, 3))


def preference(sums: SequenceSums) -> Tensor:
    """−log σ of the difference of mean log-likelihoods, for each pair of a chosen and a rejected sequence."""
    mean = -sums.nll_S / sums.weight_S.clamp(min=1)
    place = {identity: number for number, identity in enumerate(sums.ids)}
    chosen, rejected = (torch.tensor([place[pair[side]] for pair in PAIRS]) for side in (0, 1))
    return -F.logsigmoid(mean[chosen] - mean[rejected]).sum()


def one_microbatch(tree: GroupTree) -> Plan:
    """Members of each pair on different groups, among them groups that share no rank."""
    batch = SequenceBatch.of_lengths([9, 4, 7, 5, 11, 3])
    leaves = tree.groups(tree.num_levels - 1)
    placed = {tree.group(0, 0): [4], leaves[0]: [0, 2], leaves[-1]: [5], leaves[1]: [3]}
    placed.setdefault(tree.groups(1)[-1], []).append(1)
    return Plan.of_groups(tree, batch, [placed], "test")


def run_losses(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[Any]:
    """For each case: loss, comparison with one process, and calls of the kernel in forward."""
    outcomes = []
    for case in cases:
        plan = case.made
        tokens = make_tokens(plan)
        executor = make_executor(case, rank, links=make_tree_links(plan, rank))
        local = load(executor, plan, tokens, weighted=case.weighted)
        with recorded(executor, plan) as log:
            value = run_sequence_loss(executor, local, plan.batch, preference)
        planned = Gradients(value.item(), full_gradients(executor.root, keep=rank == 0), {})
        if rank == 0:
            alone = make_model(case.keys, "sdpa")
            weights = make_weights(plan) if case.weighted else {i: torch.ones(len(t)) for i, t in tokens.items()}
            outcomes.append((compare_gradients(planned, reference(alone, tokens, weights), 1), log.kernel["forward"]))
    return outcomes


def reference(model: nn.Module, tokens: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> Gradients:
    sums, totals = [], []
    for identity, ids in tokens.items():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        picked = F.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        weight = weights[identity][:-1].double()
        sums.append(-(picked * weight).sum())
        totals.append(weight.sum())
    value = preference(SequenceSums(tuple(tokens), torch.stack(sums), torch.stack(totals)))
    value.backward()
    return Gradients(value.item(), {name: p.grad for name, p in model.named_parameters()}, {})


@pytest.mark.parametrize("tree", [(2, 2), (3, 2)], ids=["4", "6"])
def test_A14_a_loss_of_pairs_in_different_groups_has_the_gradients_of_one_process(
    pool: RankPool, tree: tuple[int, ...]
) -> None:
    ranks = GroupTree(tree).num_ranks
    plans = [one_microbatch(GroupTree(tree)), nested_plan(GroupTree(tree), keep="output")]
    cases = [Case(keys, plan.to_json(), weighted=w) for plan in plans for keys, w in ((TIED, False), (QWEN3_MOE, True))]
    outcomes = pool.run(run_losses, cases, ranks=ranks, timeout_s=120.0)[0]
    assert len(outcomes) == len(cases)
    for verification, _ in outcomes:
        assert verification.reference_loss > 0
        assert verification.passes(TOLERANCE), verification
    # One microbatch: forward and recompute, no third pass.
    (_, calls), *_ = outcomes
    held = sum(1 for _, placement in plans[0].placements() if 0 in placement.group.ranks)
    assert calls == 2 * 3 * held


def run_token_loss(rank: int, num_ranks: int, case: Case) -> Any:
    plan = case.made
    tokens = make_tokens(plan)
    executor = make_executor(case, rank)

    def squares(local: LocalTokens, nll: Tensor) -> Tensor:
        return (nll.square() * (1 + local.sequences)).sum()  # another weight for each sequence, and no plain sum

    total = executor.run(load(executor, plan, tokens), squares)
    dist.all_reduce(total)
    planned = Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {})
    if rank:
        return None
    model = make_model(case.keys, "sdpa")
    value = torch.zeros((), dtype=torch.float64)
    for number, ids in enumerate(tokens.values()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        nll = F.cross_entropy(logits, ids[1:], reduction="none")
        value = value + nll.square().sum() * (1 + number)
    value.backward()
    expected = Gradients(value.item(), {name: p.grad for name, p in model.named_parameters()}, {})
    return compare_gradients(planned, expected, 1)


def test_a_loss_of_tokens_has_the_gradients_of_one_process(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2, 2)))
    assert pool.run(run_token_loss, Case(TIED, plan.to_json()), ranks=4)[0].passes(TOLERANCE)


def run_bad_loss(rank: int, num_ranks: int, case: Case) -> str:
    plan = case.made
    executor = make_executor(case, rank)
    local = load(executor, plan, make_tokens(plan))
    try:
        run_sequence_loss(executor, local, plan.batch, lambda sums: (sums.nll_S[1] - sums.nll_S[1]).sqrt())
    except NumericsError as error:
        return str(error)
    return "it ran"


def test_a_loss_that_is_not_finite_is_refused_on_all_ranks_and_names_the_sequences(pool: RankPool) -> None:
    for plan in (one_microbatch(GroupTree((2, 2))), nested_plan(GroupTree((2, 2)))):
        sentences = set(pool.run(run_bad_loss, Case(LLAMA, plan.to_json()), ranks=4))
        assert sentences == {
            "the loss is 0.0, and its derivative is not finite for sequences [1], but both must be finite; no gradient "
            "was made of it, so correct the loss"
        }
