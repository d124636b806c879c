"""``nestsp train`` as a user starts it: what it shows, what it writes, and that it is right."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from nestsp.config import load_config
from nestsp.data.samples import SampleTable, open_samples
from nestsp.model.adapter import build_model, model_config
from nestsp.plan import Plan
from tests.e2e.commands import NESTSP, TIMEOUT_S, TORCHRUN, Finished, environment, refusal, run, started
from tests.e2e.runs import contents, losses, read_lines, read_plans, tiny, write_run

# Every order of adding up is another rounding; float32 losses near 5.5 after a few steps.
ROUNDING = 2e-5
TWO_RANKS = ("--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100")
KEYS = {
    "step", "epoch", "loss", "lr", "grad_norm", "num_sequences", "num_tokens", "num_targets", "tokens_per_s",
    "tokens_per_s_per_rank", "flops_per_s_per_rank", "mfu", "save_s", "load_s", "peak_memory_bytes",
    "peak_memory_rank", "fragmented_bytes", "step_s",
    "estimated_s", "makespan_s", "gap_to_bound", "planning_s", "attention_s", "exposed", "wait_s",
    "imbalance", "num_microbatches", "num_sequences_by_degree", "router_loss",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run of four ranks."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, "train.steps=6", "train.checkpoint_every=null")
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Finished:
    """F6: the real command with the real loader, four ranks, twelve lines."""
    return run(folder, "train", "tiny.yaml")


@pytest.fixture(scope="module")
def first_run(folder: Path, finished: Finished) -> Path:
    assert finished.code == 0, finished.err
    return folder / "runs" / "tiny-1"


def test_a_run_says_what_it_does_in_plain_lines_and_nothing_on_stderr(finished: Finished, first_run: Path) -> None:
    """F6, G10."""
    assert finished.err == ""
    assert "\x1b" not in finished.out
    assert "\r" not in finished.out
    banner, steps, files = finished.out.strip().split("\n\n")
    for line in (
        "probe    2 layers of the model made small, local and hybrid: logits, loss and gradients equal each sequence ",
        "run      runs/tiny-1",
        "4 ranks on 1 host; cpu",
        "qwen3_moe: 2 layers, hidden 32, 4 query / 2 key-value heads of 8, 4 experts (2 a token) in 2 layers;",
        "tree     2x2: degrees 4, 2, 1",
        "planner  nsp",
        "profile  cpu: 2 cores",
        " a rank may use (70% of the ",
        "cap      64 tokens a rank holds in one microbatch, after splitting "
        "(a sequence of 256 fits on all ranks together)",
        "12 samples of 667 tokens from 12 documents",
        "12 samples, at most 200 tokens a step → 5 steps an epoch; this run: 6 steps = 1.20 epochs",
    ):
        assert line in banner
    assert len(steps.splitlines()) == 6
    for number, line in enumerate(steps.splitlines(), start=1):
        assert re.fullmatch(
            rf"step {number}/6  loss \d\.\d{{4}}  lr \S+  grad norm \S+  [\d,]+ tokens/s  [\d.]+ m?s"
            r"(  ?\(estimated [\d.]+ [mµ]?s\))?  imbalance [\d.]+%  exposed [\d.]+%  microbatches \d+"
            r"  sequences by degree( \d:\d+)+",
            line,
        ), line
        assert ("estimated" in line) == (number > 2), "there are rates from two steps on"
    for name in ("metrics.jsonl", "plans.jsonl", "config.yaml", "checkpoints/step-000006", "hf"):
        assert f"runs/tiny-1/{name}" in files
        assert (first_run / name).exists()


def test_metrics_have_every_key_and_count_the_same_as_the_plans(first_run: Path) -> None:
    records = read_lines(first_run / "metrics.jsonl")
    assert all(set(record) == KEYS for record in records)
    assert [record["epoch"] for record in records] == [0, 0, 0, 0, 0, 1]
    plans = read_plans(first_run)
    assert [record["step"] for record in read_lines(first_run / "plans.jsonl")] == [1, 2, 3, 4, 5, 6]
    for record, plan in zip(records, plans, strict=True):
        plan.check(max_tokens_per_rank=64)
        assert record["num_tokens"] == plan.batch.num_tokens == sum(plan.batch.lengths)
        assert record["num_targets"] == plan.batch.num_tokens - plan.batch.num_sequences
        assert record["num_microbatches"] == len(plan.microbatches)
        assert {int(k): v for k, v in record["num_sequences_by_degree"].items()} == plan.num_sequences_by_degree()


def test_an_epoch_takes_each_sample_once_its_last_short_batch_included(first_run: Path) -> None:
    """F3, G2."""
    epoch = [identity for plan in read_plans(first_run)[:5] for identity in plan.batch.ids]
    assert sorted(epoch) == list(range(12))
    assert read_plans(first_run)[4].batch.num_tokens < 200


def mean_loss(model: PreTrainedModel, samples: SampleTable, plan: Plan) -> float:
    """Over all targets of a batch, each sequence alone, in one process."""
    total = 0.0
    with torch.no_grad():
        for identity, length in zip(plan.batch.ids, plan.batch.lengths, strict=True):
            tokens = samples.read(identity, 0, length)
            assert isinstance(tokens, np.ndarray)
            ids = torch.from_numpy(tokens.astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total += F.cross_entropy(logits[:-1].double(), ids[1:], reduction="sum").item()
    return total / (plan.batch.num_tokens - plan.batch.num_sequences)


def test_the_first_loss_is_the_mean_over_all_targets_of_the_batch(
    folder: Path, first_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G30: of the same weights, in one process; sequences differ in length, so no mean of means is near."""
    monkeypatch.chdir(folder)
    config = load_config(first_run / "config.yaml")
    model = build_model(model_config(config.model.source), seed=config.train.seed, attention="sdpa")
    expected = mean_loss(model, open_samples(config.data), read_plans(first_run)[0])
    assert losses(first_run)[0] == pytest.approx(expected, abs=2e-6)


