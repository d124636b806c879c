"""The claim of the whole system: any plan gives the gradients of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import Plan
from tests.distributed.equivalence import (
    COHERE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    compare_with_one_process,
)
from tests.distributed.pool import RankPool

# Prime lengths, one and two tokens, more ranks than tokens; all deal unevenly.
LENGTHS = (29, 13, 7, 5, 3, 2, 1, 1)


def static_plan(tree: GroupTree, level: int, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    """Sequences dealt in turn over the groups of one level, in two microbatches."""
    batch = SequenceBatch.of_lengths(lengths)
    groups = tree.groups(level)
    microbatches: list[dict[Group, list[int]]] = [{}, {}]
    for position in range(batch.num_sequences):
        microbatches[position % 2].setdefault(groups[position // 2 % len(groups)], []).append(position)
    return Plan.of_groups(tree, batch, microbatches, "test")


def nested_plan(tree: GroupTree, keep: Any = "none") -> Plan:
    """All levels in use at once; then a microbatch whose upper ranks are empty; then one with one token in the root."""
    lengths = [17, 11] * tree.num_levels + [2, 1, 6, 1]
    batch = SequenceBatch.of_lengths(lengths)
    first: dict[Group, list[int]] = {}
    for level in range(tree.num_levels):
        groups = tree.groups(level)
        for which in (0, 1):
            first.setdefault(groups[(which * (len(groups) - 1) + level) % len(groups)], []).append(2 * level + which)
    rest = list(range(2 * tree.num_levels, len(lengths)))
    second = {tree.group(tree.num_levels - 1, 0): rest[:2]}
    third = {tree.group(0, 0): rest[3:]}
    third.setdefault(tree.group(tree.num_levels - 1, tree.num_ranks - 1), []).append(rest[2])
    return Plan.of_groups(tree, batch, [first, second, third], "test", keep=keep)


def check(pool: RankPool, cases: Sequence[Case]) -> None:
    """All cases must have one number of ranks."""
    ranks = cases[0].made.tree.num_ranks
    outcomes = pool.run(compare_with_one_process, cases, ranks=ranks, timeout_s=30.0 + 10.0 * len(cases))[0]
    assert len(outcomes) == len(cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.verification.passes(TOLERANCE), (case, outcome)
        assert outcome.faults == (), (case, outcome)


TREES = {"1": (), "2": (2,), "3": (3,), "4": (2, 2), "4 at once": (4,), "6": (3, 2), "6 other way": (2, 3)}
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
# Two layers where a middle one adds nothing: a first one, whose input needs the embedding's gradient, and a last one.
TWO_LAYERS = {"num_hidden_layers": 2}
ALL_FULL = {"layer_types": ["full_attention"] * 2}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "mixtral": MIXTRAL,
    "mistral": {**MISTRAL, "sliding_window": None},
    "gemma2, soft caps": {**GEMMA2, **ALL_FULL},
    "gemma3_text": {**GEMMA3, **ALL_FULL},
    "gpt_oss, sinks": {**GPT_OSS, **ALL_FULL},
    "phi3": PHI3,
    "granite": GRANITE,
    "cohere": COHERE,
    "olmo2": OLMO2,
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_nested_plans_give_the_gradients_of_one_process(pool: RankPool, tree: tuple[int, ...]) -> None:
    """Rows B7, D3, E11, F1 and G35 of the shared cases, among others."""
    plan = nested_plan(GroupTree(tree)).to_json()
    check(pool, [Case(keys, plan) for keys in MODELS.values()])


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_static_plans_of_every_level_give_the_gradients_of_one_process(pool: RankPool, tree: tuple[int, ...]) -> None:
    plans = [static_plan(GroupTree(tree), level).to_json() for level in range(len(tree) + 1)]
    check(pool, [Case({**LLAMA, **TWO_LAYERS}, plan, recompute) for plan in plans for recompute in (True, False)])


def test_layers_that_are_not_recomputed_give_the_same_gradients(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2, 2))).to_json()
    check(pool, [Case(keys, plan, recompute=False) for keys in MODELS.values()])


@pytest.mark.parametrize("tree", [(2, 2), (3, 2)], ids=["4", "6"])
def test_kept_outputs_give_the_same_gradients(pool: RankPool, tree: tuple[int, ...]) -> None:
    plan = nested_plan(GroupTree(tree), keep="output").to_json()
    check(pool, [Case(keys, plan, recompute) for keys in MODELS.values() for recompute in (True, False)])


def keeping(plan: Plan, *num_kept_layers: int) -> Plan:
    """The same plan; each microbatch keeps so many layers."""
    made = (replace(m, num_kept_layers=k) for m, k in zip(plan.microbatches, num_kept_layers, strict=True))
    return replace(plan, microbatches=tuple(made))


@pytest.mark.parametrize("tree", [(2, 2), (3,)], ids=["4", "3"])
def test_some_kept_layers_give_the_same_gradients(pool: RankPool, tree: tuple[int, ...]) -> None:
    """Another number in each microbatch, none and all three among them; recomputes count, see `schedule_faults`."""
    plans = [
        keeping(nested_plan(GroupTree(tree), keep=keep), *kept)
        for keep in ("none", "output")
        for kept in ((1, 2, 0), (0, 3, 1))
    ]
    check(pool, [Case(keys, plan.to_json()) for keys in (LLAMA, QWEN3_MOE) for plan in plans])


def test_groups_one_after_the_other_give_the_same_gradients(pool: RankPool) -> None:
    """Without streaming; the order of all ranks' exchanges is checked as with it."""
    plans = [nested_plan(GroupTree((2, 2)), keep=keep) for keep in ("none", "output")]
    check(pool, [Case(keys, plan.to_json(), streaming=False) for keys in (LLAMA, QWEN3_MOE) for plan in plans])


