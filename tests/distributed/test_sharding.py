"""Every kind of sharding gives the gradients of one process, and weights from files are those of `from_pretrained`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nestsp.cluster import GroupTree
from nestsp.errors import ConfigError, ModelError
from nestsp.execute.verify import compare_gradients, reference_gradients
from nestsp.model.adapter import build_model, model_config
from nestsp.model.load import empty_model, fill_parameters, find_sources
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.train.parallelize import make_mesh, shard_root
from nestsp.train.update import update
from tests.distributed.equivalence import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
    planned_gradients,
    small_config,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

TIED = {**LLAMA, "tie_word_embeddings": True}


def compare_shardings(rank: int, num_ranks: int, cases: Sequence[Case], shards: Sequence[int]) -> list[Any]:
    """For each case and number of shards: the comparison with one process, and the norm that the update returns."""
    plan = Plan.from_json(cases[0].plan)
    links, tokens = make_tree_links(plan, rank), make_tokens(plan)
    outcomes = []
    for case in cases:
        for num_shards in shards:
            executor = make_executor(case, rank, links=links, num_shards=num_shards)
            planned = planned_gradients(executor, plan, tokens)
            norm = update(
                executor.root,
                torch.optim.SGD(executor.root.parameters(), lr=0.0),
                total_weight=1.0,
                max_grad_norm=None,
                lr=0.0,
            )
            if rank == 0:
                alone = make_model(case.keys, "sdpa", trainable=case.trainable)
                outcomes.append((compare_gradients(planned, reference_gradients(alone, tokens), 1), norm))
    return outcomes


@pytest.mark.parametrize("tree", [(2, 2), (3, 2)], ids=["4", "6"])
def test_A8_F13_no_sharding_changes_gradients_or_their_norm(pool: RankPool, tree: tuple[int, ...]) -> None:
    ranks = GroupTree(tree).num_ranks
    plan = nested_plan(GroupTree(tree), keep="output").to_json()
    cases = [Case(keys, plan) for keys in (TIED, QWEN3_MOE)] + [Case(LLAMA, plan, trainable=("q_proj", "norm"))]
    shards = [1, 2, ranks]  # none, hsdp, fsdp
    outcomes = pool.run(compare_shardings, cases, shards, ranks=ranks, timeout_s=120.0)[0]
    assert len(outcomes) == len(cases) * len(shards)
    for verification, norm in outcomes:
        assert verification.passes(TOLERANCE), verification
        assert norm == pytest.approx(verification.reference_norm, rel=TOLERANCE)
