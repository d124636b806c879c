"""Planners: a batch in, a plan out. All are deterministic and share one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.config import PlannerConfig
from nestsp.errors import ConfigError, InfeasibleError, did_you_mean
from nestsp.plan import Plan
from nestsp.planners.nsp import NspPlanner
from nestsp.planners.packing import check_lengths, smallest_fitting_level
from nestsp.planners.static import StaticPlanner
from nestsp.shape import ModelShape
from nestsp.units import format_count

__all__ = ["PLANNERS", "NspPlanner", "Planner", "StaticPlanner", "check_lengths", "make_planner"]


class Planner(Protocol):
    """Places every sequence of a batch."""

    def plan(self, batch: SequenceBatch) -> Plan:
        """Plan one batch; the same batch always gives the same plan."""
        ...


def _static(config: PlannerConfig, tree: GroupTree, shape: ModelShape, longest: int) -> Planner:
    degree = config.degree
    if degree is None:  # the rule people follow: as few ranks as the longest sequence allows
        level = smallest_fitting_level(tree, config.max_tokens_per_rank, longest)
        degree = tree.degree(0 if level is None else level)
    tree.level_of_degree(degree)
    if config.degree is not None and -(-longest // degree) > config.max_tokens_per_rank:
        raise InfeasibleError(
            f"the longest sequence has {format_count(longest)} tokens and needs {format_count(-(-longest // degree))} "
            f"on each of planner.degree = {degree} ranks, but planner.max_tokens_per_rank is "
            f"{format_count(config.max_tokens_per_rank)}; raise one of them, or set data.max_length"
        )
    return StaticPlanner(tree, shape, config.max_tokens_per_rank, degree)


def _nsp(config: PlannerConfig, tree: GroupTree, shape: ModelShape, longest: int) -> Planner:
    if config.degree is not None:
        raise ConfigError(
            f"planner.degree is {config.degree}, but the nsp planner chooses a degree for each sequence; leave it out, "
            "or take planner.name = static"
        )
    return NspPlanner(tree, shape, config.max_tokens_per_rank)


PLANNERS: Mapping[str, Callable[[PlannerConfig, GroupTree, ModelShape, int], Planner]] = {
    "static": _static,
    "nsp": _nsp,
}


def make_planner(config: PlannerConfig, tree: GroupTree, shape: ModelShape, longest: int) -> Planner:
    """The planner that the settings ask for.

    Args:
        config: The planner's settings.
        tree: The groups.
        shape: The model.
        longest: Tokens of the longest sequence there is.

    Raises:
        ConfigError: There is no such planner, or a setting does not go with it.
    """
    if config.name not in PLANNERS:
        raise ConfigError(
            f"planner.name is {config.name!r}, but the planners are {', '.join(PLANNERS)}"
            f"{did_you_mean(config.name, PLANNERS)}"
        )
    return PLANNERS[config.name](config, tree, shape, longest)
