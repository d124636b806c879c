"""Every kind of sharding gives the gradients of one process, and weights from files are those of `from_pretrained`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nestsp.cluster import GroupTree
from nestsp.errors import ConfigError, ModelError
from nestsp.execute.verify import Gradients, compare_gradients, full_gradients, reference_gradients
from nestsp.model.adapter import build_model, model_config
from nestsp.model.load import empty_model, fill_parameters, find_sources
from nestsp.model.root import LossRoot
from nestsp.train.parallelize import make_mesh, shard_root
from nestsp.train.update import update
from tests.distributed.equivalence import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TOLERANCE,
    Case,
    load,
    make_executor,
    make_model,
    make_tokens,
    make_tree_links,
    small_config,
)
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

TIED = {**LLAMA, "tie_word_embeddings": True}


def compare_shardings(rank: int, num_ranks: int, cases: Sequence[Case], shards: Sequence[int]) -> list[Any]:
    """For each case and number of shards: the comparison with one process, and the norm that the update returns."""
    plan = cases[0].made
    links, tokens = make_tree_links(plan, rank), make_tokens(plan)
    outcomes = []
    for case in cases:
        if rank == 0:
            alone = make_model(case.keys, "sdpa", trainable=case.trainable)
            reference = replace(reference_gradients(alone, tokens), experts={})
        for num_shards in shards:
            executor = make_executor(case, rank, links=links, num_shards=num_shards)
            total = executor.run(load(executor, plan, tokens))
            dist.all_reduce(total)
            planned = Gradients(total.item(), full_gradients(executor.root, keep=rank == 0), {})
            norm = update(
                executor.root,
                torch.optim.SGD(executor.root.parameters(), lr=0.0),
                total_weight=1.0,
                max_grad_norm=None,
                lr=0.0,
            )
            if rank == 0:
                outcomes.append((compare_gradients(planned, reference, 1), norm))
    return outcomes


@pytest.mark.parametrize("tree", [(2, 2), (3, 2)], ids=["4", "6"])
def test_A8_F13_no_sharding_changes_gradients_or_their_norm(pool: RankPool, tree: tuple[int, ...]) -> None:
    ranks = GroupTree(tree).num_ranks
    plan = nested_plan(GroupTree(tree), keep="output").to_json()
    cases = [Case(keys, plan) for keys in (TIED, QWEN3_MOE)] + [Case(LLAMA, plan, trainable=("q_proj", "norm"))]
    shards = [1, 2, ranks]  # none, hsdp, fsdp
    outcomes = pool.run(compare_shardings, cases, shards, ranks=ranks, timeout_s=120.0)[0]
    assert len(outcomes) == len(cases) * len(shards)
    for verification, norm in outcomes:
        assert verification.passes(TOLERANCE), verification
        assert norm == pytest.approx(verification.reference_norm, rel=TOLERANCE)


def count_collectives(rank: int, num_ranks: int, case: Case, num_shards: int) -> Counter[str]:
    plan = case.made
    executor = make_executor(case, rank, num_shards=num_shards)
    counts: Counter[str] = Counter()

    @contextmanager
    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        with patch.object(dist, name, call):
            yield

    with counted("all_reduce"), counted("reduce_scatter_single"):
        executor.run(load(executor, plan, make_tokens(plan)))
    return counts


def test_A17_replicas_add_up_once_a_step_and_shards_once_a_microbatch(pool: RankPool) -> None:
    plan = nested_plan(GroupTree((2, 2)))
    units, microbatches = 3 + 1, len(plan.microbatches)
    assert microbatches == 3
    case = Case(LLAMA, plan.to_json())
    found = {shards: pool.run(count_collectives, case, shards, ranks=4) for shards in (1, 2, 4)}
    assert found[4] == [Counter(reduce_scatter_single=units * microbatches)] * 4
    assert found[2] == [Counter(reduce_scatter_single=units * microbatches, all_reduce=units)] * 4
    assert found[1] == [Counter(all_reduce=units)] * 4


MODELS = {
    "llama": LLAMA,
    "llama tied": TIED,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
}


# Scaled embeddings, several rotary tables, fused projections, sinks, norms elsewhere.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "num_hidden_layers": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0},
    "granite": {},
    "cohere": {},
    "olmo2": {},
}


def write_model(keys: Mapping[str, Any], folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """A model as it is published: several files with an index, lower precision."""
    given = {key: value for key, value in small_config(keys).items() if value is not None}
    model = build_model(model_config(given), seed=5, attention="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))  # norms are ones and biases zeros until then
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")  # type: ignore[arg-type]


def loaded_shards(rank: int, num_ranks: int, folders: Sequence[Path], num_shards: int) -> list[str]:
    """What differs from `from_pretrained`, as sentences."""
    faults = []
    for folder in folders:
        model = empty_model(model_config(str(folder)))
        sources = find_sources(model, folder)
        root = LossRoot(model, slice_tokens=5)
        mesh = make_mesh("cpu", num_ranks, num_shards)
        shard_root(root, mesh, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        fill_parameters(model, sources, torch.device("cpu"))
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert tied == (model.lm_head.weight is model.model.embed_tokens.weight) == expected.config.tie_word_embeddings
        for kind in ("named_parameters", "named_buffers"):
            ours, theirs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if whole.dtype != theirs[name].dtype or not torch.equal(whole, theirs[name]):
                    faults.append(f"{folder.name}: {name}")
    return faults


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (3, 3), (4, 2)])
def test_weights_from_files_are_bit_equal_to_from_pretrained(
    pool: RankPool, tmp_path: Path, ranks: int, shards: int
) -> None:
    folders = [tmp_path / name for name in MODELS]
    for keys, folder in zip(MODELS.values(), folders, strict=True):
        write_model(keys, folder)
        assert len(list(folder.glob("*.safetensors"))) > 1
    assert pool.run(loaded_shards, folders, shards, ranks=ranks) == [[]] * ranks


def test_every_familys_weights_are_bit_equal_to_from_pretrained(pool: RankPool, tmp_path: Path) -> None:
    folders = []
    for family, more in MORE_FAMILIES.items():
        keys = {"model_type": family, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None, **more}
        folders.append(tmp_path / family)
        write_model(keys, folders[-1])
    assert pool.run(loaded_shards, folders, 2, ranks=2, timeout_s=120.0) == [[]] * 2


def bytes_read(rank: int, num_ranks: int, folder: Path) -> dict[str, int]:
    """Elements that this rank reads of each file tensor."""
    model = empty_model(model_config(str(folder)))
    sources = find_sources(model, folder)
    root = LossRoot(model, slice_tokens=5)
    shard_root(root, make_mesh("cpu", num_ranks, num_ranks), compute_dtype=torch.float32, reduce_dtype=torch.float32)
    read: Counter[str] = Counter()

    class File:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get_tensor(self, key: str) -> torch.Tensor:
            read[key] += self.inner.get_tensor(key).numel()
            return self.inner.get_tensor(key)  # type: ignore[no-any-return]

        def get_slice(self, key: str) -> Any:
            return Slice(key, self.inner.get_slice(key))

    class Slice:
        def __init__(self, key: str, inner: Any) -> None:
            self.key, self.inner = key, inner

        def get_shape(self) -> list[int]:
            return self.inner.get_shape()  # type: ignore[no-any-return]

        def __getitem__(self, rows: Any) -> torch.Tensor:
            read[self.key] += self.inner[rows].numel()
            return self.inner[rows]  # type: ignore[no-any-return]

    watched = {
        name: replace(source, files={key: File(file) for key, file in source.files.items()})
        for name, source in sources.items()
    }
    fill_parameters(model, watched, torch.device("cpu"))
    return read


def test_each_rank_reads_its_own_slices_and_no_others(pool: RankPool, tmp_path: Path) -> None:
    write_model(QWEN3_MOE, tmp_path / "model")
    by_rank = pool.run(bytes_read, tmp_path / "model", ranks=4)
    everything: Counter[str] = Counter()
    for path in (tmp_path / "model").glob("*.safetensors"):
        everything.update({key: tensor.numel() for key, tensor in load_file(path).items()})
    total: Counter[str] = Counter()
    for read in by_rank:
        total.update(read)
    assert total == everything
    assert max(sum(read.values()) for read in by_rank) < 0.4 * sum(everything.values())


def refusal(folder: Path, keys: Mapping[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        find_sources(empty_model(model_config(small_config(keys))), folder)
    return str(caught.value)


def test_files_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(LLAMA, folder)
    tensors = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
    single = tmp_path / "single"
    single.mkdir()

    def write(**changed: torch.Tensor | None) -> None:
        kept = {**tensors, **changed}
        save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, single / "model.safetensors")

    write(**{"model.layers.1.self_attn.q_proj.weight": None})
    assert "lack model.layers.1.self_attn.q_proj.weight, but" in refusal(single, LLAMA)
    write(**{"model.layers.1.self_attn.q_proj.bias": torch.ones(48)})
    assert "have model.layers.1.self_attn.q_proj.bias, but LlamaForCausalLM has no such" in refusal(single, LLAMA)
    write(**{"model.norm.weight": torch.ones(47)})
    assert "have model.norm.weight as [47], but the model's config makes it [48]" in refusal(single, LLAMA)
    write(**{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    assert "have model.norm.weight as I8, but nestsp loads BF16, F16, F32, F64" in refusal(single, LLAMA)
    write(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})  # as older files have it
    assert find_sources(empty_model(model_config(small_config(LLAMA))), single)
    assert "lack lm_head.weight" not in refusal(single, {**LLAMA, "num_hidden_layers": 4})
    (single / "model.safetensors").write_bytes(b"no header")
    assert "model.safetensors cannot be read" in refusal(single, LLAMA)
    (single / "model.safetensors").unlink()
    (single / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "no model.safetensors and no model.safetensors.index.json in it" in refusal(single, LLAMA)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(data))
    assert "names files outside its folder" in refusal(folder, LLAMA)
    write_model(QWEN3_MOE, tmp_path / "moe")
    assert "tensors mlp.experts.*.gate_proj.weight" in refusal(tmp_path / "moe", {**QWEN3_MOE, "num_experts": 5})


def test_shards_that_do_not_divide_the_ranks_are_refused() -> None:
    from nestsp.config import parse_config

    def train(*overrides: str) -> Any:
        text = "model: {config: {model_type: llama}}\ndata: {tokens_per_step: 64}\ntrain: {steps: 3}"
        return parse_config(text, overrides).train

    assert train().num_shards(8, 4) == 8
    assert train("train.sharding=none").num_shards(8, 4) == 1
    assert train("train.sharding=hsdp").num_shards(8, 4) == 4
    assert train("train.sharding=hsdp", "train.shard_size=2").num_shards(8, 4) == 2
    for size in (3, 8, 1):
        with pytest.raises(ConfigError, match=f"hsdp with shards of {size} of 8 ranks"):
            train("train.sharding=hsdp", f"train.shard_size={size}").num_shards(8, 4)
    with pytest.raises(ConfigError, match=r"train\.shard_size is 2, but train\.sharding is fsdp"):
        train("train.shard_size=2")
