"""A plan: every sequence of a batch on one group of the tree, in one microbatch.

One type serves all planners. Static sequence parallelism is all sequences on one level, BASP one level chosen by the
number of sequences, FlexSP disjoint groups of several sizes, NSP any groups at once. Ranks exchange a plan's `digest`
(integers only) before they act on it, and `Plan.check` proves on every rank, before any collective, that it can run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree, share
from nestsp.errors import ConfigError, DataError, InfeasibleError, PlanError
from nestsp.units import format_count, plural

__all__ = ["AttentionKind", "Capabilities", "GatherTurns", "Keep", "Microbatch", "Placement", "Plan"]

Keep = Literal["none", "output"]
AttentionKind = Literal["auto", "ulysses", "ring", "hybrid"]
"""What a run may want of its groups; see `Placement.ring_degree`."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """The sequences that one group works on in one microbatch.

    Attributes:
        group: The group.
        sequences: Positions in the batch, in the order in which the group's stream is packed; not empty.
        ring_degree: How many ring members the group's attention has: 1 is Ulysses alone, the group's degree is a ring
            alone, a divisor between them a hybrid.
        keep: What recomputation keeps of this group's attention: ``none`` (the exchange and the attention are run
            again) or ``output`` (output and log-sum-exp stay).
        num_slices: In how many slices of heads a Ulysses group exchanges, so that it attends to one while the next is
            on the wire.
    """

    group: Group
    sequences: tuple[int, ...]
    ring_degree: int = 1
    keep: Keep = "none"
    num_slices: int = 1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward pass of all ranks.

    Attributes:
        placements: At most one for each group, ordered by level, then by rank.
        num_kept_layers: How many of the last layers keep all their activations, on all ranks alike.
    """

    placements: tuple[Placement, ...]
    num_kept_layers: int = 0

    def on_rank(self, rank: int) -> tuple[Placement, ...]:
        """Placements of the groups that a rank belongs to, root first."""
        return tuple(p for p in self.placements if rank in p.group)


