"""Random cases: any tree, placement, order, head layout and model, each a function of its seed alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import GatherTurns, Keep, Microbatch, Placement, Plan
from tests.distributed.equivalence import Case

TREES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((),),
    2: ((2,),),
    3: ((3,),),
    4: ((2, 2), (4,)),
    5: ((5,),),
    6: ((3, 2), (2, 3), (6,)),
}


def draw_plan(random: Random, num_ranks: int) -> Plan:
    """Sequences on any groups of any levels, as Ulysses, ring or hybrid.

    Ids, their order in a group, the order of levels and where gathers stand among the turns are drawn too.
    """
    tree = GroupTree(random.choice(TREES[num_ranks]))
    num_sequences = random.randint(1, 9)
    lengths = [random.choice((1, 1, 2, 3, random.randint(1, 30))) for _ in range(num_sequences)]
    batch = SequenceBatch(tuple(random.sample(range(100), num_sequences)), tuple(lengths))
    groups = [group for level in range(tree.num_levels) for group in tree.groups(level)]
    groups = random.sample(groups, random.randint(1, len(groups)))  # so that whole branches stay empty
    placed: list[dict[Group, list[int]]] = [{} for _ in range(random.randint(1, 3))]
    for position in random.sample(range(num_sequences), num_sequences):
        placed[random.randrange(len(placed))].setdefault(random.choice(groups), []).append(position)
    microbatches = tuple(
        Microbatch(
            tuple(draw_placement(random, g, tuple(s)) for g, s in sorted(groups_of.items())),
            random.choice((0, 0, 1)),
        )
        for groups_of in placed
    )
    plan = Plan(tree, batch, microbatches, tuple(range(tree.num_levels)), "test")
    return replace(
        plan,
        level_order=tuple(random.sample(plan.level_order, tree.num_levels)),
        gathers=GatherTurns(random.randint(0, 3), random.randint(0, 3), random.randint(0, tree.num_levels)),
    )


def draw_placement(random: Random, group: Group, sequences: tuple[int, ...]) -> Placement:
    """Any kind, and Ulysses in up to three slices, also where a rank has fewer heads."""
    keeps: tuple[Keep, ...] = ("none", "output")
    ring_degree = random.choice(ring_degrees(group))
    sliced = group.degree > 1 and ring_degree == 1
    return Placement(group, sequences, ring_degree, random.choice(keeps), random.choice((1, 2, 3)) if sliced else 1)


def ring_degrees(group: Group) -> list[int]:
    """Ulysses, all hybrids, and a ring."""
    return [d for d in range(1, group.degree + 1) if group.degree % d == 0]


def draw_model(random: Random) -> dict[str, Any]:
    kv_heads = random.choice((1, 1, 2, 3, 5))
    keys: dict[str, Any] = {
        "model_type": random.choice(("llama", "qwen3", "qwen3_moe")),
        "num_hidden_layers": random.choice((1, 2)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * random.choice((1, 2, 3)),
        "head_dim": random.choice((2, 4, 6, 16)),
        "tie_word_embeddings": random.random() < 0.3,
        "attention_bias": random.random() < 0.3,
    }
    keys["hidden_size"] = keys["num_attention_heads"] * random.choice((3, 5))  # and so not heads × head_dim
    if keys["model_type"] == "qwen3_moe":
        keys |= {"num_experts": 4, "num_experts_per_tok": random.choice((1, 2)), "moe_intermediate_size": 7}
        keys["norm_topk_prob"] = random.random() < 0.5
    return keys


def draw_case(seed: int, num_ranks: int) -> Case:
    random = Random(f"{num_ranks} ranks, draw {seed}")
    return Case(
        draw_model(random),
        draw_plan(random, num_ranks).to_json(),
        recompute=random.random() < 0.6,
        slice_tokens=random.choice((1, 3, 1000)),
        weighted=random.random() < 0.3,
        streaming=random.random() < 0.8,
    )
