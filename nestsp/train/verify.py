"""``nestsp verify``: one planned step against the same batch in one process, both in float64, on this machine's CPU.

Rank 0 computes the reference after the planned step: Transformers' own model with ``sdpa``, each sequence alone, full
logits. Experts run eagerly, because grouped products do not exist in float64. There is no clipping and no update.
Adapters are PEFT's in both, and both their factors are drawn: while the second is 0, as a run begins, the first has no
gradient. The loss is the plain one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group
from nestsp.config import RunConfig
from nestsp.data.store import LabelledTokens
from nestsp.data.stream import DataState
from nestsp.errors import ConfigError
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.float64 import all_float64
from nestsp.execute.verify import (
    Gradients,
    RoutingRecorder,
    Verification,
    compare_gradients,
    full_gradients,
    reference_gradients,
)
from nestsp.model.adapter import build_model
from nestsp.model.derive import reference_attention
from nestsp.model.load import Source, empty_model, fill_parameters, find_sources
from nestsp.model.lora import add_adapters, draw_adapters
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.report.banner import aligned, describe_cluster, describe_model, draw_tree
from nestsp.shard import rank_spans
from nestsp.train.console import Screen
from nestsp.train.launch import EXIT_SAID
from nestsp.train.limits import decide_limits
from nestsp.train.prepare import Prepared, planning_task
from nestsp.train.setup import build_executor
from nestsp.train.trainer import prepare_with_progress
from nestsp.train.world import World, join_world
from nestsp.units import format_count, plural

__all__ = ["TOLERANCE", "choose_plan", "verify"]

TOLERANCE = 1e-9
"""Largest error that passes; rounding in float64 leaves about 1e-14."""

# Batches of the first epoch that are looked at for one that uses every level.
_BATCHES_TRIED = 200


def verify(config: RunConfig, max_tokens: int) -> int:
    """Run one rank of a verification.

    Args:
        config: A run's settings; planner, tree, model and corpus are those of the run.
        max_tokens: Tokens of the batch that is compared.

    Returns:
        0 if loss, gradient norm, every gradient and every expert choice agree, else a code that ends the job with 1.
    """
    on_cpu = {
        "cluster": config.cluster.model_copy(update={"device": "cpu"}),
        "train": config.train.model_copy(
            update={"attention_kernel": "auto", "loss_kernel": "auto", "compile": False, "router_loss": "off"}
        ),
    }
    config = config.model_copy(update=on_cpu)
    world = join_world(config.cluster)
    screen = Screen(silent=not world.is_first)
    prepared = prepare_with_progress(config, world, screen)
    limits = decide_limits(config, world, {})
    task = world.first(
        lambda: planning_task(
            prepared,
            profile=limits.profile,
            memory_per_rank_bytes=limits.memory_per_rank_bytes,
            element_bytes=torch.float64.itemsize,
        )
    )
    plan, note = world.together(lambda: choose_plan(prepared, task, max_tokens))
    screen.say(_banner(prepared, world, plan, note))
    options = {"experts_implementation": "eager"} if prepared.shape.num_moe_layers else {}
    executor = build_executor(prepared, world, dtype=torch.float64, streaming=task.streaming, model_options=options)
    if config.train.lora is not None:
        draw_adapters(executor.root.model, config.train.seed, second_factor=True)  # type: ignore[arg-type]
    screen.say("running the planned step ...")
    planned = _planned(executor, plan, prepared, world)
    code = 0
    if world.is_first:
        screen.say(
            f"running {plural(plan.batch.num_sequences, 'sequence')} alone, one after another, in one process ..."
        )
        model = _one_process_model(prepared, options)
        with all_float64():
            reference = reference_gradients(model, *_sequences(prepared, plan.batch))
        result = compare_gradients(*_of_trained(planned, reference), prepared.samples.targets(plan.batch).weight)
        _print(result)
        code = 0 if result.passes(TOLERANCE) else EXIT_SAID
    return world.share(code)


def _sequences(prepared: Prepared, batch: SequenceBatch) -> tuple[dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
    """Whole sequences of a batch, their labels and the weights of these, by id."""
    sequences, labels = {}, {}
    for identity, length in zip(batch.ids, batch.lengths, strict=True):
        tokens = prepared.samples.read(identity, 0, length)
        columns = tokens if isinstance(tokens, LabelledTokens) else (tokens, tokens, np.ones(length))
        ids, wanted = (torch.from_numpy(column.astype(np.int64)) for column in columns[:2])
        sequences[identity] = ids
        labels[identity] = (wanted, torch.from_numpy(columns[2].astype(np.float64)))
    return sequences, labels


def choose_plan(prepared: Prepared, task: PlanningTask, max_tokens: int) -> tuple[Plan, str]:
    """A plan of at most ``max_tokens`` tokens that uses every level that the planner can use.

    The run's own planner plans the run's own batches, cut to size and with the cap lowered in proportion. If none of
    the first batches uses every level, one is placed on all levels by hand.

    Returns:
        The plan, and a sentence that says where it comes from.
    """
    wanted = set(range(prepared.tree.num_levels)) if task.planner == "nsp" else set()
    best: tuple[int, Plan] | None = None
    for number, batch in enumerate(_batches(prepared, max_tokens)):
        plan = _plan_small(prepared, task, batch)
        used = {placement.group.level for _, placement in plan.placements()}
        if wanted <= used:
            return plan, f"batch {number} of the run, planned by {task.planner}"
        if best is None or len(used) > best[0]:
            best = (len(used), plan)
    if best is None:
        raise ConfigError(
            f"--max-tokens is {format_count(max_tokens)}, but none of the run's first samples is that short; raise it"
        )
    spread = _spread_over_levels(task, best[1].batch)
    if spread is None:
        return best[1], f"planned by {task.planner}; the batch has too few sequences to use every level"
    return spread, f"no batch of the run uses every level under {task.planner}: placed on all levels by hand"


def _batches(prepared: Prepared, max_tokens: int) -> Iterator[SequenceBatch]:
    """The run's first batches, each cut to its first sequences that fit."""
    state = DataState()
    for _ in range(_BATCHES_TRIED):
        batch, state = prepared.stream.take(state)
        taken: list[int] = []
        total = 0
        for position, length in enumerate(batch.lengths):
            if total + length <= max_tokens:
                taken.append(position)
                total += length
        if taken:
            yield SequenceBatch(tuple(batch.ids[p] for p in taken), tuple(batch.lengths[p] for p in taken))
        if state.epoch:
            return


