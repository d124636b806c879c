"""The trainer as its ranks run it, on the pool's ranks: what it resumes and refuses, and what it leaves behind.

Only joining the job is replaced, for the pool's ranks have joined theirs, and a probed model is not probed again.
Commands in processes of their own are in ``tests/e2e``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from nestsp.cli.export import export_checkpoint
from nestsp.cli.trace import trace_run
from nestsp.cluster import Cluster
from nestsp.config import RunConfig, load_config
from nestsp.errors import CheckpointError, ConfigError, NestspError
from nestsp.execute.executor import Executor
from nestsp.execute.probe import probe_line
from nestsp.model.adapter import decoder_layers
from nestsp.plan import Plan
from nestsp.report.measured import TimedTurn
from nestsp.schedule import Pass, make_schedule
from nestsp.train import trainer
from nestsp.train.setup import build_executor
from nestsp.train.world import World
from tests.distributed.pool import RankPool
from tests.e2e.runs import contents, losses, read_lines, read_plans, tiny, write_corpus

STEPS = 9
# Every order of adding up is another rounding; float32 losses of 5 after nine steps.
ROUNDING = 2e-5


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a rank raised."""

    kind: str
    sentence: str
    said_once: bool


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@functools.cache
def probed(model: str) -> str:
    """What the probe says of a model, which is most of a short run: once for each model and process."""
    return probe_line(AutoConfig.for_model(**json.loads(model)))


def train_rank(rank: int, num_ranks: int, folder: Path, config: RunConfig, resume: str | None) -> Refusal | None:
    """The trainer on one rank of the pool."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    world = World(rank, rank, Cluster(1, num_ranks), torch.device("cpu"), "gloo", control)
    with (
        working_in(folder),
        patch.object(trainer, "join_world", lambda settings: world),
        patch.object(trainer, "probe_line", lambda model: probed(model.to_json_string(use_diff=False))),
    ):
        try:
            assert trainer.train(config, resume) == 0
        except NestspError as error:
            return Refusal(type(error).__name__, str(error), error.raised_on_all_ranks)
        finally:
            dist.destroy_process_group(control)
    return None


Train = Callable[..., None]


@pytest.fixture
def train(pool: RankPool, tmp_path: Path) -> Train:
    write_corpus(tmp_path / "corpus.jsonl")

    def run(*overrides: str, resume: str | None = None, ranks: int = 4) -> None:
        config = tiny("train.checkpoint_every=null", *overrides)
        outcomes = pool.run(train_rank, tmp_path, config, resume, ranks=ranks)
        assert outcomes == [None] * ranks

    return run


Refuse = Callable[..., str]


@pytest.fixture
def refuse(pool: RankPool, tmp_path: Path) -> Refuse:
    """Expect one and the same refusal on all ranks, to be said once; returns it. No file may change."""

    def run(kind: str, *overrides: str, resume: str | None = None, ranks: int = 4) -> str:
        before = contents(tmp_path)
        outcomes = pool.run(train_rank, tmp_path, tiny(*overrides), resume, ranks=ranks)
        assert len(set(outcomes)) == 1
        [refusal] = set(outcomes)
        assert refusal is not None, "it was not refused"
        assert refusal.kind == kind
        assert refusal.said_once
        changed = {name for name, content in contents(tmp_path).items() if before.get(name) != content}
        assert not {name for name in changed if not name.startswith(".nestsp")}
        assert before.keys() <= contents(tmp_path).keys()
        return refusal.sentence

    return run


@pytest.fixture(scope="module")
def finished(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of nine steps on four ranks that was never stopped, with a checkpoint at each step."""
    folder = tmp_path_factory.mktemp("straight")
    write_corpus(folder / "corpus.jsonl")
    assert pool.run(train_rank, folder, tiny(), None, ranks=4) == [None] * 4
    return folder


