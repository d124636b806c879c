"""Adapters by PEFT: gradients of one process, a frozen model, and exports that PEFT and Transformers read."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nestsp.cli.export import export_checkpoint
from nestsp.cluster import Cluster, GroupTree
from nestsp.config import LoraConfig, RunConfig
from nestsp.errors import ModelError
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import Gradients, Verification, compare_gradients, full_gradients, reference_gradients
from nestsp.model.adapter import model_config
from nestsp.model.compiled import install_compiler
from nestsp.model.derive import model_shape
from nestsp.model.lora import add_adapters, draw_adapters
from nestsp.model.root import LossRoot
from nestsp.train import verify
from nestsp.train.launch import EXIT_SAID
from nestsp.train.parallelize import make_mesh, shard_root
from nestsp.train.world import World
from tests.distributed.equivalence import (
    CPU,
    LLAMA,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    CountingKernel,
    load,
    make_model,
    make_tokens,
    make_tree_links,
    small_config,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan
from tests.distributed.test_trainer import stop_at, working_in
from tests.distributed.test_training_options import train
from tests.e2e.runs import losses, tiny

peft = pytest.importorskip("peft", reason="PEFT is an extra: nestsp[lora]")

TARGETS = {"all linear layers": None, "keys and outputs": ("k_proj", "o_proj")}
IDS = torch.arange(11)[None]


def with_adapters(case: Case, attention: str, lora: LoraConfig) -> nn.Module:
    model = make_model(case.keys, attention)
    add_adapters(model, lora)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return model


def run_adapters(rank: int, num_ranks: int, cases: Sequence[Case], loras: Sequence[LoraConfig]) -> list[Verification]:
    outcomes = []
    for case, lora in zip(cases, loras, strict=True):
        plan = case.made
        tokens = make_tokens(plan)
        model = with_adapters(case, "nestsp", lora)
        if case.compiler is not None:
            install_compiler(model, case.compiler)
        install_layer_runner(model)
        root = LossRoot(model, slice_tokens=5)  # type: ignore[arg-type]
        mesh = make_mesh("cpu", num_ranks, num_ranks)
        shard_root(root, mesh, compute_dtype=torch.float64, reduce_dtype=torch.float64)
        shape = model_shape(model_config(small_config(case.keys)))
        links = make_tree_links(plan, rank)
        executor = Executor(root, shape, links, rank, CPU, CountingKernel(), AttentionTimer(CPU))
        total = executor.run(load(executor, plan, tokens))
        dist.all_reduce(total)
        planned = Gradients(total.item(), full_gradients(root, keep=rank == 0), {})
        if rank == 0:
            expected = reference_gradients(with_adapters(case, "sdpa", lora), tokens)
            trained = [name for name, grad in expected.by_parameter.items() if grad is not None]
            assert trained
            assert all(".lora_" in name for name in trained)
            outcomes.append(compare_gradients(planned, Gradients(expected.loss_sum, expected.by_parameter, {}), 1))
    return outcomes


def test_adapters_have_the_gradients_of_one_process(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2, 2)), keep="output").to_json()
    cases = [Case({**LLAMA, "tie_word_embeddings": True}, plan), Case(QWEN3_MOE, plan, recompute=False)]
    loras = [LoraConfig(rank=3, alpha=5.0, targets=targets) for targets in TARGETS.values()]
    outcomes = pool.run(run_adapters, cases, loras, ranks=4)[0]
    assert len(outcomes) == 2
    for verification in outcomes:
        assert verification.passes(TOLERANCE), verification


def test_initial_adapters_change_nothing_and_do_not_depend_on_the_ranks(pool: RankPool) -> None:
    whole = pool.run(drawn, ranks=1)[0]
    assert pool.run(drawn, ranks=3) == [whole] * 3


def drawn(rank: int, num_ranks: int) -> dict[str, list[float]]:
    model = make_model(LLAMA, "nestsp", dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=3))  # type: ignore[arg-type]
    root = LossRoot(model, slice_tokens=5)  # type: ignore[arg-type]
    mesh = make_mesh("cpu", num_ranks, num_ranks)
    shard_root(root, mesh, compute_dtype=torch.float32, reduce_dtype=torch.float32)
    draw_adapters(model, seed=7)
    values = {
        name: parameter.full_tensor().flatten().tolist()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    for name, numbers in values.items():
        assert any(numbers) == (".lora_A." in name)
    assert len({tuple(numbers) for numbers in values.values() if any(numbers)}) == len(values) // 2
    return values


def verify_rank(rank: int, num_ranks: int, folder: Path, config: RunConfig, broken: bool) -> tuple[int, str]:
    """``nestsp verify`` on one rank of the pool: its exit code, and what it prints."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    world = World(rank, rank, Cluster(1, num_ranks), CPU, "gloo", control)

    def other(model: nn.Module, seed: int, **kwargs: Any) -> None:
        """The planned step's adapters are those of another seed; only rank 0 has the reference, which comes later."""
        draw_adapters(model, seed + (isinstance(next(model.parameters()), DTensor)), **kwargs)

    out = io.StringIO()
    with (
        working_in(folder),
        contextlib.redirect_stdout(out),
        patch.object(verify, "join_world", lambda _: world),
        patch.object(verify, "draw_adapters", other if broken else draw_adapters),
    ):
        code = verify.verify(config, 200)
    dist.destroy_process_group(control)
    return code, out.getvalue()


