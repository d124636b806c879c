"""A user's loss, by name or by call, together with the routers' auxiliary loss: gradients and losses of one process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nestsp.cluster import GroupTree
from nestsp.config import RunConfig
from nestsp.execute.local import LocalTokens
from nestsp.execute.losses import SequenceSums
from nestsp.execute.objective import Objective
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients
from tests.distributed.equivalence import (
    QWEN3_MOE,
    TOLERANCE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan
from tests.distributed.test_losses import one_microbatch, preference
from tests.distributed.test_trainer import ROUNDING, Refusal, stop_at, train_rank
from tests.e2e.runs import losses, read_plans, tiny
from tests.unit.train.test_objective import documented

COEFFICIENT = 0.3


def squares(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
    return (nll_T.square() * tokens.weights).sum()


def run_objectives(
    rank: int, num_ranks: int, cases: Sequence[Case], objectives: Sequence[Objective]
) -> list[tuple[Verification, float | None, float]]:
    """Each objective against one process, and both auxiliary losses."""
    outcomes = []
    for case in cases:
        plan = case.made
        tokens = make_tokens(plan)
        links = make_tree_links(plan, rank)
        num_targets = sum(length - 1 for length in plan.batch.lengths)
        for objective in objectives:
            executor = make_executor(case, rank, links=links, router_loss=objective.router_loss)
            denominator = objective.denominator(num_targets)
            for _ in range(2 if objective.router_loss == "previous_step" else 1):  # whose counts are then its own
                executor.root.zero_grad()
                share, auxiliary = objective.run(executor, load(executor, plan, tokens), plan.batch, num_targets)
            total = torch.tensor(share, dtype=torch.float64)
            dist.all_reduce(total)
            planned = Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {})
            if rank == 0:
                expected, expected_auxiliary = reference(case, tokens, objective, denominator)
                verification = compare_gradients(planned, expected, denominator)
                outcomes.append((verification, auxiliary, expected_auxiliary))
    return outcomes


def reference(
    case: Case, tokens: Mapping[int, Tensor], objective: Objective, denominator: float
) -> tuple[Gradients, float]:
    """Each sequence alone; experts' counts and probabilities over the batch and all layers."""
    model = make_model(case.keys, "sdpa")
    nlls, routed = [], []
    for ids in tokens.values():
        output = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        nlls.append(F.cross_entropy(output.logits[0, :-1], ids[1:], reduction="none"))
        routed += output.router_logits
    probabilities = torch.cat(routed).softmax(-1)
    chosen = F.one_hot(probabilities.topk(2, -1).indices, 4).sum(1).double().mean(0)
    auxiliary = 4 * (chosen * probabilities.mean(0)).sum()
    if objective.sequence_loss is None:
        value = torch.cat(nlls).square().sum()
    else:
        numbers = torch.tensor([len(nll) for nll in nlls], dtype=torch.float64)
        value = objective.sequence_loss(SequenceSums(tuple(tokens), torch.stack([n.sum() for n in nlls]), numbers))
    (value + objective.router_coefficient * denominator * auxiliary).backward()
    return Gradients(value.item(), {name: p.grad for name, p in model.named_parameters()}, {}), auxiliary.item()


OBJECTIVES = (
    Objective(sequence_loss=preference, router_loss="counting_pass", router_coefficient=COEFFICIENT),
    Objective(sequence_loss=preference, router_loss="previous_step", router_coefficient=COEFFICIENT),
    Objective(token_loss=squares, router_loss="counting_pass", router_coefficient=COEFFICIENT),
)