def stop_at(finished: Path, folder: Path, step: int) -> Path:
    """A copy of the finished run as it is when its ranks are killed after a step's checkpoint and before the next."""
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    run = folder / "runs" / "tiny-1"
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(run / "hf")
    return run


# Epochs are of five steps: the first, the middle, the last but one and the last of one epoch, and the middle of the
# next; the last step of all is refused below.
@pytest.mark.parametrize("step", [1, 3, 4, 5, 7])
def test_a_run_stopped_at_a_step_and_resumed_has_the_same_losses_and_files(
    finished: Path, train: Train, tmp_path: Path, step: int
) -> None:
    """G3, G5, G7, G8."""
    run = stop_at(finished, tmp_path, step)
    train(resume="auto")
    straight = finished / "runs" / "tiny-1"
    assert losses(run) == losses(straight)
    for record, expected in zip(read_lines(run / "metrics.jsonl"), read_lines(straight / "metrics.jsonl"), strict=True):
        for key in ("epoch", "lr", "grad_norm", "num_sequences", "num_tokens", "num_targets"):
            assert record[key] == expected[key]
    assert read_lines(run / "plans.jsonl") == read_lines(straight / "plans.jsonl")
    assert (run / "hf" / "model.safetensors").read_bytes() == (straight / "hf" / "model.safetensors").read_bytes()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-1"]


