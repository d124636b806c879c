"""The training loop: take a plan, run it, update, tell.

The sum of losses and the count of targets meet only here; the count comes from the batch, before the first forward.
Nothing a step does depends on how long anything took, or on what memory is free, so that a run can be repeated and
resumed exactly: see `nestsp.train.limits`. What ranks must know of each other at a step's end, the wish to save or to
end among it, travels in one exchange: see `nestsp.train.reports`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock

from nestsp.batch import SequenceBatch
from nestsp.config import RunConfig
from nestsp.cost.work import sequence_work
from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError, DataError, NestspError, NumericsError
from nestsp.execute.compiled_probe import compiled_line
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.objective import Objective
from nestsp.execute.probe import probe_line
from nestsp.execute.router_loss import remember_counts
from nestsp.model.compiled import check_compiler
from nestsp.plan import Plan
from nestsp.planners.task import PlanningTask
from nestsp.report.banner import aligned, describe_model
from nestsp.report.measured import TimedTurn, attention_s, waited_s
from nestsp.simulate import imbalance, plan_work
from nestsp.train.agreement import everywhere
from nestsp.train.banner import run_banner
from nestsp.train.checkpoint import load_checkpoint
from nestsp.train.console import Bar, Screen
from nestsp.train.evaluate import Evaluator, evaluation_task, prepare_evaluation
from nestsp.train.export import export_adapter, export_hugging_face
from nestsp.train.feed import PlanFeed
from nestsp.train.limits import decide_limits
from nestsp.train.manifest import Progress, RunIdentity, model_digest, read_progress
from nestsp.train.metrics import JsonLines, SpeedMeter, StepMetrics
from nestsp.train.numerics import trace_nonfinite
from nestsp.train.objective import make_objective
from nestsp.train.prepare import Prepared, planning_task, prepare
from nestsp.train.records import Records
from nestsp.train.reference import read_reference, take_reference, with_reference
from nestsp.train.rehearsal import rehearse
from nestsp.train.reports import RankReport, exchange_reports, fragmented_bytes, peak_memory_bytes
from nestsp.train.resume import find_resumed, lasting_settings, refuse_other_settings
from nestsp.train.run_folder import EVALUATIONS, METRICS, PLANS, STOP, open_run_folder
from nestsp.train.saver import Saver
from nestsp.train.setup import build_executor, compute_dtype
from nestsp.train.signals import Requests
from nestsp.train.trace import TraceFiles
from nestsp.train.trackers import check_trackers
from nestsp.train.update import learning_rate, make_optimizer, update
from nestsp.train.watchdog import Watchdog
from nestsp.train.world import World, join_world

__all__ = ["prepare_with_progress", "train"]

# The backward pass computes two products for each of the forward pass.
_FORWARD_AND_BACKWARD = 3


def train(config: RunConfig, resume: str | None = None) -> int:
    """Run one rank of a training run, from joining the job to the last file.

    Args:
        config: The settings.
        resume: See `nestsp.train.resume.find_resumed`.

    Returns:
        0, the exit code.

    Raises:
        NestspError: Something a user can mend, on every rank.
    """
    world = join_world(config.cluster)
    screen = Screen(silent=not world.is_first)
    world.first(lambda: check_trackers(config.train))
    if config.train.compile:
        world.together(lambda: check_compiler(world.device))
    prepared = prepare_with_progress(config, world, screen)
    objective = make_objective(prepared, world)
    with screen.progress("probing the model", None):
        probe = [world.first(lambda: probe_line(prepared.model))]
        if config.train.compile:
            probe.append(world.first(lambda: compiled_line(prepared.model)))
    identity = RunIdentity(
        corpus=prepared.samples.identity,
        model=model_digest(prepared.model),
        corpus_name=config.data.title,
        model_name=describe_model(prepared.shape),
    )
    checkpoint = world.first(lambda: find_resumed(config, resume, identity, world))
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
    settings = {**lasting_settings(config), **limits.to_settings()}
    evaluated = world.prepare_together("evaluation data", lambda: _prepare_evaluation(prepared, screen))
    forward = None if evaluated is None else world.first(lambda: evaluation_task(evaluated, task))
    executor = build_executor(prepared, world, dtype=dtype, streaming=task.streaming)
    optimizer = make_optimizer(executor.root, config.train, fused=world.device.type == "cuda")
    start = Progress(step=0, data=DataState(), settings=settings)
    if checkpoint is not None:
        with screen.progress("resuming", None):
            start = world.together(
                lambda: load_checkpoint(
                    checkpoint, executor.root, optimizer, identity=identity, control_group=world.control
                )
            )
        ended = start.step == prepared.num_steps and world.num_restarts > 0  # a rank died after the last step
        world.together(lambda: None if ended else refuse_other_settings(checkpoint, start, config, prepared))
        start = dataclasses.replace(start, settings=settings)
    locks: list[FileLock] = []  # held until the process ends
    folder, changes = world.first(lambda: open_run_folder(config, checkpoint, start.step, world.job, locks))
    screen.say(run_banner(prepared, task, limits, world, executor, dtype, folder, checkpoint, start, changes, probe))
    records: list[Records] = []  # rank 0's
    world.first(lambda: records.append(Records(config, folder, start.step)))
    saver = Saver(
        world,
        folder,
        executor.root,
        optimizer,
        identity,
        model=prepared.model.to_json_string(use_diff=False),
        keep=config.train.keep_checkpoints,
        background=config.train.save_in_background,
        timeout_s=config.cluster.timeout_s,
    )
    trace = world.together(lambda: TraceFiles.open(folder, config.train.trace_steps, task, world.rank, start.step))
    evaluator = None
    if evaluated is not None and forward is not None:
        evaluator = Evaluator(evaluated, forward, world, executor)
    peak = task.cost().profile.peak_flops_per_s if dtype == torch.bfloat16 else None
    with Requests() as requests, Watchdog(world, executor.place, requests, config.train.stall_s) as watchdog:
        loop = _Loop(
            prepared,
            task,
            objective,
            world,
            executor,
            optimizer,
            folder,
            screen,
            saver,
            requests,
            watchdog,
            trace,
            evaluator,
            peak,
        )
        if config.train.longest_first:
            loop.rehearse()
        if config.train.reference:
            loop.compare_with_reference(resumed=checkpoint is not None)
        stopped = loop.run(start, records)
        with watchdog.resting():
            loop.finish(stopped)
    for record in records:
        record.close()
    return 0


def prepare_with_progress(config: RunConfig, world: World, screen: Screen) -> Prepared:
    """`prepare` on all ranks, with a bar: of the store that is built, then of the ranks that are done.

    Raises:
        NestspError: Something a user can mend, on every rank.
    """
    with screen.progress("preparing data", None, lines=True) as bar:
        prepared = world.prepare_together("data", lambda: prepare(config, world.cluster, bar.set), bar.set)
    if len(set(world.gather(prepared.samples.identity))) > 1:
        raise everywhere(
            DataError(
                f"the ranks read different samples from {config.data.title}, but all must read the same; copy the same "
                "files and tokenizer to every host"
            )
        )
    return prepared


def _prepare_evaluation(prepared: Prepared, screen: Screen) -> Prepared | None:
    with screen.progress("tokenising data.eval", None, lines=True) as bar:
        return prepare_evaluation(prepared, bar.set)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step leaves to the loop."""

    record: StepMetrics
    plan: Plan
    after: DataState
    reports: tuple[RankReport, ...]


