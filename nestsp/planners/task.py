"""What a run asks of its planner, as plain values: any process that has them makes the same plans.

Nothing here depends on measured times, or on what memory is free at the moment: the limit is decided once, before.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.bound import lower_bound
from nestsp.cost.memory import PLAIN_MEMORY, MemoryOptions
from nestsp.cost.model import CostModel, make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.errors import InfeasibleError
from nestsp.plan import AttentionKind, Capabilities, Plan
from nestsp.planners import Judged, make_planner
from nestsp.planners.baselines import StaticDegree, best_static_degree, static_degrees
from nestsp.planners.ground import Ground
from nestsp.planners.kinds import choose_kinds
from nestsp.planners.limits import run_ground
from nestsp.shape import ModelShape
from nestsp.simulate import plan_peak_bytes
from nestsp.units import format_bytes, format_count

__all__ = ["Planned", "PlanningTask"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what is known of it before it runs.

    Attributes:
        plan: The plan.
        makespan_s: How long it lasts by the cost profile.
        bound_s: No plan of this batch lasts less, by the same profile.
        planning_s: How long planning took; measured, so it differs from time to time.
    """

    plan: Plan
    makespan_s: float
    bound_s: float
    planning_s: float

    @property
    def gap(self) -> float:
        """How far the plan is above the bound, as a fraction of the bound."""
        return self.makespan_s / self.bound_s - 1

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists; `from_json` reads them back."""
        values = {name: getattr(self, name) for name in ("makespan_s", "bound_s", "planning_s")}
        return {**values, "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Planned:
        """Read what `to_json` wrote, and check the plan; see `Plan.from_json`."""
        return cls(Plan.from_json(data["plan"]), data["makespan_s"], data["bound_s"], data["planning_s"])


@dataclass(frozen=True, slots=True)
class PlanningTask:
    """Everything that decides a run's plans.

    Attributes:
        planner: Its name.
        degree: Of the static planner; None for the others.
        max_tokens_per_rank: Cap on a rank's tokens in a microbatch, or None.
        shape: The model.
        cluster: Hosts and ranks.
        tree: The groups.
        profile: Name of a preset, or path of a profile.
        memory_per_rank_bytes: Hard limit of each rank.
        can: What the executor can run.
        loss_slice_tokens: Tokens whose logits exist at one time.
        element_bytes: Of one number in computation.
        memory: What else decides a rank's bytes.
        streaming: Whether groups take turns.
        attention: How groups attend.
    """

    planner: str
    degree: int | None
    max_tokens_per_rank: int | None
    shape: ModelShape
    cluster: Cluster
    tree: GroupTree
    profile: str
    memory_per_rank_bytes: int
    can: Capabilities
    loss_slice_tokens: int = 2048
    element_bytes: int = 2
    memory: MemoryOptions = PLAIN_MEMORY
    streaming: bool = True
    attention: AttentionKind = "auto"

    def cost(self) -> CostModel:
        """What everything costs.

        Raises:
            ConfigError: The profile is not there, or damaged.
        """
        return make_cost_model(
            self.shape,
            self.cluster,
            load_profile(self.profile),
            tree=self.tree,
            memory_per_rank_bytes=self.memory_per_rank_bytes,
            loss_slice_tokens=self.loss_slice_tokens,
            element_bytes=self.element_bytes,
            memory=self.memory,
        )

    def ground(self) -> Ground:
        """The prices and limits to plan on.

        Raises:
            InfeasibleError: The model itself does not fit.
            ConfigError: The profile is not there, or damaged.
        """
        return run_ground(self.cost(), self.can, self.max_tokens_per_rank, streaming=self.streaming)

    def with_degree(self, batches: Sequence[SequenceBatch], longest: SequenceBatch) -> PlanningTask:
        """The same task; a static planner without a degree gets the one that is estimated fastest over some batches.

        Args:
            batches: A sample of the run's batches.
            longest: The run's longest sequence alone, which must fit too.

        Raises:
            InfeasibleError: No degree fits the longest sequence.
        """
        if self.planner != "static" or self.degree is not None:
            return self
        ground = self.ground()
        ground.check(longest)
        fitting = [d for d in static_degrees(self.tree) if StaticDegree(ground, d).candidates(longest)]
        degree = best_static_degree(ground, batches, fitting)
        assert degree is not None, "a degree that fits the longest sequence fits every batch"
        return dataclasses.replace(self, degree=degree)

    def check_longest(self, longest: SequenceBatch) -> None:
        """Prove that the run's longest sequence fits, and with it every sequence.

        Args:
            longest: That sequence alone.

        Raises:
            InfeasibleError: It does not.
        """
        ground = self.ground()
        ground.check(longest)
        if self.degree is not None and not StaticDegree(ground, self.degree).candidates(longest):
            (identity,), (length,) = longest.ids, longest.lengths
            raise InfeasibleError(
                f"sequence {identity} ({format_count(length)} tokens) does not fit on planner.degree = {self.degree} "
                f"ranks within {format_bytes(self.memory_per_rank_bytes)} a rank; raise one of them, or set "
                "data.max_length"
            )

    def solver(self) -> Callable[[SequenceBatch], Planned]:
        """A function that plans batches; made once, since prices and planner are."""
        cost = self.cost()
        kind: AttentionKind = self.attention if self.can.rings else "ulysses"
        rings = kind == "auto"
        ground = run_ground(cost, self.can, self.max_tokens_per_rank, streaming=self.streaming, rings=rings)
        planner = make_planner(self.planner, ground, self.degree)

        def judge(batch: SequenceBatch) -> Judged:
            return choose_kinds(planner.judge(batch), ground, cost, kind)

        return functools.partial(_plan, judge, self.planner, cost)

    def check(self, plan: Plan, cost: CostModel) -> None:
        """Prove that a plan keeps the run's limits.

        Args:
            plan: A plan of the run.
            cost: From `cost`.

        Raises:
            InfeasibleError: A rank would hold more bytes or more tokens than it may.
            PlanError: The plan asks for what the executor cannot run, or breaks a rule of all plans.
        """
        plan.check(max_tokens_per_rank=self.max_tokens_per_rank)
        self.can.check(plan)
        peak = plan_peak_bytes(plan, cost)
        if peak.max() > self.memory_per_rank_bytes:
            raise InfeasibleError(
                f"rank {int(peak.argmax())} would need {format_bytes(float(peak.max()))}, but may use "
                f"{format_bytes(self.memory_per_rank_bytes)}; plan the batch again under that limit"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, texts and lists; `from_json` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanningTask:
        """Read what `to_json` wrote."""
        parts = {
            "shape": ModelShape(**data["shape"]),
            "cluster": Cluster(**data["cluster"]),
            "tree": GroupTree(tuple(data["tree"]["fanouts"])),
            "can": Capabilities(**data["can"]),
            "memory": MemoryOptions(**data["memory"]),
        }
        return cls(**{**data, **parts})


def _plan(judge: Callable[[SequenceBatch], Judged], name: str, cost: CostModel, batch: SequenceBatch) -> Planned:
    start = time.perf_counter()
    judged = judge(batch)
    planning_s = time.perf_counter() - start
    plan = dataclasses.replace(judged.plan, planner=name)
    return Planned(plan, judged.makespan_s, lower_bound(batch, cost).makespan_s, planning_s)