def test_a_step_that_was_run_but_not_saved_is_run_again_and_told_once(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    """G3, G31: killed in step 5, of which the line is half written, with the checkpoint of step 3."""
    run = stop_at(finished, tmp_path, 3)
    for name in ("metrics.jsonl", "plans.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:4]) + lines[4][:30])
    train(resume="runs/tiny-1")
    assert losses(run) == losses(finished / "runs" / "tiny-1")
    assert read_lines(run / "plans.jsonl") == read_lines(finished / "runs" / "tiny-1" / "plans.jsonl")


@pytest.mark.parametrize(
    ("step", "ranks", "overrides"),
    [
        (4, 2, ("planner.max_tokens_per_rank=100",)),
        (7, 3, ("planner.name=basp", "train.save_in_background=false")),
        (1, 4, ("planner.name=static", "planner.degree=4", "train.keep_checkpoints=1")),
    ],
)
def test_resuming_on_other_ranks_or_by_another_planner_takes_the_same_samples_and_gives_the_same_losses(
    finished: Path, train: Train, tmp_path: Path, step: int, ranks: int, overrides: tuple[str, ...]
) -> None:
    """G3, G5, G8: up to rounding; also in the second epoch."""
    run, straight = stop_at(finished, tmp_path, step), finished / "runs" / "tiny-1"
    train(f"cluster.ranks={ranks}", *overrides, resume="auto", ranks=ranks)
    assert losses(run)[:step] == losses(straight)[:step]
    assert losses(run) == pytest.approx(losses(straight), abs=ROUNDING)
    assert [plan.batch for plan in read_plans(run)] == [plan.batch for plan in read_plans(straight)]
    if "train.keep_checkpoints=1" in overrides:
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000009"]


def test_a_checkpoint_is_exported_without_its_run_as_the_run_exports_it(finished: Path, tmp_path: Path) -> None:
    run = finished / "runs" / "tiny-1"
    copy = shutil.copytree(run / "checkpoints" / "step-000009", tmp_path / "copy")
    export_checkpoint(copy, tmp_path / "out", "float32", None)
    assert contents(tmp_path / "out") == contents(run / "hf")
    export_checkpoint(run, tmp_path / "half", "bfloat16", None)
    half = safetensors.torch.load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in safetensors.torch.load_file(run / "hf" / "model.safetensors").items():
        assert torch.equal(half[name], tensor.to(torch.bfloat16))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_checkpoint_with_adapters_is_exported_with_them_merged(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    # Only linear layers get adapters, so the experts, which are no such layers, stay out of it.
    lora = "train.lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}"
    train("train.steps=2", "planner.max_tokens_per_rank=100", lora, ranks=2)
    run = tmp_path / "runs" / "tiny-1"
    export_checkpoint(run, tmp_path / "out", "float32", None)
    assert contents(tmp_path / "out") == contents(run / "hf")


def test_an_export_refuses_what_it_cannot_read_or_would_replace(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished / "runs" / "tiny-1" / "checkpoints" / "step-000009", tmp_path / "copy")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is there and is no exported model"):
        export_checkpoint(copy, tmp_path / "notes", "float32", None)
    with pytest.raises(ConfigError, match="--dtype is 'int8', but it must be float32 or bfloat16"):
        export_checkpoint(copy, tmp_path / "out", "int8", None)
    (copy / "model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.json has 2 bytes, but"):
        export_checkpoint(copy, tmp_path / "out", "float32", None)
    assert not (tmp_path / "out").exists()


def test_from_an_older_checkpoint_a_new_run_begins_and_the_first_stays_as_it_was(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path / "runs" / "tiny-1")
    train("train.steps=8", "train.checkpoint_every=4", resume="runs/tiny-1/checkpoints/step-000003")
    assert contents(tmp_path / "runs" / "tiny-1") == before
    branch = tmp_path / "runs" / "tiny-2"
    assert losses(branch)[:3] == losses(finished / "runs" / "tiny-1")[:3]
    assert [record["step"] for record in read_lines(branch / "plans.jsonl")] == list(range(1, 9))
    assert sorted(p.name for p in (branch / "checkpoints").iterdir()) == ["step-000004", "step-000008"]


def test_from_a_checkpoint_that_lies_elsewhere_a_new_run_begins(finished: Path, train: Train, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs" / "tiny-1" / "checkpoints" / "step-000008", tmp_path / "kept")
    train(resume="kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nestsp", "corpus.jsonl", "kept", "runs"]
    [record] = read_lines(tmp_path / "runs" / "tiny-1" / "metrics.jsonl")
    assert record["step"] == 9
    assert record["loss"] == losses(finished / "runs" / "tiny-1")[-1]


def test_the_latest_checkpoint_named_by_its_own_path_goes_on_in_its_run(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run = stop_at(finished, tmp_path, 8)
    train(resume=str(run / "checkpoints" / "step-000008") + "/")
    assert losses(run) == losses(finished / "runs" / "tiny-1")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-1"]


# --- Refusals ------------------------------------------------------------------------------------


def test_a_finished_run_is_not_resumed(finished: Path, refuse: Refuse, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    sentence = refuse("CheckpointError", resume="auto")
    assert sentence == ("step-000009 is at step 9, but the run ends at step 9; raise train.steps to go on")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.seed=1", "data.seed = 0, but this run has 1"),
        ("data.tokens_per_step=300", "data.tokens_per_step = 200, but this run has 300"),
        ("data.over_length=drop", "was saved from corpus 'corpus.jsonl'"),
        ("model.config.hidden_size=64", "hidden 32, 4 query"),
        ("model.config.rope_theta=1000", "was saved from model"),
    ],
)
def test_a_checkpoint_of_other_batches_or_another_model_is_refused(
    finished: Path, refuse: Refuse, tmp_path: Path, override: str, said: str
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    more = ("data.max_length=100",) if "over_length" in override else ()
    sentence = refuse("CheckpointError", override, *more, "train.steps=20", resume="auto")
    assert said in sentence
    assert sentence.startswith("step-000009 was saved ")
    assert "without --resume" in sentence or "without resume" in sentence


def test_a_checkpoint_of_another_corpus_is_refused(finished: Path, refuse: Refuse, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    write_corpus(tmp_path / "corpus.jsonl", seed=1)
    assert "corpus" in refuse("CheckpointError", "train.steps=20", resume="auto")


def test_a_truncated_checkpoint_is_refused(finished: Path, refuse: Refuse, tmp_path: Path) -> None:
    run = stop_at(finished, tmp_path, 4)
    part = run / "checkpoints" / "step-000004" / "__2_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    sentence = refuse("CheckpointError", resume="auto")
    assert "__2_0.distcp has" in sentence
    assert "were saved" in sentence


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("nowhere", "--resume is nowhere, but there is nothing there"),
        ("corpus.jsonl", "it holds no whole checkpoint"),
    ],
)
def test_a_place_without_a_checkpoint_is_refused(refuse: Refuse, tmp_path: Path, resume: str, said: str) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    assert said in refuse("CheckpointError", resume=resume)


def test_auto_begins_a_run_where_there_is_none_and_where_the_latest_has_no_checkpoint(
    train: Train, tmp_path: Path
) -> None:
    for number in (1, 2):
        train("train.steps=2", "train.export=false", "train.checkpoint_every=null", resume="auto")
        assert len(losses(tmp_path / "runs" / f"tiny-{number}")) == 2
        shutil.rmtree(tmp_path / "runs" / f"tiny-{number}" / "checkpoints")


@pytest.mark.parametrize("where", ["corpus.jsonl/runs", "corpus.jsonl"])
def test_a_place_where_no_run_can_be_written_is_refused(refuse: Refuse, tmp_path: Path, where: str) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    assert f"runs_dir is '{where}', but no folder can be made there" in refuse("ConfigError", f"runs_dir={where}")


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_its_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    config = tiny("train.learning_rate=1e30", "train.max_grad_norm=null")
    outcomes = pool.run(train_rank, tmp_path, config, None, ranks=4)
    [refusal] = set(outcomes)
    assert refusal is not None
    assert refusal.kind == "NumericsError"
    assert refusal.said_once
    assert "of step 2 is nan, but it must be finite; no weight was changed by this step" in refusal.sentence
    assert re.search(
        r"; first seen on rank \d in microbatch 1, in .*; its inputs are in runs/tiny-1/nan-000002-\d.saf",
        (refusal.sentence),
    )
    assert [path.name for path in (tmp_path / "runs" / "tiny-1" / "checkpoints").iterdir()] == ["step-000001"]


def train_poisoned(rank: int, num_ranks: int, folder: Path, config: RunConfig, where: str) -> Refusal | None:
    """Rank 2's layer 1 gives numbers that are none in step 3, which has two microbatches."""

    def build(*args: Any, **kwargs: Any) -> Executor:
        executor = build_executor(*args, **kwargs)

        def poison(module: nn.Module, arguments: Any, hidden: Tensor) -> Tensor | None:
            if rank != 2 or executor.place.step != 3 or executor.place.microbatch != 1:
                return None
            if where == "forward":
                return hidden * torch.nan
            hidden.register_hook(lambda gradient: gradient * torch.nan)
            return None

        decoder_layers(executor.root)[1].register_forward_hook(poison)
        return executor

    with patch.object(trainer, "build_executor", build):
        return train_rank(rank, num_ranks, folder, config, None)


@pytest.mark.parametrize(
    ("where", "said", "router_loss"),
    [
        ("forward", "the output of layer 1", "off"),
        ("backward", "the gradient of layer 1's output", "off"),
        ("forward", "the output of layer 1", "counting_pass"),  # whose counts spoil the first microbatch, too
    ],
)
def test_the_first_number_that_is_none_is_named_by_rank_microbatch_and_layer(
    pool: RankPool, tmp_path: Path, where: str, said: str, router_loss: str
) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    more = (f"train.router_loss={router_loss}", "train.router_loss_coefficient=0.1")
    config = tiny("planner.max_tokens_per_rank=38", "train.checkpoint_every=null", *more)
    [refusal] = set(pool.run(train_poisoned, tmp_path, config, where, ranks=4))
    assert refusal is not None
    assert refusal.kind == "NumericsError"
    path = "runs/tiny-1/nan-000003-2.safetensors"
    assert refusal.sentence.endswith(f"; first seen on rank 2 in microbatch 2, in {said}; its inputs are in {path}")
    saved = safetensors.torch.load_file(tmp_path / path)
    assert {"ids", "positions", "targets", "weights"} <= saved.keys()
    if where == "forward":
        assert saved["layer_input"].shape == (1, len(saved["ids"]), 32)


def test_numbers_that_are_none_only_with_the_routers_loss_are_found_when_the_step_is_run_again(
    pool: RankPool, tmp_path: Path
) -> None:
    """Its coefficient overflows float32: without it every number of the step is finite."""
    write_corpus(tmp_path / "corpus.jsonl")
    config = tiny(
        "train.router_loss=counting_pass", "train.router_loss_coefficient=1e39", "planner.max_tokens_per_rank=100"
    )
    [refusal] = set(pool.run(train_rank, tmp_path, config, None, ranks=2))
    assert refusal is not None
    assert refusal.kind == "NumericsError"
    assert re.match(r"the gradient norm of step 1 is (nan|inf), but it must be finite", refusal.sentence)
    assert re.search(r"; first seen on rank \d in microbatch \d, in the gradient of ", refusal.sentence)


# --- What a run is, whatever the ranks -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ("planner.max_tokens_per_rank=200",)),
        (2, ("planner.name=static", "planner.degree=2", "planner.max_tokens_per_rank=80")),
        (3, ()),
        (4, ("planner.name=static", "planner.max_tokens_per_rank=null")),
        (4, ("planner.name=basp",)),
        (4, ("planner.name=flexsp", "cluster.profile=h100", "cluster.memory_per_rank=16GiB")),
        (4, ("train.recompute=false", "planner.max_tokens_per_rank=null")),
        (4, ("planner.name=static", "planner.degree=4")),
    ],
)
def test_steps_samples_and_losses_do_not_depend_on_ranks_or_planner(
    finished: Path, train: Train, tmp_path: Path, ranks: int, overrides: tuple[str, ...]
) -> None:
    """G9, G30."""
    train(f"cluster.ranks={ranks}", *overrides, ranks=ranks)
    ours, straight = tmp_path / "runs" / "tiny-1", finished / "runs" / "tiny-1"
    assert [plan.batch for plan in read_plans(ours)] == [plan.batch for plan in read_plans(straight)]
    assert losses(ours) == pytest.approx(losses(straight), abs=ROUNDING)


def turns_of_a_step(plan: Plan, rank: int, num_layers: int, *, streaming: bool) -> list[tuple[object, ...]]:
    """(microbatch, layer, pass, level, turn) in the order in which a rank must take them."""
    found: list[tuple[object, ...]] = []
    for number, microbatch in enumerate(plan.microbatches):
        passes = [(layer, Pass.FORWARD) for layer in range(num_layers)]
        for layer in reversed(range(num_layers)):
            recomputed = layer < num_layers - microbatch.num_kept_layers
            passes += [(layer, which) for which in (Pass.RECOMPUTE, Pass.BACKWARD)[not recomputed :]]
        for layer, which in passes:
            turns = make_schedule(plan, streaming=streaming).turns(number, rank, which)
            found += [(number, layer, which, turn.level, turn.number) for turn in turns]
    return found


@pytest.mark.parametrize("streaming", [True, False])
def test_traced_steps_hold_the_turns_of_the_schedule_and_merge_with_the_estimate(
    finished: Path, train: Train, tmp_path: Path, streaming: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recompute = "auto" if streaming else "true"
    train(f"planner.streaming={json.dumps(streaming)}", "train.trace_steps=[2, 3]", f"train.recompute={recompute}")
    run, straight = tmp_path / "runs" / "tiny-1", finished / "runs" / "tiny-1"
    assert losses(run) == pytest.approx(losses(straight), abs=ROUNDING)
    plans = read_plans(run)
    for rank in range(4):
        lines = read_lines(run / "trace" / f"rank-{rank:05d}.jsonl")
        assert {line["step"] for line in lines} == {2, 3}
        for step in (2, 3):
            turns = [TimedTurn.from_json(line) for line in lines if line["step"] == step]
            taken = [(t.microbatch, t.layer, t.which, t.level, t.number) for t in turns]
            assert taken == turns_of_a_step(plans[step - 1], rank, 2, streaming=streaming)
            instants = [instant for t in turns for instant in (t.began_s, t.arrived_s, t.ended_s)]
            assert instants == sorted(instants)
            assert instants[0] > 0
    assert all(0 <= record["exposed"] < 1 for record in read_lines(run / "metrics.jsonl"))
    capsys.readouterr()
    trace_run(run, step=3, out=None)
    assert capsys.readouterr().out.startswith("step 3 on 4 ranks: ")
    events = json.loads((run / "trace" / "step-000003.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {rank}, {kind}" for rank in range(4) for kind in ("measured", "estimated")
    }
    with pytest.raises(ConfigError, match=r"--step is 7, but the traced steps of .* are: 2, 3; take one of them"):
        trace_run(run, step=7, out=None)
    with pytest.raises(ConfigError, match=r"has no traced step: .*task.json is missing; train with train.trace_steps"):
        trace_run(straight, step=None, out=None)


def test_each_sample_is_taken_once_an_epoch_and_the_last_short_batch_is_kept(train: Train, tmp_path: Path) -> None:
    """F3, G2: twelve samples, five a step, two epochs."""
    train("data.tokens_per_step=null", "data.sequences_per_step=5", "train.steps=null", "train.epochs=2")
    records = read_lines(tmp_path / "runs" / "tiny-1" / "metrics.jsonl")
    assert [(record["epoch"], record["num_sequences"]) for record in records] == [
        (0, 5), (0, 5), (0, 2), (1, 5), (1, 5), (1, 2),
    ]  # fmt: skip
    taken: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for record, plan in zip(records, read_plans(tmp_path / "runs" / "tiny-1"), strict=True):
        taken[record["epoch"]].update(plan.batch.ids)
    assert taken[0] == taken[1] == Counter(range(12))


def test_a_batch_without_a_target_changes_nothing_and_is_told(train: Train, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", [1, 1, 1])
    train("train.steps=2", "train.export=false")
    records = read_lines(tmp_path / "runs" / "tiny-1" / "metrics.jsonl")
    assert [(record["loss"], record["grad_norm"], record["num_targets"]) for record in records] == [(None, None, 0)] * 2


def test_the_settings_in_the_run_folder_are_those_of_the_run(finished: Path) -> None:
    written = load_config(finished / "runs" / "tiny-1" / "config.yaml")
    decided = ("cluster.profile=cpu", f"cluster.memory_per_rank={written.cluster.memory_per_rank}")
    assert written == tiny(*decided)


def test_a_resumed_run_keeps_the_limits_that_it_began_with(finished: Path, train: Train, tmp_path: Path) -> None:
    """What is free now is not what was free then, and must not change plans."""
    run = stop_at(finished, tmp_path, 8)
    before = load_config(run / "config.yaml").cluster
    train(resume="auto")
    assert load_config(run / "config.yaml").cluster == before


def test_a_limit_that_is_set_counts_when_a_run_is_resumed(finished: Path, train: Train, tmp_path: Path) -> None:
    run = stop_at(finished, tmp_path, 8)
    train("cluster.memory_per_rank=1GiB", resume="auto")
    assert load_config(run / "config.yaml").cluster.memory_per_rank == 2**30


def test_a_memory_limit_that_the_model_does_not_keep_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    sentence = refuse("InfeasibleError", "cluster.memory_per_rank=500MiB")
    assert re.match(r"the model needs 5\d\d\.\d MiB on each of 4 ranks before any token", sentence)


def test_a_profile_that_is_not_there_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    assert refuse("ConfigError", "cluster.profile=h1000").startswith("the cost profile is 'h1000', but the presets are")