def test_the_export_loads_in_transformers_and_has_learnt(
    folder: Path, first_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config(first_run / "config.yaml")
    samples = open_samples(config.data)
    exported = AutoModelForCausalLM.from_pretrained(first_run / "hf", dtype=torch.float32)
    new = build_model(model_config(config.model.source), seed=config.train.seed, attention="sdpa")
    plan = read_plans(first_run)[0]
    assert mean_loss(exported, samples, plan) < mean_loss(new, samples, plan) - 0.05


def test_the_settings_written_are_those_given_and_what_was_decided(first_run: Path) -> None:
    written = load_config(first_run / "config.yaml")
    decided = ("cluster.profile=cpu", f"cluster.memory_per_rank={written.cluster.memory_per_rank}")
    assert written == tiny("train.steps=6", "train.checkpoint_every=null", *decided)


def test_resume_auto_goes_on_in_the_same_folder_from_the_exported_weights(
    folder: Path, first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: the loss of step 7 is that of the weights that were exported after step 6."""
    exported = AutoModelForCausalLM.from_pretrained(first_run / "hf", dtype=torch.float32)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    resumed = tmp_path / "runs" / "tiny-1"
    result = run(tmp_path, "train", "tiny.yaml", *TWO_RANKS, "--set", "train.steps=7", "--resume", "auto")
    assert result.code == 0, result.err
    assert result.err == ""
    assert "runs/tiny-1, from step-000006" in result.out
    assert "going on after step 6" in result.out
    assert losses(resumed)[:6] == losses(first_run)
    monkeypatch.chdir(tmp_path)
    samples = open_samples(load_config(resumed / "config.yaml").data)
    assert losses(resumed)[6] == pytest.approx(mean_loss(exported, samples, read_plans(resumed)[6]), abs=2e-6)


def test_a_truncated_checkpoint_is_not_resumed_and_its_run_stays_as_it_was(
    folder: Path, first_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    [part] = (tmp_path / "runs").glob("tiny-1/checkpoints/step-000006/__3_*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    before = contents(tmp_path / "runs")
    result = run(tmp_path, "train", "tiny.yaml", *TWO_RANKS, "--set", "train.steps=7", "--resume", "runs/tiny-1")
    assert refusal(result).startswith(f"CheckpointError: runs/tiny-1/checkpoints/step-000006/{part.name} has ")
    assert contents(tmp_path / "runs") == before


def test_a_second_start_on_a_terminal_has_a_bar_and_its_own_folder(folder: Path, first_run: Path) -> None:
    before = (first_run / "metrics.jsonl").read_bytes()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*NESTSP, "train", "tiny.yaml", "--set", "train.steps=2", *TWO_RANKS],
        cwd=folder, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the terminal's other side is closed: the command has ended
                break
            if not block:
                break
            shown += block
        assert process.wait(TIMEOUT_S) == 0, shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = shown.decode()
    assert re.search(r"training .*━.* [12]/2 ", text), "a bar"
    assert "runs/tiny-2" in text
    assert (folder / "runs" / "tiny-2" / "config.yaml").exists()
    assert (first_run / "metrics.jsonl").read_bytes() == before


# --- The user's own launcher ---------------------------------------------------------------------


def test_torchrun_on_one_host_gives_the_same_losses(folder: Path, first_run: Path) -> None:
    """G9: other ranks, and the static planner."""
    result = run(
        folder, "--standalone", "--nproc-per-node", "2", "-m", "nestsp", "train", "tiny.yaml",
        "--set", "name=torchrun", "--set", "cluster.ranks=2", "--set", "train.export=false",
        "--set", "planner.name=static", "--set", "planner.max_tokens_per_rank=100",
        program=TORCHRUN,
    )  # fmt: skip
    assert result.code == 0, result.err
    ours = folder / "runs" / "torchrun-1"
    assert [plan.batch for plan in read_plans(ours)] == [plan.batch for plan in read_plans(first_run)]
    assert losses(ours) == pytest.approx(losses(first_run), abs=ROUNDING)


def test_torchrun_on_two_hosts_gives_the_same_losses(folder: Path, first_run: Path) -> None:
    port = free_port()

    def host(number: int) -> list[str]:
        return [
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "tiny", "--local-addr", "localhost",
            "-m", "nestsp", "train", "tiny.yaml", "--set", "name=hosts", "--set", "cluster.ranks=1",
            "--set", "train.export=false", "--set", "planner.max_tokens_per_rank=100",
        ]  # fmt: skip

    with (
        started(folder, *host(0), program=TORCHRUN) as first,
        started(folder, *host(1), program=TORCHRUN) as second,
    ):
        second_out, second_err = second.communicate(timeout=TIMEOUT_S)
        out, err = first.communicate(timeout=TIMEOUT_S)
    assert (first.returncode, second.returncode) == (0, 0), err + second_err
    banners = [text for text in (out, second_out) if text]
    assert len(banners) == 1, "one rank speaks for all hosts"
    assert "2 ranks on 2 hosts" in banners[0]
    assert [path.name for path in (folder / "runs").glob("hosts-*")] == ["hosts-1"]
    assert losses(folder / "runs" / "hosts-1") == pytest.approx(losses(first_run), abs=ROUNDING)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port: int = sock.getsockname()[1]
        return port
