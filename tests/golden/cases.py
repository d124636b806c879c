"""The plans that are kept as reviewed JSON, and how to make them again.

``python -m tests.golden.cases`` writes every file anew. Do that after a change that is meant to alter plans, and read
the difference: ``drawing`` shows what sits where, ``rank_tokens`` and ``imbalance`` how evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.execute.capability import executor_capabilities
from nestsp.planners.task import PlanningTask
from nestsp.shape import ModelShape
from nestsp.simulate import imbalance, plan_work

FOLDER = Path(__file__).parent
PROFILE = Path(__file__).parents[2] / "examples" / "slow-links.yaml"

# The quickstart's model: Qwen3-MoE of 4 layers, 8 query and 4 key/value heads, 8 experts of which a token takes 2.
SHAPE = ModelShape.from_hf_config(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }
)

# Lengths of a step of about 8,000 tokens of the standard library's functions and classes: a few long, most short.
QUICKSTART = SequenceBatch(
    (902, 14, 377, 5120, 88, 2301, 640, 41, 733, 12),
    (4890, 1321, 612, 471, 350, 208, 131, 87, 44, 1),
)
SIX = SequenceBatch.of_lengths([7919, 3001, 1999, 997, 997, 499, 251, 127, 61, 31, 17, 7, 3, 2, 1])


def _task(fanouts: tuple[int, ...], cap: int, planner: str, degree: int | None = None) -> PlanningTask:
    tree = GroupTree(fanouts)
    return PlanningTask(
        planner=planner,
        degree=degree,
        max_tokens_per_rank=cap,
        shape=SHAPE,
        cluster=Cluster(1, tree.num_ranks),
        tree=tree,
        profile=str(PROFILE),
        memory_per_rank_bytes=4 * 2**30,
        can=executor_capabilities(SHAPE, recompute=True),
        element_bytes=4,
    )


CASES: Mapping[str, tuple[PlanningTask, SequenceBatch]] = {
    "quickstart-2x2": (_task((2, 2), 2304, "nsp"), QUICKSTART),
    "six-ranks-3x2-two-microbatches": (_task((3, 2), 1400, "nsp"), SIX),
    "six-ranks-3x2-static-2": (_task((3, 2), 4096, "static", 2), SIX),
}


def reviewed(name: str) -> dict[str, Any]:
    """What the file of a case must hold."""
    task, batch = CASES[name]
    planned = task.solver()(batch)
    plan = planned.plan
    return {
        "drawing": plan.format_tree().splitlines(),
        "rank_tokens": [plan.rank_tokens(number) for number in range(len(plan.microbatches))],
        "imbalance": round(imbalance(plan_work(plan, SHAPE)), 4),
        "makespan_s": float(f"{planned.makespan_s:.6g}"),
        "digest": plan.digest,
        "plan": plan.to_json(),
    }


def to_text(value: Any, indent: str = "") -> str:
    """JSON with one line for each list of numbers, so that a difference can be read."""
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {to_text(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        return "[\n" + ",\n".join(inner + to_text(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(to_text(reviewed(case)) + "\n", encoding="utf-8")
