"""A fused kernel of head and likelihoods under FSDP gives what PyTorch's operators give. The kernel is a stand-in."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from nestsp.cluster import GroupTree
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients
from nestsp.model.fused_loss import FusedLoss
from nestsp.model.root import LossRoot
from tests.distributed.equivalence import (
    GEMMA2,
    LLAMA,
    TOLERANCE,
    Case,
    load,
    make_executor,
    make_tokens,
    make_tree_links,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan
from tests.unit.model.test_fused_loss import StandIn


def run_both(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[Verification]:
    """Each case with the stand-in against the same plan without it."""
    outcomes = []
    for case in cases:
        plan, found = case.made, []
        tokens, links = make_tokens(plan), make_tree_links(plan, rank)
        for fused in (FusedLoss(StandIn, "stand-in", case.keys.get("final_logit_softcapping")), None):
            executor = make_executor(case, rank, links=links)
            assert isinstance(executor.root, LossRoot)
            executor.root.fused = fused
            total = executor.run(load(executor, plan, tokens, weighted=case.weighted))
            dist.all_reduce(total)
            found.append(Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {}))
        if rank == 0:
            outcomes.append(compare_gradients(found[0], found[1], 1))
    return outcomes


def test_a_fused_loss_has_the_gradients_of_the_plain_one(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2,))).to_json()
    cases = [
        Case({**LLAMA, "tie_word_embeddings": True}, plan, weighted=True),
        Case(GEMMA2, plan),  # capped logits
        Case(LLAMA, plan, trainable=("layers",)),  # a head that is frozen
    ]
    outcomes = pool.run(run_both, cases, ranks=2, timeout_s=120.0)[0]
    assert len(outcomes) == len(cases)
    for verification in outcomes:
        assert verification.reference_norm > 0
        assert verification.passes(TOLERANCE), verification
