"""The exported folder is what Transformers reads: the same parameters, the same logits."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from nestsp.errors import CheckpointError
from nestsp.model.adapter import build_model, model_config
from nestsp.model.root import LossRoot
from nestsp.train.export import export_hugging_face
from nestsp.train.parallelize import shard_root
from tests.distributed.equivalence import LLAMA, QWEN3, QWEN3_MOE, small_config
from tests.distributed.pool import RankPool

MODELS = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3 tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3_moe": QWEN3_MOE,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


def make_root(keys: dict[str, Any], num_ranks: int) -> LossRoot:
    model = build_model(model_config(small_config(keys)), seed=3)
    root = LossRoot(model, slice_tokens=5)
    shard_root(root, init_device_mesh("cpu", (num_ranks,)), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return root


def export(rank: int, num_ranks: int, keys: dict[str, Any], folder: Path, tokenizer: Path | None) -> str:
    root = make_root(keys, num_ranks)
    config = root.model.config
    before = config.to_dict()
    control = dist.group.WORLD
    assert control is not None
    try:
        export_hugging_face(root, config, folder, rank=rank, control_group=control, tokenizer=tokenizer)
    except CheckpointError as error:
        return str(error)
    finally:
        assert config.to_dict() == before
        assert config._attn_implementation == "nestsp"
    return ""


def reference(keys: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    model = build_model(model_config(small_config(keys)), seed=3, attention="sdpa").eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return model.state_dict(), model(IDS).logits


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_from_pretrained_gives_the_same_parameters_and_logits(
    pool: RankPool, tmp_path: Path, keys: dict[str, Any]
) -> None:
    folder = tmp_path / "export"
    assert pool.run(export, keys, folder, None, ranks=3) == [""] * 3
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]
    parameters, logits = reference(keys)
    loaded = model.state_dict()
    assert loaded.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], parameter), name
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    tied = keys.get("tie_word_embeddings", False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_files_are_those_of_published_models(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    pool.run(export, QWEN3_MOE, folder, None, ranks=2)
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names  # one tensor an expert, as Qwen publishes them
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["dtype"] == "float32"
    assert "nestsp" not in (folder / "config.json").read_text()


def test_the_tokenizers_files_come_along_and_a_later_export_replaces_the_first(pool: RankPool, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "model.safetensors").write_text("not to be copied")
    folder = tmp_path / "export"
    assert pool.run(export, LLAMA, folder, None, ranks=1) == [""]
    assert pool.run(export, LLAMA, folder, tokenizer, ranks=1) == [""]
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert load_file(folder / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "tokenizer"]


def test_what_is_no_export_is_not_replaced(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter-1").write_text("dear to someone")
    texts = pool.run(export, LLAMA, folder, None, ranks=2)
    assert set(texts) == {
        f"rank 0: {folder} is there and is no exported model, but an export would replace it; give another folder"
    }
    assert [path.name for path in folder.iterdir()] == ["chapter-1"]


def test_a_folder_without_tokenizer_files_is_an_error_and_leaves_nothing(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(export, LLAMA, tmp_path / "export", tmp_path, ranks=2)
    assert len(set(texts)) == 1
    assert "has no tokenizer file" in texts[0]
    assert list(tmp_path.iterdir()) == []


def export_on_a_full_disk(rank: int, num_ranks: int, folder: Path) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        return export(rank, num_ranks, LLAMA, folder, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_on_all_ranks_and_keeps_the_earlier_export(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    assert pool.run(export, LLAMA, folder, None, ranks=2) == ["", ""]
    before = (folder / "model.safetensors").read_bytes()
    texts = pool.run(export_on_a_full_disk, folder, ranks=2)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank 0: {folder} could not be exported: ")
    assert "\n" not in texts[0]
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
