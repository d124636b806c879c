"""Runs the microbatches of a plan, forward and backward. Gradients and loss come out as sums over targets.

Every rank runs every microbatch, also with no tokens of its own: FSDP gathers parameters in each, and a rank that
skipped one would hang the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nestsp.attention.gathers import Gathers
from nestsp.attention.local import Kernel, Segments
from nestsp.attention.place import Place
from nestsp.attention.ring import make_ring
from nestsp.attention.streaming import AttentionContext
from nestsp.attention.work import GroupWork
from nestsp.comm.groups import Link, let_computation_wait
from nestsp.errors import PlanError
from nestsp.execute.capability import executor_capabilities, ring_refusal
from nestsp.execute.local import LocalTokens, ReadTokens, TokenLoss, load_local, weighted_sum
from nestsp.execute.measure import AttentionTimer
from nestsp.model.adapter import decoder_layers
from nestsp.plan import Plan
from nestsp.schedule import Pass, Schedule, make_schedule
from nestsp.shape import ModelShape, head_shares, head_slices
from nestsp.shard import GroupShard, rank_spans
from nestsp.units import plural

__all__ = ["Executor", "LocalBatch", "LocalMicrobatch"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalMicrobatch:
    """What one rank needs to run one microbatch."""

    tokens: LocalTokens
    attention: AttentionContext


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """What one rank needs to run one plan."""

    microbatches: tuple[LocalMicrobatch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Executor:
    """Runs plans on a model.

    Attributes:
        root: The `nestsp.model.root.LossRoot`, sharded or not.
        shape: The model's sizes.
        links: This rank's process groups, by level.
        rank: This rank.
        device: Where the tensors are.
        kernel: The attention kernel.
        timer: Times the turns of attention in the last run.
        streaming: Groups take turns, and attention hides exchanges; otherwise one after the other, and nothing hides.
        place: Where this rank is in its step.
    """

    root: nn.Module
    shape: ModelShape
    links: Mapping[int, Link]
    rank: int
    device: torch.device
    kernel: Kernel
    timer: AttentionTimer
    streaming: bool = True
    place: Place = field(default_factory=Place)

    def check(self, plan: Plan) -> None:
        """Prove that this executor can run a plan.

        Raises:
            PlanError: The plan asks for what is not built.
        """
        degrees = {level: degree for level in range(plan.tree.num_levels) if (degree := plan.tree.degree(level)) > 1}
        if degrees != {level: link.degree for level, link in self.links.items()}:
            raise PlanError(
                f"the plan's tree is {plan.tree}, but the ranks have groups of another one; plan for theirs"
            )
        refusal = ring_refusal(self.shape)
        for number, placement in plan.placements():
            if placement.ring_degree != 1 and refusal is not None:
                raise PlanError(
                    f"microbatch {number + 1}, {placement.group} has ring degree {placement.ring_degree}, but {refusal}"
                )
        for number, microbatch in enumerate(plan.microbatches):
            if microbatch.num_kept_layers > self.shape.num_layers:
                raise PlanError(
                    f"microbatch {number + 1} keeps {plural(microbatch.num_kept_layers, 'layer')}, but the model has "
                    f"{self.shape.num_layers}; plan for this model"
                )
        executor_capabilities(self.shape).check(plan)

    def load(self, plan: Plan, read: ReadTokens) -> LocalBatch:
        """Make the tensors of all microbatches of a checked plan; no collective."""
        schedule = make_schedule(plan, streaming=self.streaming)
        local = []
        for number, spans in enumerate(rank_spans(plan, self.rank)):
            tokens = load_local(spans, plan.batch, read, self.device)
            groups = {shard.placement.group.level: self._work(shard) for shard in spans.shards}
            local.append(LocalMicrobatch(tokens, self._context(schedule, number, groups)))
        return LocalBatch(tuple(local))

    def run(self, batch: LocalBatch, token_loss: TokenLoss = weighted_sum) -> Tensor:
        """Run all microbatches; every rank must call it with the same plan's.

        Gradients are added to those there are. After an exception they are of no use, but the next run is right.

        Args:
            batch: The microbatches.
            token_loss: Called once for each microbatch on every rank, also on those without a token of their own.

        Returns:
            This rank's loss sum, a float scalar without gradient.
        """
        self.timer.clear()
        total: Tensor | None = None
        for number, microbatch in enumerate(batch.microbatches):
            self.place.enter(number)
            microbatch.attention.clear()
            if isinstance(self.root, FSDPModule):  # replicas, if any, add up once
                self.root.set_requires_all_reduce(number == len(batch.microbatches) - 1)
            try:
                nll: Tensor = self.root(microbatch.tokens, microbatch.attention)
                loss = token_loss(microbatch.tokens, nll)
                loss.backward()
            except Exception:
                self._forget()
                raise
            assert not microbatch.attention.stash, "a layer kept something that its recompute did not take"
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a plan has at least one microbatch"
        return total

    @torch.no_grad()
    def measure(self, batch: LocalBatch) -> list[Tensor]:
        """Run all microbatches forward only; every rank must call it with the same plan's.

        Returns:
            The negative log-likelihoods [T] of each microbatch's targets on this rank.
        """
        self.timer.clear()
        found = []
        for number, microbatch in enumerate(batch.microbatches):
            self.place.enter(number)
            microbatch.attention.clear()
            try:
                found.append(self.root(microbatch.tokens, microbatch.attention))
            except Exception:
                self._forget()
                raise
        if isinstance(self.root, FSDPModule):
            self.root.reshard()  # after a forward pass the root's unit stays gathered, and would miss an update
        return found

    def _forget(self) -> None:
        """After an exception: make exchanges and FSDP ready for another run, in case somebody catches it."""
        let_computation_wait(self.links)
        if not isinstance(self.root, FSDPModule):
            return
        for parameter in self.root.parameters():
            if not isinstance(parameter, DTensor):  # a gathered one; the reset below would keep its gradient
                parameter.grad = None
        self.root.reset_iter_state()

    def _work(self, shard: GroupShard) -> GroupWork:
        group, ring_degree = shard.placement.group, shard.placement.ring_degree
        num_inside = group.degree // ring_degree
        place = shard.member // num_inside
        ring, segments = None, Segments.of(shard.lengths, self.device)
        if ring_degree > 1:
            ring, segments = make_ring(shard.chunk_edges, place, self.device)
        heads = head_shares(self.shape.num_heads, self.shape.num_kv_heads, num_inside)
        return GroupWork(
            level=group.level,
            link=self.links.get(group.level),
            member=shard.member,
            sizes=shard.sizes[place * num_inside : (place + 1) * num_inside],
            rows=slice(shard.offset, shard.offset + shard.num_tokens),
            segments=segments,
            heads=heads,
            keep=shard.placement.keep,
            ring=ring,
            slices=head_slices(heads, shard.placement.num_slices) if shard.placement.num_slices > 1 else (),
            overlaps=self.streaming,
        )

    def _context(self, schedule: Schedule, microbatch: int, groups: Mapping[int, GroupWork]) -> AttentionContext:
        kept = schedule.plan.microbatches[microbatch].num_kept_layers  # the last ones, whose backward comes first
        return AttentionContext(
            groups,
            {which: schedule.turns(microbatch, self.rank, which) for which in Pass},
            self.kernel,
            frozenset(range(self.shape.num_layers - kept)),
            self.timer.of(microbatch),
            self.place,
            self._gathers(schedule, microbatch),
        )

    def _gathers(self, schedule: Schedule, microbatch: int) -> Gathers | None:
        if not isinstance(self.root, FSDPModule):
            return None
        layers = decoder_layers(self.root)

        def issue(layer: int) -> None:
            unit = layers[layer]
            assert isinstance(unit, FSDPModule)
            unit.unshard(async_op=True)  # the layer's own hook waits

        before = {
            which: schedule.turns_before_gather(microbatch, self.rank, which) for which in (Pass.FORWARD, Pass.BACKWARD)
        }
        return Gathers(before, len(layers), issue)