@dataclass(frozen=True, slots=True)
class GatherTurns:
    """Where every layer issues the gather of the next layer's parameters, in the one order of its groups' turns.

    Attributes:
        forward: In the forward pass the gather comes before all turns of this number and after those of lower ones; 0
            is where the layer begins.
        backward: The same in the backward pass; the recompute before it gathers nothing.
        num_levels: The order holds with exchanges of the first so many levels: those whose groups share its links.
    """

    forward: int = 0
    backward: int = 0
    num_levels: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every sequence of a batch goes.

    Attributes:
        tree: All groups there are.
        batch: The sequences; placements refer to their positions.
        microbatches: In the order in which they run.
        level_order: All levels of the tree, in the order in which their exchanges of equal number are issued.
        planner: Name of the planner that made it; not part of the digest.
        gathers: Where parameters are gathered among the groups' exchanges.
    """

    tree: GroupTree
    batch: SequenceBatch
    microbatches: tuple[Microbatch, ...]
    level_order: tuple[int, ...]
    planner: str
    gathers: GatherTurns = GatherTurns()

    @classmethod
    def of_groups(
        cls,
        tree: GroupTree,
        batch: SequenceBatch,
        microbatches: Sequence[Mapping[Group, Sequence[int]]],
        planner: str,
        *,
        keep: Keep = "none",
    ) -> Plan:
        """A plan from one mapping of group to batch positions for each microbatch; empty groups are left out."""
        made = tuple(
            Microbatch(tuple(Placement(g, tuple(s), keep=keep) for g, s in sorted(groups.items()) if s))
            for groups in microbatches
        )
        return cls(tree, batch, made, tuple(range(tree.num_levels)), planner)

    def placements(self) -> Iterator[tuple[int, Placement]]:
        """Yield (microbatch, placement) of all of them."""
        for number, microbatch in enumerate(self.microbatches):
            for placement in microbatch.placements:
                yield number, placement

    def group_tokens(self, placement: Placement) -> int:
        """Tokens of a placement's sequences."""
        return sum(map(self.batch.lengths.__getitem__, placement.sequences))

    def rank_tokens(self, microbatch: int) -> list[int]:
        """Tokens that each rank holds in a microbatch, filler excluded."""
        tokens = [0] * self.tree.num_ranks
        for placement in self.microbatches[microbatch].placements:
            total, group = self.group_tokens(placement), placement.group
            for member, rank in enumerate(group.ranks):
                tokens[rank] += len(share(total, group.degree, member))
        return tokens

    def num_sequences_by_degree(self) -> dict[int, int]:
        """How many sequences each degree has, ascending; degrees without any are left out."""
        counts: dict[int, int] = {}
        for _, placement in self.placements():
            degree = placement.group.degree
            counts[degree] = counts.get(degree, 0) + len(placement.sequences)
        return dict(sorted(counts.items()))

    @property
    def max_rank_tokens(self) -> int:
        """The most tokens that any rank holds in any microbatch."""
        return max((max(self.rank_tokens(m)) for m in range(len(self.microbatches))), default=0)

    def check(self, *, max_tokens_per_rank: int | None = None) -> None:
        """Prove that the plan is one that can run.

        Every sequence is placed exactly once; every group is one of the tree's, at most once in a microbatch, in order;
        attention kinds fit the groups; no rank holds more tokens than the cap.

        Raises:
            PlanError: The plan breaks one of these rules.
            InfeasibleError: A rank would hold more tokens than ``max_tokens_per_rank``.
        """
        if sorted(self.level_order) != list(range(self.tree.num_levels)):
            raise PlanError(
                f"the plan's level order is {self.level_order}, but it must hold each of the tree's "
                f"{self.tree.num_levels} levels once"
            )
        gathers = self.gathers
        if min(gathers.forward, gathers.backward) < 0 or not 0 <= gathers.num_levels <= self.tree.num_levels:
            raise PlanError(
                f"the plan's gathers come before turns {gathers.forward} and {gathers.backward} of "
                f"{gathers.num_levels} levels, but turns are counted from 0, and the tree has {self.tree.num_levels} "
                "levels"
            )
        placed = [0] * self.batch.num_sequences
        for number, microbatch in enumerate(self.microbatches):
            groups = [placement.group for placement in microbatch.placements]
            if groups != sorted(set(groups)):
                raise PlanError(
                    f"microbatch {number + 1} has groups {[str(g) for g in groups]}, but each may be there once, in "
                    "order"
                )
            if microbatch.num_kept_layers < 0:
                raise PlanError(
                    f"microbatch {number + 1} keeps {microbatch.num_kept_layers} layers, but it must be 0 or more"
                )
            for placement in microbatch.placements:
                self._check_placement(number, placement, placed)
        for position, times in enumerate(placed):
            if times != 1:
                raise PlanError(
                    f"sequence {self.batch.ids[position]} is placed {times} times, but every sequence must be placed "
                    "once"
                )
        if max_tokens_per_rank is not None:
            self._check_cap(max_tokens_per_rank)

    def _check_placement(self, number: int, placement: Placement, placed: list[int]) -> None:
        group = placement.group
        where = f"microbatch {number + 1}, {group}"
        if group not in self.tree:
            raise PlanError(
                f"{where} is no group of the tree {self.tree}; place its sequences on one of the tree's groups"
            )
        if not placement.sequences:
            raise PlanError(f"{where} has no sequence, but an empty group must be left out of the plan")
        if placement.ring_degree < 1 or group.degree % placement.ring_degree:
            raise PlanError(
                f"{where} has ring degree {placement.ring_degree}, but it must divide the group's {group.degree} ranks"
            )
        if placement.keep not in ("none", "output"):
            raise PlanError(f"{where} keeps {placement.keep!r}, but it must be 'none' or 'output'")
        if placement.num_slices < 1 or (placement.num_slices > 1 and (group.degree == 1 or placement.ring_degree > 1)):
            raise PlanError(
                f"{where} has {placement.num_slices} slices at ring degree {placement.ring_degree}, but only a Ulysses "
                "group of several ranks has more than 1; plan with 1"
            )
        for position in placement.sequences:
            if not 0 <= position < len(placed):
                raise PlanError(
                    f"{where} names sequence position {position}, but the batch has {len(placed)} sequences"
                )
            placed[position] += 1

    def _check_cap(self, cap: int) -> None:
        for number in range(len(self.microbatches)):
            tokens = self.rank_tokens(number)
            rank = max(range(len(tokens)), key=tokens.__getitem__)
            if tokens[rank] > cap:
                raise InfeasibleError(
                    f"rank {rank} would hold {format_count(tokens[rank])} tokens in microbatch {number + 1}, but the "
                    f"cap is {format_count(cap)}; plan the batch again under that cap"
                )

    @property
    def digest(self) -> str:
        """SHA-256 of all integers that decide what runs; equal on all ranks, processes and machines."""
        data = self.to_json()
        del data["planner"]
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists and numbers; `from_json` reads it back."""
        return {
            "format": _FORMAT,
            "planner": self.planner,
            "tree": list(self.tree.fanouts),
            "level_order": list(self.level_order),
            **({"gathers": dataclasses.asdict(self.gathers)} if self.gathers != GatherTurns() else {}),
            "ids": list(self.batch.ids),
            "lengths": list(self.batch.lengths),
            "microbatches": [
                {
                    "num_kept_layers": microbatch.num_kept_layers,
                    "placements": [
                        {
                            "level": p.group.level,
                            "first_rank": p.group.first_rank,
                            "sequences": list(p.sequences),
                            "ring_degree": p.ring_degree,
                            "keep": p.keep,
                            **({"num_slices": p.num_slices} if p.num_slices != 1 else {}),
                        }
                        for p in microbatch.placements
                    ],
                }
                for microbatch in self.microbatches
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_json` wrote, and check it.

        Raises:
            PlanError: The data are no plan, or one that breaks a rule.
        """
        try:
            if _whole(data["format"]) != _FORMAT:
                raise PlanError(f"the plan has format {data['format']}, but this version reads format {_FORMAT}")
            tree = GroupTree(_whole_numbers(data["tree"]))
            plan = cls(
                tree,
                SequenceBatch(_whole_numbers(data["ids"]), _whole_numbers(data["lengths"])),
                tuple(
                    Microbatch(
                        tuple(
                            Placement(
                                Group(_whole(p["level"]), _whole(p["first_rank"]), tree.degree(p["level"])),
                                _whole_numbers(p["sequences"]),
                                _whole(p["ring_degree"]),
                                p["keep"],
                                _whole(p.get("num_slices", 1)),
                            )
                            for p in _list(microbatch["placements"])
                        ),
                        _whole(microbatch["num_kept_layers"]),
                    )
                    for microbatch in _list(data["microbatches"])
                ),
                _whole_numbers(data["level_order"]),
                _text(data["planner"]),
                GatherTurns(**{name: _whole(value) for name, value in data.get("gathers", {}).items()}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"the data are no plan: {type(error).__name__} {error}") from None
        except (ConfigError, DataError) as error:
            raise PlanError(f"the data are no plan: {error}") from None
        plan.check()
        return plan

    def format_tree(self) -> str:
        """What sits where, drawn as a tree for each microbatch; groups with nothing in or below them are left out."""
        lines = []
        for number, microbatch in enumerate(self.microbatches):
            lines.append(f"microbatch {number + 1} of {len(self.microbatches)}")
            by_group = {placement.group: placement for placement in microbatch.placements}
            lines += self._draw(self.tree.group(0, 0), by_group, "", "")
        return "\n".join(lines)

    def _draw(self, group: Group, by_group: Mapping[Group, Placement], first: str, rest: str) -> list[str]:
        lines = [f"{first}{group}  {self._content(by_group[group])}" if group in by_group else f"{first}{group}"]
        if group.level + 1 < self.tree.num_levels:
            degree = self.tree.degree(group.level + 1)
            children = [Group(group.level + 1, r, degree) for r in range(group.first_rank, group.ranks.stop, degree)]
            busy = [c for c in children if any(g.first_rank in c and g.level >= c.level for g in by_group)]
            for child in busy:
                last = child is busy[-1]
                lines += self._draw(
                    child, by_group, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
                )
        return lines

    def _content(self, placement: Placement) -> str:
        lengths = sorted((self.batch.lengths[s] for s in placement.sequences), reverse=True)
        shown = " ".join(format_count(n) for n in lengths[:6]) + (" ..." if len(lengths) > 6 else "")
        return f"{plural(len(lengths), 'sequence')}, {plural(sum(lengths), 'token')}: {shown}"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can run of all that a plan can say. The default is everything.

    Attributes:
        rings: Groups may be rings or hybrids.
        kept_outputs: A group may keep its attention's output for the recompute.
        num_kept_layers: The one number of layers that keep everything; None for any.
    """

    rings: bool = True
    kept_outputs: bool = True
    num_kept_layers: int | None = None

    def check(self, plan: Plan) -> None:
        """Prove that a plan asks for nothing else.

        Raises:
            PlanError: It does.
        """
        for number, placement in plan.placements():
            where = f"microbatch {number + 1}, {placement.group}"
            if placement.ring_degree != 1 and not self.rings:
                raise PlanError(
                    f"{where} has ring degree {placement.ring_degree}, but this executor runs Ulysses groups alone; "
                    "plan with ring degree 1"
                )
            if placement.keep != "none" and not self.kept_outputs:
                raise PlanError(
                    f"{where} keeps {placement.keep!r}, but this executor repeats all attention; plan with 'none'"
                )
        for number, microbatch in enumerate(plan.microbatches):
            if self.num_kept_layers not in (None, microbatch.num_kept_layers):
                raise PlanError(
                    f"microbatch {number + 1} keeps {plural(microbatch.num_kept_layers, 'layer')}, but this run keeps "
                    f"{self.num_kept_layers}; plan with as many, or set train.recompute = auto"
                )


# JSON's true and 1.0 equal 1, but would change the digest.


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _list(values: object) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list")
    return values


def _whole_numbers(values: object) -> tuple[int, ...]:
    return tuple(_whole(value) for value in _list(values))
