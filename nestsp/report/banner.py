"""The lines that a run shows before its first step: model, ranks, tree, planner, cap, data, steps."""

from __future__ import annotations

from collections.abc import Sequence

from nestsp.cluster import Cluster, Group, GroupTree
from nestsp.shape import ModelShape
from nestsp.units import format_count, plural

__all__ = ["aligned", "describe_cluster", "describe_model", "draw_tree", "steps_arithmetic"]

# Larger trees are told by their levels alone.
_MAX_DRAWN_RANKS = 16


def describe_model(shape: ModelShape) -> str:
    """One line: family, sizes, parameters."""
    experts = (
        f", {shape.num_experts} experts ({shape.experts_per_token} a token) in {plural(shape.num_moe_layers, 'layer')}"
        if shape.num_moe_layers
        else ""
    )
    return (
        f"{shape.family}: {plural(shape.num_layers, 'layer')}, hidden {shape.hidden_size}, {shape.num_heads} query / "
        f"{shape.num_kv_heads} key-value heads of {shape.head_dim}{experts}; "
        f"{format_count(shape.num_parameters)} parameters, {format_count(shape.num_active_parameters)} work on a token"
    )


def describe_cluster(cluster: Cluster) -> str:
    """Ranks and hosts."""
    return f"{plural(cluster.num_ranks, 'rank')} on {plural(cluster.num_hosts, 'host')}"


def draw_tree(tree: GroupTree) -> list[str]:
    r"""Levels, and for a small tree its groups.

    >>> print("\n".join(draw_tree(GroupTree((2, 2)))))
    2x2: degrees 4, 2, 1
    ranks 0-3     level 0
    ├─ ranks 0-1  level 1
    │  ├─ rank 0  level 2
    │  └─ rank 1
    └─ ranks 2-3
       ├─ rank 2
       └─ rank 3
    """
    degrees = ", ".join(str(tree.degree(level)) for level in range(tree.num_levels))
    lines = [f"{tree}: degree{'s' if tree.num_levels > 1 else ''} {degrees}"]
    if tree.num_ranks > _MAX_DRAWN_RANKS:
        for level in range(tree.num_levels):
            lines.append(
                f"level {level}: {plural(len(tree.groups(level)), 'group')} of {plural(tree.degree(level), 'rank')}"
            )
        return lines
    drawn = _draw(tree, tree.group(0, 0), "", "")
    width = max(len(text) for text, _ in drawn)
    named: set[int] = set()
    for text, level in drawn:
        lines.append(text if level in named else f"{text:<{width}}  level {level}")
        named.add(level)
    return lines


def _draw(tree: GroupTree, group: Group, first: str, rest: str) -> list[tuple[str, int]]:
    rows = [(f"{first}{group}", group.level)]
    if group.level + 1 < tree.num_levels:
        degree = tree.degree(group.level + 1)
        children = range(group.first_rank, group.ranks.stop, degree)
        for start in children:
            last = start == children[-1]
            child = Group(group.level + 1, start, degree)
            rows += _draw(tree, child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
    return rows


def steps_arithmetic(
    *,
    num_samples: int,
    steps_in_epoch: int,
    num_steps: int,
    tokens_per_step: int | None,
    sequences_per_step: int | None,
) -> str:
    """How samples become steps.

    >>> steps_arithmetic(
    ...     num_samples=1000, steps_in_epoch=63, num_steps=63, tokens_per_step=None, sequences_per_step=16
    ... )
    '1,000 samples, 16 samples a step → 63 steps an epoch; this run: 63 steps = 1.00 epochs'
    >>> steps_arithmetic(
    ...     num_samples=9000, steps_in_epoch=9000, num_steps=3, tokens_per_step=None, sequences_per_step=1
    ... )
    '9,000 samples, 1 sample a step → 9,000 steps an epoch; this run: 3 steps = 0.00033 epochs'
    """
    size = (
        f"at most {format_count(tokens_per_step)} tokens a step"
        if tokens_per_step is not None
        else f"{plural(sequences_per_step or 0, 'sample')} a step"
    )
    epochs = num_steps / steps_in_epoch
    return (
        f"{plural(num_samples, 'sample')}, {size} → {plural(steps_in_epoch, 'step')} an epoch; this run: "
        f"{plural(num_steps, 'step')} = {epochs:{'.2f' if epochs >= 0.01 else '.2g'}} epochs"
    )


def aligned(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Titles in one column, their lines in another."""
    width = max(len(title) for title, _ in rows)
    lines = []
    for title, texts in rows:
        for number, text in enumerate(texts):
            lines.append(f"{title if number == 0 else '':<{width}}  {text}")
    return "\n".join(lines)