def test_A14_a_users_loss_and_the_routers_together_have_the_gradients_of_one_process(pool: RankPool) -> None:
    tree = GroupTree((2, 2))
    plans = [one_microbatch(tree), nested_plan(tree, keep="output")]
    cases = [Case(QWEN3_MOE, plan.to_json()) for plan in plans]
    outcomes = pool.run(run_objectives, cases, OBJECTIVES, ranks=4, timeout_s=120.0)[0]
    assert len(outcomes) == len(cases) * len(OBJECTIVES)
    for verification, auxiliary, expected in outcomes:
        assert verification.reference_loss > 0
        assert verification.passes(TOLERANCE), verification
        assert auxiliary == pytest.approx(expected, rel=TOLERANCE)


# --- By name, in a run ---------------------------------------------------------------------------


def write_pairs(folder: Path, module: str, *, as_rows: bool = False) -> None:
    """Pairs of unequal lengths: sorted letters are chosen over unsorted ones; and the documented losses."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(8):
        letters = "hgfedcba"[: 3 + number % 5] * (1 + 3 * number % 7)
        chosen, prompt = "".join(sorted(letters)), f"{number}: "
        if as_rows:
            rows += [{"prompt": prompt, "chosen": chosen, "rejected": letters}]
        else:
            rows += [{"prompt": prompt, "completion": answer} for answer in (chosen, letters)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{module}.py").write_text(documented())


PAIRED = (
    "data.tokens_per_step=null",
    "data.sequences_per_step=8",
    "data.samples_together=2",
    "planner.max_tokens_per_rank=24",
    "train.learning_rate=0.01",
    "train.steps=6",
)


def test_A14_a_run_by_dpo_is_the_same_on_other_ranks_and_resumes(pool: RankPool, tmp_path: Path) -> None:
    more = ("train.sequence_loss=pairs_of_a_test:dpo", "train.reference=true", "train.longest_first=true")
    config = tiny(*PAIRED, *more, "train.router_loss=counting_pass")
    for name in ("straight", "alone"):
        write_pairs(tmp_path / name, "pairs_of_a_test", as_rows=True)
    assert pool.run(train_rank, tmp_path / "straight", config, None, ranks=4) == [None] * 4
    run = tmp_path / "straight" / "runs" / "tiny-1"
    plans = read_plans(run)
    for plan in plans:
        chosen, rejected = plan.batch.ids[0::2], plan.batch.ids[1::2]
        assert len(chosen) == 4
        assert all(one % 2 == 0 and other == one + 1 for one, other in zip(chosen, rejected, strict=True))
    assert any(len(plan.microbatches) > 1 for plan in plans)
    assert any(apart(plan) for plan in plans), "no pair has its members in groups that share no rank"
    assert losses(run)[0] == pytest.approx(math.log(2), abs=ROUNDING)  # the model is its own reference
    assert losses(run)[-1] < losses(run)[0]
    alone = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"ranks": 1}),
            "planner": config.planner.model_copy(update={"max_tokens_per_rank": None}),
        }
    )
    assert pool.run(train_rank, tmp_path / "alone", alone, None, ranks=1) == [None]
    assert losses(tmp_path / "alone" / "runs" / "tiny-1") == pytest.approx(losses(run), abs=ROUNDING)
    stopped = stop_at(tmp_path / "straight", tmp_path / "stopped", 3)
    assert pool.run(train_rank, tmp_path / "stopped", config, "auto", ranks=4) == [None] * 4
    assert losses(stopped) == losses(run)
    older = str(stopped / "checkpoints" / "step-000004")  # a new run, which compares with the same
    assert pool.run(train_rank, tmp_path / "stopped", config, older, ranks=4) == [None] * 4
    assert losses(stopped.parent / "tiny-2") == losses(run)
    (stopped / "reference.npy").unlink()
    [refusal] = set(pool.run(train_rank, tmp_path / "stopped", longer(config), str(stopped), ranks=4))
    assert refusal is not None
    assert refusal.kind == "CheckpointError"
    assert re.match(r"train\.reference is true, but .*reference\.npy, which was made when the", refusal.sentence)


def longer(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})


def apart(plan: Any) -> bool:
    ranks = {s: set(p.group.ranks) for m in plan.microbatches for p in m.placements for s in p.sequences}
    return any(not ranks[number] & ranks[number + 1] for number in range(0, len(ranks), 2))


def test_a_run_by_a_loss_of_tokens_is_that_of_the_function(pool: RankPool, tmp_path: Path) -> None:
    """Twice the plain loss is twice the plain loss."""
    values = []
    for name, overrides in (("plain", ()), ("twice", ("train.token_loss=twice_of_a_test:twice",))):
        write_pairs(tmp_path / name, "unused_losses")
        (tmp_path / name / "twice_of_a_test.py").write_text(
            "def twice(tokens, nll):\n    return 2 * (tokens.weights * nll).sum()\n"
        )
        config = tiny(*PAIRED, "train.steps=1", "train.checkpoint_every=null", *overrides)
        assert pool.run(train_rank, tmp_path / name, config, None, ranks=2) == [None] * 2
        values += losses(tmp_path / name / "runs" / "tiny-1")
    assert values[1] == 2 * values[0]


REFUSED = """
import os, torch


