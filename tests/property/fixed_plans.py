"""Some plans whose digests another process must find as well; ``python -m tests.property.fixed_plans`` prints them."""

from __future__ import annotations

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.execute.capability import executor_capabilities
from nestsp.planners.task import PlanningTask
from nestsp.shape import ModelShape


def fixed_digests() -> list[str]:
    """Digests of the plans, made in this process."""
    shape = ModelShape("llama", 2, 64, 6, 2, 8, 128, 256)
    batch = SequenceBatch.of_lengths([900, 40, 41, 300, 7, 7, 7, 1, 512, 90])
    can = executor_capabilities(shape, recompute=True)
    tasks = [
        PlanningTask("nsp", None, 400, shape, Cluster(1, tree.num_ranks), tree, "cpu", 2**32, can, 2048, 4)
        for tree in map(GroupTree, ((2, 2), (3, 2), (7,), (2, 2, 2)))
    ]
    return [task.solver()(batch).plan.digest for task in tasks]


if __name__ == "__main__":
    print(*fixed_digests(), sep="\n")