def _plan_small(prepared: Prepared, task: PlanningTask, batch: SequenceBatch) -> Plan:
    """Plan a batch under a cap that is to it what the run's cap is to the run's batches; a static degree stays."""
    cap = task.max_tokens_per_rank
    if cap is not None:
        full = prepared.config.data.tokens_per_step or batch.num_tokens
        least = -(-max(batch.lengths) // (task.degree or task.tree.num_ranks))
        cap = max(least, min(cap, max(1, cap * batch.num_tokens // full)))
    return dataclasses.replace(task, max_tokens_per_rank=cap).solver()(batch).plan


def _spread_over_levels(task: PlanningTask, batch: SequenceBatch) -> Plan | None:
    """The longest sequence on the root, the next on level 1, and so on around."""
    tree = task.tree
    if batch.num_sequences < tree.num_levels:
        return None
    order = sorted(range(batch.num_sequences), key=lambda position: -batch.lengths[position])
    groups: dict[Group, list[int]] = {}
    for number, position in enumerate(order):
        level, around = number % tree.num_levels, number // tree.num_levels
        candidates = tree.groups(level)
        groups.setdefault(candidates[around % len(candidates)], []).append(position)
    plan = Plan.of_groups(tree, batch, [groups], "by hand")
    (microbatch,) = plan.microbatches
    kept = dataclasses.replace(microbatch, num_kept_layers=task.can.num_kept_layers or 0)
    return dataclasses.replace(plan, microbatches=(kept,))


def _planned(executor: Executor, plan: Plan, prepared: Prepared, world: World) -> Gradients:
    plan.check()
    world.together(lambda: executor.check(plan))
    recorder = RoutingRecorder(executor.root)
    total = torch.zeros((), dtype=torch.float64)
    local = executor.load(plan, prepared.samples.read)
    for microbatch, spans in zip(local.microbatches, rank_spans(plan, world.rank), strict=True):
        origin = [(plan.batch.ids[s.sequence], p) for s in spans.spans for p in range(s.start, s.stop)]
        with recorder.tokens(origin), all_float64():
            total += executor.run(LocalBatch((microbatch,)))
    recorder.remove()
    dist.all_reduce(total)
    gathered: list[Mapping[tuple[int, int, int], tuple[int, ...]] | None] = [None] * world.cluster.num_ranks
    dist.gather_object(recorder.choices, gathered if world.is_first else None, group=world.control)
    choices = {key: value for part in gathered if part is not None for key, value in part.items()}
    return Gradients(total.item(), full_gradients(executor.root, keep=world.is_first), choices)


def _of_trained(planned: Gradients, reference: Gradients) -> tuple[Gradients, Gradients]:
    """Both without the parameters that have a gradient in neither, such as a model's own beside adapters."""
    there = {
        name: None
        for name, gradient in (*reference.by_parameter.items(), *planned.by_parameter.items())
        if gradient is not None
    }
    kept = [{name: of.by_parameter[name] for name in there if name in of.by_parameter} for of in (planned, reference)]
    return dataclasses.replace(planned, by_parameter=kept[0]), dataclasses.replace(reference, by_parameter=kept[1])


def _one_process_model(prepared: Prepared, options: Mapping[str, Any]) -> PreTrainedModel:
    """The run's model as Transformers runs it, and its adapters as PEFT does, whole and in float64."""
    train, path = prepared.config.train, prepared.config.model.path
    attention = reference_attention(prepared.shape)
    sources: Mapping[str, Source] | None = None
    if path is None:
        model = build_model(prepared.model, seed=train.seed, attention=attention, **options).double()
    else:
        model = empty_model(prepared.model, attention=attention, **options).double()
        sources = find_sources(model, Path(path))
    if train.lora is not None:
        add_adapters(model, train.lora)
    if sources is not None:
        fill_parameters(model, sources, torch.device("cpu"))
    if train.lora is not None:
        draw_adapters(model, train.seed, second_factor=True)
    return model


def _banner(prepared: Prepared, world: World, plan: Plan, note: str) -> str:
    train = prepared.config.train
    own = train.token_loss or train.sequence_loss
    rows = [
        (
            "model",
            [
                describe_model(prepared.shape) + "; float64",
                *([] if train.lora is None else ["adapters, both factors drawn; its own weights are frozen"]),
                *([] if own is None else [f"the plain loss, not {own}"]),
            ],
        ),
        ("ranks", [f"{describe_cluster(world.cluster)}, cpu, gloo"]),
        ("tree", draw_tree(prepared.tree)),
        (
            "batch",
            [f"{plural(plan.batch.num_sequences, 'sequence')}, {plural(plan.batch.num_tokens, 'token')}; {note}"],
        ),
        ("plan", plan.format_tree().splitlines()),
    ]
    return aligned(rows) + "\n"


def _print(result: Verification) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 100)  # the table is not cut where there is no terminal
    table = Table(box=None, pad_edge=False, header_style="")
    for title, justify in (
        ("", "left"),
        ("parameters", "right"),
        ("planned", "right"),
        ("one process", "right"),
        ("error", "right"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_row("loss", "", f"{result.loss:.12f}", f"{result.reference_loss:.12f}", f"{result.loss_error:.1e}")
    table.add_row(
        "gradient norm", "", f"{result.norm:.12f}", f"{result.reference_norm:.12f}", f"{result.norm_error:.1e}"
    )
    for group, (count, worst) in result.errors_by_group().items():
        table.add_row(f"gradients of {group}", str(count), "", "", f"{worst:.1e}")
    console.print(table)
    if result.num_routed:
        console.print(
            f"experts: {format_count(result.num_rerouted)} of {format_count(result.num_routed)} choices "
            "(tokens × layers) differ"
        )
    verdict = "equal" if result.passes(TOLERANCE) else "DIFFERENT"
    console.print(f"{verdict}: largest error {result.worst:.1e}, tolerance {TOLERANCE:.0e}")