def test_verify_compares_both_factors_of_adapters_and_leaves_out_what_is_frozen(pool: RankPool, tmp_path: Path) -> None:
    base = train(pool, tmp_path / "base", "train.steps=1", "train.checkpoint_every=null") / "hf"
    given = ("model.config=null", f"model.path={base}")
    for more in ((), given):
        config = tiny(*more, "train.lora={rank: 3}", "cluster.ranks=2", "planner.max_tokens_per_rank=100")
        [(code, out), (other, _)] = pool.run(verify_rank, tmp_path / "base", config, False, ranks=2)
        assert code == other == 0, out
        assert re.search(r"^equal: largest error \d\.\de-1\d, tolerance 1e-09$", out, re.M)
        rows = re.findall(r"^gradients of (\S+) +(\d+) +(\S+)$", out, re.M)
        assert [row[:2] for row in rows] == [
            (f"self_attn.{part}_proj.lora_{factor}.default", "2") for part in "qkvo" for factor in "AB"
        ]
        assert "0.0e+00" not in [error for _, _, error in rows], "a gradient of zeros shows nothing"
    [(code, out), _] = pool.run(verify_rank, tmp_path / "base", config, True, ranks=2)
    assert code == EXIT_SAID
    assert re.search(r"^DIFFERENT: largest error ", out, re.M)


# PEFT 0.21 asks for it by its older name when it reads an adapter.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_run_with_adapters_exports_both_forms_leaves_the_model_alone_and_resumes(
    pool: RankPool, tmp_path: Path
) -> None:
    base = train(pool, tmp_path / "base", "train.steps=1", "train.checkpoint_every=null") / "hf"
    given = ("model.config=null", f"model.path={base}", "train.steps=4")
    more = (*given, "train.lora={rank: 3}", "train.learning_rate=0.05")
    run = train(pool, tmp_path / "straight", *more)
    assert losses(run)[-1] < losses(run)[0]
    merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    frozen = dict(plain.named_parameters())
    for name, parameter in merged.named_parameters():
        is_target = name.endswith("_proj.weight") and ".experts." not in name
        assert torch.equal(parameter, frozen[name]) != is_target, name
    adapted = peft.PeftModel.from_pretrained(plain, str(run / "adapter"))
    assert len(load_file(run / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 4
    with torch.no_grad():
        assert torch.allclose(adapted(IDS).logits, merged(IDS).logits, atol=1e-5)
    export_checkpoint(run, tmp_path / "exported", "float32", None)
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()
    stopped = stop_at(tmp_path / "straight", tmp_path / "stopped", 2)
    train(pool, tmp_path / "stopped", *more, resume="auto")
    assert losses(stopped) == losses(run)
    assert (stopped / "hf" / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ModelError, match=r"train\.lora\.targets is \('query',\), but PEFT refuses it for LlamaFor"):
        add_adapters(make_model(LLAMA, "sdpa"), LoraConfig(targets=("query",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "target", "place"),
    [
        (LLAMA, "lm_head", "lm_head"),
        (LLAMA, "embed_tokens", "model.embed_tokens"),
        (QWEN3_MOE, "gate_proj,up_proj", "model.layers.0.mlp.experts"),
    ],
)
def test_adapters_of_what_is_no_linear_layer_are_refused(keys: dict[str, object], target: str, place: str) -> None:
    with pytest.raises(ModelError, match=rf"which gives {place} an adapter, but nestsp trains"):
        add_adapters(make_model(keys, "sdpa"), LoraConfig(targets=tuple(target.split(","))))  # type: ignore[arg-type]