@dataclass(slots=True, eq=False)
class _Loop:
    prepared: Prepared
    task: PlanningTask
    objective: Objective
    world: World
    executor: Executor
    optimizer: torch.optim.AdamW
    folder: Path
    screen: Screen
    saver: Saver
    requests: Requests
    watchdog: Watchdog
    trace: TraceFiles
    evaluator: Evaluator | None
    peak_flops_per_s: float | None

    def rehearse(self) -> None:
        """Run the longest steps and forget them."""
        self.executor.place.task = "rehearses the longest samples' step"
        objective, samples = self.objective, self.prepared.samples
        if self.prepared.config.train.reference:  # which is not taken yet, and may cost hours
            objective = self._compared(1.1 * np.maximum(samples.num_targets, 1))  # a likelihood such as models have

        def run(local: LocalBatch, batch: SequenceBatch) -> None:
            try:
                objective.run(self.executor, local, batch, samples.targets(batch).weight)
            except NumericsError as error:  # a loss of sequences, which all ranks compute alike
                raise everywhere(error) from None

        with self.screen.progress("rehearsing", None):
            line = rehearse(self.prepared, self.task, self.world, self.executor, self.optimizer, run)
        self.screen.say(line)

    def compare_with_reference(self, *, resumed: bool) -> None:
        """Give the loss what the model said of each sample when the run began."""
        if resumed:
            number = self.prepared.samples.num_samples
            reference = self.world.first(lambda: read_reference(self.folder, number))
        else:
            self.executor.place.task = "takes the reference's likelihoods"
            with self.screen.progress("reference", None) as bar:
                reference = take_reference(self.prepared, self.task, self.world, self.executor, self.folder, bar)
        self.objective = self._compared(reference)

    def _compared(self, reference: npt.NDArray[np.float64]) -> Objective:
        loss = self.objective.sequence_loss
        assert loss is not None
        return dataclasses.replace(self.objective, sequence_loss=with_reference(loss, reference))

    def run(self, start: Progress, records: Sequence[Records]) -> str | None:
        """All steps from a place on, or those until the run is asked to end.

        Returns:
            Why it ended before its last step; None if it did not.
        """
        self.requests.listen()
        try:
            with self.screen.progress("training", self.prepared.num_steps, start.step) as bar:
                return self._run(start, records, bar)
        except NestspError as error:
            if error.raised_on_all_ranks:  # then no rank is missing, and what is being saved can be
                with contextlib.suppress(CheckpointError):
                    self.saver.finish()
                self.saver.close()
            raise

    def _run(self, start: Progress, records: Sequence[Records], bar: Bar) -> str | None:
        num_steps = self.prepared.num_steps
        feed = PlanFeed(self.prepared, self.task, self.world, self.executor, start.data, num_steps - start.step)
        speed = SpeedMeter()
        every = self.prepared.config.train.checkpoint_every
        progress, stopped = start, None
        for step in range(start.step + 1, num_steps + 1):
            done = self._step(step, progress.data, feed, speed)
            for record in records:
                record.write(done.record, done.plan)
            self.screen.say(done.record.line(num_steps))
            bar.set(step, num_steps)
            progress = Progress(step=step, data=done.after, settings=start.settings)
            self._evaluate(step)
            stopped = self._why_stop(done.reports)
            last = step == num_steps or stopped is not None
            asked = any(report.save for report in done.reports)
            if last or asked or (every is not None and step % every == 0):
                self._save(progress, asked=asked and not last)
            elif all(report.saved for report in done.reports):
                self.saver.finish()
            if stopped is not None:
                break
        feed.close()
        return stopped if progress.step < num_steps else None

    def finish(self, stopped: str | None) -> None:
        """Wait for the last save, export what has come to its end, and say where everything is."""
        self.executor.place.task = "saves"
        with self.screen.progress("saving", None):
            self.saver.finish()
            self.saver.close()
        rows = [
            ("metrics", [str(self.folder / METRICS)]),
            ("plans", [str(self.folder / PLANS)]),
            ("settings", [str(self.folder / "config.yaml")]),
        ]
        if self.saver.checkpoint is not None:
            rows.append(("checkpoint", [str(self.saver.checkpoint)]))
        if stopped is not None:
            rows.insert(0, ("ended", [f"{stopped}; --resume auto goes on from here"]))
        elif self.prepared.config.train.export:
            exported = self.folder / "hf"
            with self.screen.progress("exporting", None):
                self.world.together(
                    lambda: export_hugging_face(
                        self.executor.root,
                        self.prepared.model,
                        exported,
                        rank=self.world.rank,
                        control_group=self.world.control,
                        lora=self.prepared.config.train.lora,
                    )
                )
            rows.append(("model", [f"{exported} (AutoModelForCausalLM.from_pretrained reads it)"]))
            self._export_adapter(rows)
        self.screen.say("\n" + aligned(rows))

    def _export_adapter(self, rows: list[tuple[str, list[str]]]) -> None:
        config = self.prepared.config
        if (lora := config.train.lora) is None:
            return
        adapter = self.folder / "adapter"
        self.world.together(
            lambda: export_adapter(
                self.executor.root,
                lora,
                adapter,
                rank=self.world.rank,
                control_group=self.world.control,
                base=config.model.path,
            )
        )
        rows.append(("adapter", [f"{adapter} (PEFT reads it; the model above has it merged)"]))

    def _evaluate(self, step: int) -> None:
        every, num_steps = self.prepared.config.train.eval_every, self.prepared.num_steps
        if self.evaluator is None or not (step == num_steps or (every is not None and step % every == 0)):
            return
        self.executor.place.task = "evaluates"
        self.screen.say(f"evaluating after step {step} ...")
        result = self.evaluator.run(step)
        self.screen.say(result.line(num_steps))
        if self.world.is_first:
            records = JsonLines.resume(self.folder / EVALUATIONS, step - 1)
            records.write(result)
            records.close()

    def _save(self, progress: Progress, *, asked: bool) -> None:
        self.executor.place.task = "saves"
        with self.watchdog.resting():
            self.saver.begin(progress)
        if asked:
            self.screen.say(f"step {progress.step} is being saved, as SIGUSR1 asked")

    def _why_stop(self, reports: Sequence[RankReport]) -> str | None:
        """The reason to end after this step, known to all ranks alike; None to go on."""
        told = [rank for rank, report in enumerate(reports) if report.stop]
        if not told:
            return None
        if self.world.is_first and self._stop_file.exists():
            self._stop_file.unlink(missing_ok=True)
            return f"as the file {self._stop_file} asked"
        return f"as a signal to {'all ranks' if len(told) == len(reports) else f'rank {told[0]}'} asked"

    @property
    def _stop_file(self) -> Path:
        return self.folder / STOP

    def _step(self, step: int, data: DataState, feed: PlanFeed, speed: SpeedMeter) -> _Step:
        config, place = self.prepared.config.train, self.executor.place
        place.step, place.task = step, "waits for its plan"
        begun = time.perf_counter()
        taken = feed.take()
        planned, plan = taken.planned, taken.planned.plan
        self.executor.timer.begin()
        place.task = "reads its tokens"
        before_load = time.perf_counter()
        local = self.executor.load(plan, self.prepared.samples.read)
        loaded = time.perf_counter()
        place.task = "runs"
        targets = self.prepared.samples.targets(plan.batch)
        put_back = remember_counts(self.executor)
        try:
            loss_sum, router_loss = self.objective.run(self.executor, local, plan.batch, targets.weight)
        except NumericsError as error:  # a loss of sequences, which all ranks compute alike
            raise everywhere(NumericsError(f"step {step}: {error}")) from None
        turns = self.executor.timer.take()
        place.task = "waits for the other ranks' losses"
        reports = exchange_reports(
            self._report(loss_sum, loaded - before_load, turns), self.world.device, self.world.cluster.num_ranks
        )
        total_loss = sum(report.loss_sum for report in reports)
        place.task = "updates the weights"
        lr = learning_rate(config, step - 1, self.prepared.num_steps)
        loss = norm = None
        if denominator := self.objective.denominator(targets.weight):

            def again() -> None:
                put_back()
                self.objective.run(self.executor, local, plan.batch, targets.weight)

            loss = self._finite("loss", total_loss / denominator, step, local, again)
            norm = update(
                self.executor.root,
                self.optimizer,
                total_weight=denominator,
                max_grad_norm=config.max_grad_norm,
                lr=lr,
            )
            self._finite("gradient norm", norm, step, local, again)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        step_s = time.perf_counter() - begun - taken.wait_s
        self.trace.write(step, turns)
        estimated_s = speed.estimate_s(planned.makespan_s)
        speed.add(planned.makespan_s, step_s)
        self.watchdog.step_took(step_s)
        flops = _FORWARD_AND_BACKWARD * sum(sequence_work(self.prepared.shape, n).total for n in plan.batch.lengths)
        rate = flops / step_s / len(reports)
        fullest = max(range(len(reports)), key=lambda rank: reports[rank].peak_memory_bytes)
        record = StepMetrics(
            step=step,
            epoch=data.epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            router_loss=router_loss,
            num_sequences=plan.batch.num_sequences,
            num_tokens=plan.batch.num_tokens,
            num_targets=targets.number,
            tokens_per_s=plan.batch.num_tokens / step_s,
            tokens_per_s_per_rank=plan.batch.num_tokens / step_s / len(reports),
            flops_per_s_per_rank=rate,
            mfu=None if self.peak_flops_per_s is None else rate / self.peak_flops_per_s,
            step_s=step_s,
            estimated_s=estimated_s,
            makespan_s=planned.makespan_s,
            gap_to_bound=planned.gap,
            planning_s=planned.planning_s,
            attention_s=sum(report.attention_s for report in reports) / len(reports),
            exposed=sum(report.waited_s for report in reports) / len(reports) / step_s,
            wait_s=taken.wait_s,
            save_s=self.saver.take_wait_s(),
            load_s=max(report.load_s for report in reports),
            peak_memory_bytes=int(reports[fullest].peak_memory_bytes),
            peak_memory_rank=fullest,
            fragmented_bytes=int(max(report.fragmented_bytes for report in reports)),
            imbalance=imbalance(plan_work(plan, self.prepared.shape)),
            num_microbatches=len(plan.microbatches),
            num_sequences_by_degree=plan.num_sequences_by_degree(),
        )
        return _Step(record, plan, taken.after, reports)

    def _report(self, loss_sum: float, load_s: float, turns: Sequence[TimedTurn]) -> RankReport:
        save = self.requests.take_save()
        return RankReport(
            loss_sum=loss_sum,
            attention_s=attention_s(turns),
            waited_s=waited_s(turns),
            load_s=load_s,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
            fragmented_bytes=fragmented_bytes(self.world.device),
            stop=self.requests.stop is not None or (self.world.is_first and self._stop_file.exists()),
            save=save,
            saved=self.saver.ended,
        )

    def _finite(self, what: str, value: float, step: int, local: LocalBatch, again: Callable[[], object]) -> float:
        if not math.isfinite(value):  # on all ranks alike: both are sums over all of them
            self.executor.place.task = "looks for the number that is not finite"
            where = trace_nonfinite(self.executor, local, again, self.world, self.folder, step)
            raise everywhere(
                NumericsError(
                    f"the {what} of step {step} is {value}, but it must be finite; no weight was changed by this step, "
                    "so lower train.learning_rate, or look at the step's samples, and resume from a checkpoint before "
                    f"it; {where}"
                )
            )
        return value
