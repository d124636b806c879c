"""Random trees, shapes, batches and plans."""

from __future__ import annotations

from hypothesis import strategies as st

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import GatherTurns, Keep, Microbatch, Placement, Plan
from nestsp.shape import ModelShape

FANOUTS = ((), (2,), (3,), (5,), (6,), (7,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2), (2,) * 6)
KEEPS: tuple[Keep, ...] = ("none", "output")


def trees(max_ranks: int = 64) -> st.SearchStrategy[GroupTree]:
    """Trees of the usual fan-outs and of random ones."""
    usual = [GroupTree(f) for f in FANOUTS if GroupTree(f).num_ranks <= max_ranks]
    any_fanouts = st.lists(st.integers(2, 7), max_size=4).map(lambda f: GroupTree(tuple(f)))
    return st.sampled_from(usual) | any_fanouts.filter(lambda tree: tree.num_ranks <= max_ranks)


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int]:
    """Query heads and key/value heads."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    return num_kv_heads * draw(st.sampled_from([1, 2, 3, 8])), num_kv_heads


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small models, some of which spend most on attention and some on their linear part."""
    num_heads, num_kv_heads = draw(head_counts())
    return ModelShape("llama", 2, draw(st.sampled_from([8, 256])), num_heads, num_kv_heads, 8, 16, 100)


def lengths(max_size: int = 20) -> st.SearchStrategy[list[int]]:
    """Lengths with a long tail."""
    return st.lists(st.integers(1, 4) | st.integers(1, 60) | st.integers(1, 5000), max_size=max_size)


@st.composite
def batches(draw: st.DrawFn, max_size: int = 20) -> SequenceBatch:
    """Batches whose ids are not their positions."""
    values = draw(lengths(max_size))
    ids = draw(st.permutations(range(100, 100 + len(values))))
    return SequenceBatch(tuple(ids), tuple(values))


@st.composite
def placements(draw: st.DrawFn, group: Group, sequences: tuple[int, ...]) -> Placement:
    """Any kind of attention that the group has."""
    ring_degree = draw(st.sampled_from([d for d in range(1, group.degree + 1) if group.degree % d == 0]))
    num_slices = draw(st.integers(1, 4)) if group.degree > 1 and ring_degree == 1 else 1
    return Placement(group, sequences, ring_degree, draw(st.sampled_from(KEEPS)), num_slices)


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 64) -> Plan:
    """Any plan that `Plan.check` accepts, not only those a planner would make: groups stay empty at random."""
    tree = draw(trees(max_ranks))
    batch = draw(batches())
    num_microbatches = draw(st.integers(1, 3))
    used: list[dict[Group, list[int]]] = [{} for _ in range(num_microbatches)]
    for position in draw(st.permutations(range(batch.num_sequences))):
        level = draw(st.integers(0, tree.num_levels - 1))
        group = tree.group(level, draw(st.integers(0, tree.num_ranks - 1)))
        used[draw(st.integers(0, num_microbatches - 1))].setdefault(group, []).append(position)
    microbatches = tuple(
        Microbatch(
            tuple(draw(placements(group, tuple(groups[group]))) for group in sorted(groups)),
            draw(st.integers(0, 2)),
        )
        for groups in used
    )
    gathers = GatherTurns(*(draw(st.integers(0, most)) for most in (5, 5, tree.num_levels)))
    return Plan(tree, batch, microbatches, tuple(draw(st.permutations(range(tree.num_levels)))), "any", gathers)
