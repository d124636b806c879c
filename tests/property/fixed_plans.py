"""Some plans whose digests another process must find as well; ``python -m tests.property.fixed_plans`` prints them."""

from __future__ import annotations

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.planners import NspPlanner
from nestsp.shape import ModelShape


def fixed_digests() -> list[str]:
    """Digests of the plans, made in this process."""
    shape = ModelShape("llama", 2, 64, 6, 2, 8, 128, 256)
    batch = SequenceBatch.of_lengths([900, 40, 41, 300, 7, 7, 7, 1, 512, 90])
    return [NspPlanner(GroupTree(f), shape, 400).plan(batch).digest for f in ((2, 2), (3, 2), (7,), (2, 2, 2))]


if __name__ == "__main__":
    print(*fixed_digests(), sep="\n")