def other(sums):
    return (sums.nll_S * torch.rand(1, generator=torch.Generator().manual_seed(os.getpid()))).sum()


def missing(sums):
    return sums.nll_S.sum() * {}[sums.ids[0] - sums.ids[0]]


def mean(tokens, nll):
    return nll.mean()


def rankwise(tokens, nll):
    return (1 + torch.distributed.get_rank()) * (tokens.weights * nll).sum()


def compares(sums):
    return (sums.nll_S - sums.reference_S).sum()
"""


@pytest.mark.parametrize(
    ("which", "name", "said"),
    [
        (
            "sequence",
            "other",
            "rank 1, with other derivatives, for the same sums, but it must follow from its argument",
        ),
        (
            "sequence",
            "missing",
            "missing', but when it was tried it ended with KeyError: 0 (refused_losses.py, line 10)",
        ),
        (
            "token",
            "mean",
            "for two parts of them, and it must be a sum over tokens, which lie on many ranks; return the",
        ),
        (
            "token",
            "rankwise",
            "train.token_loss gave 12.875 on rank 0 and 25.75 on rank 1 for the same numbers, but it",
        ),
        ("sequence", "compares", "; correct it, or set train.reference: true if it compares with sums.reference_S"),
    ],
)
def test_a_loss_that_would_be_wrong_is_refused_on_all_ranks_before_the_run(
    pool: RankPool, tmp_path: Path, which: str, name: str, said: str
) -> None:
    write_pairs(tmp_path, "unused_losses")
    (tmp_path / "refused_losses.py").write_text(REFUSED)
    config = tiny(*PAIRED, f"train.{which}_loss=refused_losses:{name}")
    [refusal] = set(pool.run(train_rank, tmp_path, config, None, ranks=2))
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "ConfigError"
    assert refusal.said_once
    assert said in refusal.sentence
    assert not (tmp_path / "runs").exists()


def test_a_corpus_whose_samples_cannot_stay_together_is_refused(pool: RankPool, tmp_path: Path) -> None:
    write_pairs(tmp_path, "unused_losses")
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines(keepends=True)
    empty = json.dumps({"prompt": "", "completion": ""}) + "\n"
    sentences = []
    for corpus in (lines[:-1], [*lines[:-1], empty]):
        (tmp_path / "corpus.jsonl").write_text("".join(corpus))
        config = tiny(*PAIRED, "data.append_eos=false")
        [refusal] = pool.run(train_rank, tmp_path, config, None, ranks=1)
        assert refusal is not None
        assert refusal.kind == "DataError"
        sentences.append(refusal.sentence)
    assert sentences == [
        "corpus.jsonl has 15 samples, but data.samples_together is 2; give whole runs of so many",
        "corpus.jsonl has 1 document that is empty or skipped, but data.samples_together is 2, so the ones behind "
        "would stand beside the wrong neighbours; remove their whole runs",
    ]
