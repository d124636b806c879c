"""The claim of the whole system: any plan gives the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import Plan
from tests.distributed.equivalence import LLAMA, QWEN3, QWEN3_MOE, TOLERANCE, compare_with_one_process
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


def check(pool: RankPool, keys: dict[str, Any], plan: Plan, *, recompute: bool) -> None:
    result = pool.run(
        compare_with_one_process, keys, plan.to_json(), recompute, ranks=plan.tree.num_ranks, timeout_s=60.0
    )[0]
    assert result is not None
    assert result.passes(TOLERANCE), result


TREES = {"1": (), "2": (2,), "3": (3,), "4": (2, 2), "4 at once": (4,), "6": (3, 2), "6 other way": (2, 3)}
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_nested_plans_give_the_gradients_of_one_process(
    pool: RankPool, model: dict[str, Any], tree: tuple[int, ...]
) -> None:
    check(pool, model, nested_plan(GroupTree(tree)), recompute=True)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_static_plans_of_every_level_give_the_gradients_of_one_process(
    pool: RankPool, tree: tuple[int, ...], recompute: bool
) -> None:
    for level in range(len(tree) + 1):
        check(pool, LLAMA, static_plan(GroupTree(tree), level), recompute=recompute)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_layers_that_are_not_recomputed_give_the_same_gradients(pool: RankPool, model: dict[str, Any]) -> None:
    check(pool, model, nested_plan(GroupTree((2, 2))), recompute=False)


@pytest.mark.parametrize("tree", [(2, 2), (3, 2)], ids=["4", "6"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_kept_outputs_give_the_same_gradients(pool: RankPool, model: dict[str, Any], tree: tuple[int, ...]) -> None:
    check(pool, model, nested_plan(GroupTree(tree), keep="output"), recompute=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (8, 2), (4, 1), (2, 1), (3, 3), (5, 5)])
def test_heads_need_not_divide_by_ranks(pool: RankPool, heads: int, kv_heads: int) -> None:
    """Rows D9 and D11 of the shared cases: awkward numbers of heads, and fewer key/value heads than ranks."""
    keys = {**QWEN3, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    check(pool, keys, nested_plan(GroupTree((2, 2))), recompute=True)
    check(pool, keys, nested_plan(GroupTree((2, 2)), keep="output"), recompute=True)


@pytest.mark.parametrize(
    "more",
    [{"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}],
    ids=["tied", "attention bias", "mlp bias"],
)
def test_variants_of_llama_give_the_gradients_of_one_process(pool: RankPool, more: dict[str, Any]) -> None:
    check(pool, {**LLAMA, **more}, nested_plan(GroupTree((2, 2))), recompute=True)
