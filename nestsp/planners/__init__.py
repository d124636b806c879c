"""Planners: a batch in, a plan out. All are deterministic, plan on the prices of a `Ground`, and share one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import ConfigError, did_you_mean
from nestsp.plan import Plan
from nestsp.planners.baselines import BaspGroups, BatchAdaptive, DisjointGroups, Judged, StaticDegree
from nestsp.planners.flexsp import FlexSPGroups
from nestsp.planners.ground import Ground
from nestsp.planners.search import NestedGroups

__all__ = ["PLANNERS", "Judged", "Planner", "check_planner", "make_planner"]


class Planner(Protocol):
    """Places every sequence of a batch."""

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch; the same batch always gives the same plan."""
        ...

    def judge(self, batch: SequenceBatch) -> Judged:
        """Plan one batch, and say how long the ground takes the plan to last."""
        ...


def _static(ground: Ground, degree: int | None) -> Planner:
    assert degree is not None, "who asks for static chooses its degree: see `best_static_degree`"
    return StaticDegree(ground, degree)


# For training, `nestsp plan` and `nestsp simulate` alike. The degree is the static planner's alone.
PLANNERS: Mapping[str, Callable[[Ground, int | None], Planner]] = {
    "static": _static,
    "batch-adaptive": lambda ground, degree: BatchAdaptive(ground),
    "basp": lambda ground, degree: BaspGroups(ground),
    "disjoint": lambda ground, degree: DisjointGroups(ground),
    "flexsp": lambda ground, degree: FlexSPGroups(ground),
    "nsp": lambda ground, degree: NestedGroups(ground),
}


def make_planner(name: str, ground: Ground, degree: int | None = None) -> Planner:
    """The planner of a name.

    Args:
        name: One of `PLANNERS`.
        ground: What to plan on.
        degree: Ranks of each group, for ``static``, which needs it.

    Raises:
        ConfigError: There is no such planner, or the degree does not go with it or with the tree.
    """
    check_planner(name, degree, ground.tree)
    return PLANNERS[name](ground, degree)


def check_planner(name: str, degree: int | None, tree: GroupTree) -> None:
    """Prove that a planner and its degree go together; see `make_planner`."""
    if name not in PLANNERS:
        raise ConfigError(
            f"planner.name is {name!r}, but the planners are {', '.join(PLANNERS)}{did_you_mean(name, PLANNERS)}"
        )
    if degree is None:
        return
    if name != "static":
        raise ConfigError(
            f"planner.degree is {degree}, but the {name} planner chooses degrees itself; leave it out, or take "
            "planner.name = static"
        )
    tree.level_of_degree(degree)