def test_heads_need_not_divide_by_ranks(pool: RankPool) -> None:
    """Rows D9 and D11 of the shared cases: awkward numbers of heads, and fewer key/value heads than ranks."""
    cases = []
    for heads, kv_heads in ((6, 1), (6, 2), (8, 2), (4, 1), (2, 1), (3, 3), (5, 5), (10, 5)):
        keys = {**QWEN3, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        plans = [nested_plan(GroupTree((2, 2)), keep=keep) for keep in ("none", "output")]
        cases += [Case(keys, plan.to_json()) for plan in plans]
    check(pool, cases)


def test_slices_of_heads_give_the_gradients_of_one_process(pool: RankPool) -> None:
    """Also more slices than heads, beside groups in one piece, and in layers that are kept."""
    cases = []
    for heads, kv_heads, num_slices in ((6, 3, 2), (8, 1, 3), (3, 3, 4), (28, 4, 2)):
        keys = {**QWEN3, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        for keep in ("none", "output"):
            plan = keeping(nested_plan(GroupTree((2, 2)), keep=keep), 0, 1, 2)
            sliced = tuple(
                replace(
                    m,
                    placements=tuple(
                        replace(p, num_slices=num_slices) if p.group.level == 0 else p for p in m.placements
                    ),
                )
                for m in plan.microbatches
            )
            cases.append(Case(keys, replace(plan, microbatches=sliced).to_json()))
    check(pool, cases)


def test_variants_of_llama_give_the_gradients_of_one_process(pool: RankPool) -> None:
    variants: list[dict[str, Any]] = [{"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}]
    plan = nested_plan(GroupTree((2, 2))).to_json()
    check(pool, [Case({**LLAMA, **TWO_LAYERS, **more}, plan) for more in variants])


@pytest.mark.parametrize("keys", MORE_MODELS.values(), ids=MORE_MODELS.keys())
def test_other_families_give_the_gradients_of_one_process(pool: RankPool, keys: dict[str, Any]) -> None:
    """As Ulysses and as rings, recomputed and not."""
    plan = nested_plan(GroupTree((2, 2)), keep="output")
    rings = replace(
        plan,
        microbatches=tuple(
            replace(m, placements=tuple(replace(p, ring_degree=p.group.degree, keep="none") for p in m.placements))
            for m in plan.microbatches
        ),
    )
    keys = {**keys, **TWO_LAYERS}
    check(pool, [Case(keys, p.to_json(), recompute) for p in (plan, rings) for recompute in (True, False)])


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL,
    "mistral of one": {**MISTRAL, "sliding_window": 1},
    "qwen2, last layers": {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3, by layer": {
        **QWEN3,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 4},
    "mixtral": {**MIXTRAL, "sliding_window": 6},
    "gemma2, soft caps": GEMMA2,
    "gemma3_text, by layer": {**GEMMA3, "sliding_window_pattern": 2},
    "gpt_oss, sinks": GPT_OSS,
    "phi3": {**PHI3, "sliding_window": 4},
}


@pytest.mark.parametrize("keys", WINDOWED.values(), ids=WINDOWED.keys())
def test_E3_E4_E6_sliding_windows_give_the_gradients_of_one_process(pool: RankPool, keys: dict[str, Any]) -> None:
    """Sequences shorter and longer than the window, on all kinds of ranks; the reference is Transformers' own."""
    plan = nested_plan(GroupTree((2, 2)), keep="output")
    none = nested_plan(GroupTree((2, 2)))
    keys = {**TWO_LAYERS, **keys}
    check(pool, [Case(keys, plan.to_json()), Case(keys, none.to_json()), Case(keys, plan.to_json(), recompute=False)])
