"""The training loop: take a plan, run it, update, tell.

The sum of losses and the count of targets meet only here; the count comes from the batch, before the first forward.
Nothing a step does depends on how long anything took, or on what memory is free, so that a run can be repeated and
resumed exactly: see `nestsp.train.limits`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor

from nestsp.cluster import Cluster
from nestsp.config import RunConfig, parse_config, to_yaml
from nestsp.data.samples import num_targets
from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError, ConfigError, NumericsError
from nestsp.execute.executor import Executor
from nestsp.execute.probe import probe_line
from nestsp.execute.router_loss import run_with_router_loss
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.report.banner import aligned, describe_cluster, describe_model, draw_tree, steps_arithmetic
from nestsp.report.measured import attention_s, waited_s
from nestsp.simulate import imbalance, plan_work
from nestsp.train.checkpoint import (
    CHECKPOINTS,
    Progress,
    RunIdentity,
    find_checkpoint,
    load_checkpoint,
    model_digest,
    read_progress,
    save_checkpoint,
    validate_checkpoint,
)
from nestsp.train.console import Bar, Screen
from nestsp.train.evaluate import Evaluator, evaluation_task, prepare_evaluation
from nestsp.train.export import export_hugging_face
from nestsp.train.feed import PlanFeed
from nestsp.train.limits import Limits, decide_limits
from nestsp.train.metrics import JsonLines, SpeedMeter, StepMetrics
from nestsp.train.prepare import Prepared, planning_task, prepare, router_loss_coefficient
from nestsp.train.run_folder import latest_run_folder, new_run_folder
from nestsp.train.setup import build_executor, compute_dtype
from nestsp.train.trace import TraceFiles
from nestsp.train.update import learning_rate, make_optimizer, update
from nestsp.train.world import World, everywhere, join_world
from nestsp.units import format_bytes, format_count

__all__ = ["prepare_with_progress", "train"]

_RECOMPUTE: Mapping[bool | str, str] = {
    "auto": "as few layers as memory allows are recomputed",
    True: "all layers are recomputed",
    False: "no layer is recomputed",
}
_METRICS = "metrics.jsonl"
_PLANS = "plans.jsonl"
_EVALUATIONS = "evaluations.jsonl"


def train(config: RunConfig, resume: str | None = None) -> int:
    """Run one rank of a training run, from joining the job to the last file.

    Args:
        config: The settings.
        resume: ``auto`` for the latest run of this name, or the path of a run's folder or of a checkpoint; None to
            begin a new run.

    Returns:
        0, the exit code.

    Raises:
        NestspError: Something a user can mend, on every rank.
    """
    world = join_world(config.cluster)
    screen = Screen(silent=not world.is_first)
    prepared = world.together(lambda: prepare_with_progress(config, world.cluster, screen))
    screen.say(world.first(lambda: probe_line(prepared.model)))
    identity = RunIdentity(
        corpus=prepared.samples.identity,
        model=model_digest(prepared.model),
        corpus_name=config.data.source,
        model_name=describe_model(prepared.shape),
    )
    checkpoint = world.together(lambda: _find(config, resume, identity))
    saved = world.first(lambda: {} if checkpoint is None else dict(read_progress(checkpoint).settings))
    limits = decide_limits(config, world, saved)
    config = limits.resolved(config)
    prepared = dataclasses.replace(prepared, config=config)
    dtype = compute_dtype(config.train.dtype, world.device)
    task = world.first(
        lambda: planning_task(
            prepared,
            profile=limits.profile,
            memory_per_rank_bytes=limits.memory_per_rank_bytes,
            element_bytes=dtype.itemsize,
            device=world.device.type,
        )
    )
    settings = {**_lasting(config), **limits.to_settings()}
    evaluated = world.together(lambda: _prepare_evaluation(prepared, screen))
    forward = None if evaluated is None else world.first(lambda: evaluation_task(evaluated, task))
    executor = build_executor(prepared, world, dtype=dtype, streaming=task.streaming)
    optimizer = make_optimizer(executor.root, config.train, fused=world.device.type == "cuda")
    start = Progress(step=0, data=DataState(), settings=settings)
    if checkpoint is not None:
        start = world.together(
            lambda: load_checkpoint(
                checkpoint, executor.root, optimizer, identity=identity, control_group=world.control
            )
        )
        world.together(lambda: _same_settings(checkpoint, start, config, prepared))
        start = dataclasses.replace(start, settings=settings)
    locks: list[FileLock] = []  # held until the process ends
    folder, changes = world.first(lambda: _open_folder(config, checkpoint, start.step, locks))
    screen.say(_banner(prepared, task, limits, world, executor, dtype, folder, checkpoint, start, changes))
    evaluator = None
    if evaluated is not None and forward is not None:
        evaluator = Evaluator(evaluated, forward, world, executor)
    trace = world.together(lambda: TraceFiles.open(folder, config.train.trace_steps, task, world.rank, start.step))
    loop = _Loop(prepared, task, world, executor, optimizer, identity, folder, screen, trace, evaluator)
    with screen.progress("training", prepared.num_steps, start.step) as bar:
        loop.run(start, bar)
    loop.finish()
    return 0


def prepare_with_progress(config: RunConfig, cluster: Cluster, screen: Screen) -> Prepared:
    """`prepare`, with a bar while the token store is built. Several ranks may call it at once; one of them builds."""
    with screen.progress("tokenising", None) as bar:
        return prepare(config, cluster, bar.set)


def _prepare_evaluation(prepared: Prepared, screen: Screen) -> Prepared | None:
    with screen.progress("tokenising data.eval", None) as bar:
        return prepare_evaluation(prepared, bar.set)


@dataclass(slots=True, eq=False)
class _Loop:
    prepared: Prepared
    task: PlanningTask
    world: World
    executor: Executor
    optimizer: torch.optim.AdamW
    identity: RunIdentity
    folder: Path
    screen: Screen
    trace: TraceFiles
    evaluator: Evaluator | None = None
    checkpoint: Path | None = None

    def run(self, start: Progress, bar: Bar) -> None:
        """All steps from a place on."""
        num_steps = self.prepared.num_steps
        feed = PlanFeed(self.prepared, self.task, self.world, self.executor, start.data, num_steps - start.step)
        metrics, plans = self._open_records(start.step)
        speed = SpeedMeter()
        every = self.prepared.config.train.checkpoint_every
        progress = start
        for step in range(start.step + 1, num_steps + 1):
            record, plan, after = self._step(step, progress.data, feed, speed)
            if metrics is not None and plans is not None:
                metrics.write(record)
                plans.write({"step": step, **plan.to_json()})
            self.screen.say(record.line(num_steps))
            bar.set(step, num_steps)
            progress = Progress(step=step, data=after, settings=start.settings)
            self._evaluate(step)
            if step == num_steps or (every is not None and step % every == 0):
                self._save(progress)
        feed.close()

    def _evaluate(self, step: int) -> None:
        every, num_steps = self.prepared.config.train.eval_every, self.prepared.num_steps
        if self.evaluator is None or not (step == num_steps or (every is not None and step % every == 0)):
            return
        self.screen.say(f"evaluating after step {step} ...")
        result = self.evaluator.run(step)
        self.screen.say(result.line(num_steps))
        if self.world.is_first:
            records = JsonLines.resume(self.folder / _EVALUATIONS, step - 1)
            records.write(result)
            records.close()

    def _save(self, progress: Progress) -> None:
        self.checkpoint = self.world.together(
            lambda: save_checkpoint(
                self.folder,
                self.executor.root,
                self.optimizer,
                progress,
                self.identity,
                control_group=self.world.control,
            )
        )

    def finish(self) -> None:
        """Export, and say where everything is."""
        rows = [
            ("metrics", [str(self.folder / _METRICS)]),
            ("plans", [str(self.folder / _PLANS)]),
            ("settings", [str(self.folder / "config.yaml")]),
        ]
        if self.checkpoint is not None:
            rows.append(("checkpoint", [str(self.checkpoint)]))
        if self.prepared.config.train.export:
            exported = self.folder / "hf"
            self.world.together(
                lambda: export_hugging_face(
                    self.executor.root,
                    self.prepared.model,
                    exported,
                    rank=self.world.rank,
                    control_group=self.world.control,
                )
            )
            rows.append(("model", [f"{exported} (AutoModelForCausalLM.from_pretrained reads it)"]))
        self.screen.say("\n" + aligned(rows))

    def _run(self, plan: Plan, targets: int) -> tuple[Tensor, float | None]:
        """This rank's loss sum, and the auxiliary loss of the batch's routers if there is one."""
        local = self.executor.load(plan, self.prepared.samples.read)
        kind = self.prepared.config.train.router_loss
        if kind == "off":
            return self.executor.run(local).double(), None
        scale = router_loss_coefficient(self.prepared) * targets
        loss_sum, router_loss = run_with_router_loss(self.executor, local, kind=kind, scale=scale)
        return loss_sum.double(), router_loss

    def _step(
        self, step: int, data: DataState, feed: PlanFeed, speed: SpeedMeter
    ) -> tuple[StepMetrics, Any, DataState]:
        config = self.prepared.config.train
        before_plan = time.perf_counter()
        taken = feed.take()
        planned, plan = taken.planned, taken.planned.plan
        start = time.perf_counter()
        self.executor.timer.begin()
        targets = num_targets(plan.batch)
        loss_sum, router_loss = self._run(plan, targets)
        turns = self.executor.timer.take()
        sums = torch.stack([loss_sum, *loss_sum.new_tensor([attention_s(turns), waited_s(turns)])])
        dist.all_reduce(sums)
        total_loss, in_attention_s, waiting_s = sums.tolist()
        num_ranks = self.world.cluster.num_ranks
        lr = learning_rate(config, step - 1, self.prepared.num_steps)
        loss = norm = None
        if targets:
            loss = _finite("loss", total_loss / targets, step)
            norm = update(
                self.executor.root, self.optimizer, total_weight=targets, max_grad_norm=config.max_grad_norm, lr=lr
            )
            _finite("gradient norm", norm, step)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        step_s = time.perf_counter() - start
        self.trace.write(step, turns)
        estimated_s = speed.estimate_s(planned.makespan_s)
        speed.add(planned.makespan_s, step_s)
        record = StepMetrics(
            step=step,
            epoch=data.epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            router_loss=router_loss,
            num_sequences=plan.batch.num_sequences,
            num_tokens=plan.batch.num_tokens,
            num_targets=targets,
            tokens_per_s=plan.batch.num_tokens / step_s,
            step_s=step_s,
            estimated_s=estimated_s,
            makespan_s=planned.makespan_s,
            gap_to_bound=planned.gap,
            planning_s=planned.planning_s,
            attention_s=in_attention_s / num_ranks,
            exposed=waiting_s / num_ranks / step_s,
            wait_s=start - before_plan,
            imbalance=imbalance(plan_work(plan, self.prepared.shape)),
            num_microbatches=len(plan.microbatches),
            num_sequences_by_degree=plan.num_sequences_by_degree(),
        )
        return record, plan, taken.after

    def _open_records(self, last_step: int) -> tuple[JsonLines | None, JsonLines | None]:
        if not self.world.is_first:
            return None, None
        return (
            JsonLines.resume(self.folder / _METRICS, last_step),
            JsonLines.resume(self.folder / _PLANS, last_step),
        )


def _find(config: RunConfig, resume: str | None, identity: RunIdentity) -> Path | None:
    """The checkpoint to go on from, known to be whole and of this run."""
    if resume is None:
        return None
    if resume == "auto":
        where = latest_run_folder(Path(config.runs_dir), config.name)
    else:
        where = Path(resume)
        if where.name in ("", ".."):  # its parents are not in the path
            where = where.resolve()
        if not where.exists():
            raise CheckpointError(
                f"--resume is {resume}, but there is nothing there; give a run's folder, a checkpoint's, or auto"
            )
    found = find_checkpoint(where)
    validate_checkpoint(found, identity)
    return found


def _finite(what: str, value: float, step: int) -> float:
    if not math.isfinite(value):
        raise everywhere(  # both are sums over all ranks
            NumericsError(
                f"the {what} of step {step} is {value}, but it must be finite; no weight was changed by this step, so "
                "lower train.learning_rate, or look at the step's samples, and resume from a checkpoint before it"
            )
        )
    return value


def _lasting(config: RunConfig) -> dict[str, object]:
    """Settings that must stay the same for a resumed run to see the same batches."""
    data = config.data
    return {
        "data.seed": data.seed,
        "data.tokens_per_step": data.tokens_per_step,
        "data.sequences_per_step": data.sequences_per_step,
    }


def _same_settings(checkpoint: Path, start: Progress, config: RunConfig, prepared: Prepared) -> None:
    for key, value in _lasting(config).items():
        saved = start.settings.get(key)
        if saved != value:
            raise CheckpointError(
                f"{checkpoint.name} was saved with {key} = {saved}, but this run has {value}, so its place in the data "
                "means nothing here; set it back, or begin a new run without --resume"
            )
    if start.step >= prepared.num_steps:
        raise CheckpointError(
            f"{checkpoint.name} is at step {start.step}, but the run ends at step {prepared.num_steps}; raise train."
            f"{'epochs' if config.train.steps is None else 'steps'} to go on"
        )


def _open_folder(
    config: RunConfig, checkpoint: Path | None, step: int, locks: list[FileLock]
) -> tuple[Path, tuple[str, ...]]:
    """The run's folder with its settings in it: the one that a checkpoint is the latest of, else a new one.

    The folder is locked, so that two jobs never write into one. Settings of an earlier start stay beside the new ones.

    From an older checkpoint, or one that lies elsewhere, a new run begins, with the records up to there, if any: what
    the first run wrote after it stays as it is.

    Returns:
        The folder, and what was set otherwise at the start before, as ``key old → new``.
    """
    old = None if checkpoint is None or checkpoint.parent.name != CHECKPOINTS else checkpoint.parent.parent
    if old is not None and find_checkpoint(old) == checkpoint:
        folder = old
    else:
        folder = new_run_folder(Path(config.runs_dir), config.name)
    changes: tuple[str, ...] = ()
    try:
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise ConfigError(
                f"the run's folder is {folder}, but another job is training in it; end that one first, or begin a new "
                "run without --resume"
            ) from None
        locks.append(lock)
        for name in (_METRICS, _PLANS, _EVALUATIONS) if old not in (None, folder) else ():
            if old is not None and (old / name).exists():
                shutil.copyfile(old / name, folder / name)
        before = (old or folder) / "config.yaml"
        if before.exists():
            changes = _changed(before.read_text(encoding="utf-8"), config)
            if changes and old == folder:
                shutil.copyfile(before, folder / f"config-before-step-{step + 1:06d}.yaml")
        written = folder / ".config.yaml"
        written.write_text(to_yaml(config), encoding="utf-8")
        written.replace(folder / "config.yaml")
    except OSError as error:
        raise ConfigError(
            f"the run's folder is {folder}, but it cannot be written: {error.strerror}; make room, or set runs_dir to "
            "another folder"
        ) from None
    return folder, changes


def _changed(before: str, config: RunConfig) -> tuple[str, ...]:
    """Settings that differ from those of an earlier start, as ``key old → new``."""
    try:
        old = parse_config(before)
    except ConfigError:  # of another version
        return ("config.yaml of the start before is of another version",)
    was, now = _flat(old.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    return tuple(f"{key} {was.get(key)} → {now.get(key)}" for key in {**was, **now} if was.get(key) != now.get(key))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _banner(
    prepared: Prepared,
    task: PlanningTask,
    limits: Limits,
    world: World,
    executor: Executor,
    dtype: torch.dtype,
    folder: Path,
    checkpoint: Path | None,
    start: Progress,
    changes: tuple[str, ...],
) -> str:
    config = prepared.config
    device = platform.machine() if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    cap, cost = task.max_tokens_per_rank, task.cost()
    chosen = " (chosen over a sample of batches)" if config.planner.degree is None else ""
    degree = "" if task.degree is None else f", degree {task.degree}{chosen}"
    rows = [
        ("run", [str(folder) + (f", from {checkpoint.name}" if checkpoint is not None else "")]),
        ("model", [describe_model(prepared.shape)]),
        (
            "ranks",
            [
                f"{describe_cluster(world.cluster)}; {world.device.type} ({device}), {world.backend}, "
                f"{str(dtype).removeprefix('torch.')}; attention by {executor.kernel.name}",
                f"FSDP2 over all ranks; {_RECOMPUTE[config.train.recompute]} in backward",
            ],
        ),
        ("tree", draw_tree(prepared.tree)),
        ("planner", [f"{task.planner}{degree}" + ("" if task.streaming else "; groups one after the other")]),
        ("profile", [f"{cost.profile.name}: {cost.profile.hardware}"]),
        (
            "memory",
            [
                f"{format_bytes(limits.memory_per_rank_bytes)} a rank may use ({limits.source}), "
                f"{format_bytes(cost.memory.fixed)} of them before any token"
            ],
        ),
        (
            "cap",
            [
                "none but memory"
                if cap is None
                else f"{format_count(cap)} tokens a rank holds in one microbatch, after splitting "
                f"(a sequence of {format_count(cap * prepared.tree.num_ranks)} fits on all ranks together)"
            ],
        ),
        (
            "data",
            [
                f"{config.data.source}, tokens by {config.data.tokenizer}",
                *prepared.samples.counts.describe().split("; "),
            ],
        ),
        (
            "steps",
            [
                steps_arithmetic(
                    num_samples=prepared.samples.num_samples,
                    steps_in_epoch=prepared.stream.steps_in_epoch(0),
                    num_steps=prepared.num_steps,
                    tokens_per_step=config.data.tokens_per_step,
                    sequences_per_step=config.data.sequences_per_step,
                )
            ]
            + ([f"going on after step {start.step}"] if start.step else [])
            + [f"changed since the start before: {change}" for change in changes],
        ),
    ]
    return f"nestsp {importlib.metadata.version('nestsp')}\n{aligned(rows)}\n"
