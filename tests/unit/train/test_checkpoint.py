"""Finding and judging checkpoints, and what makes a folder whole; no ranks needed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from nestsp.data.stream import DataState
from nestsp.errors import CheckpointError
from nestsp.train.checkpoint import remove_old_checkpoints
from nestsp.train.folders import prepare_folder, publish_folder
from nestsp.train.manifest import (
    Manifest,
    Progress,
    RunIdentity,
    find_checkpoint,
    manifest_json,
    model_digest,
    read_manifest,
    validate_checkpoint,
)

IDENTITY = RunIdentity("0123456789", "abcdef0123", "books", "tiny")


def make_checkpoint(path: Path, step: int, identity: RunIdentity = IDENTITY) -> Path:
    path.mkdir(parents=True)
    content = b"weights"
    (path / "__0_0.distcp").write_bytes(content)
    manifest = Manifest(step, 1, identity, (("__0_0.distcp", len(content), zlib.crc32(content)),))
    (path / "manifest.json").write_text(json.dumps(manifest_json(manifest)))
    return path


# --- Which checkpoint ---------------------------------------------------------------------------


def test_a_run_folder_means_its_latest_checkpoint_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 12):
        make_checkpoint(tmp_path / "checkpoints" / f"step-{step:06d}", step)
    assert find_checkpoint(tmp_path).name == "step-1000000"


def test_a_checkpoint_folder_means_itself_whatever_its_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "the best one", 3)
    assert find_checkpoint(path) == path


def test_incomplete_and_half_written_ones_are_passed_over(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "checkpoints" / "step-000003", 3)
    make_checkpoint(tmp_path / "checkpoints" / ".saving-step-000006", 6)
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    assert find_checkpoint(tmp_path) == whole


def test_one_whose_replacement_was_cut_short_is_found_and_put_back_by_the_next_save(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step-000006"
    make_checkpoint(tmp_path / "checkpoints" / "step-000003", 3)
    aside = make_checkpoint(target.with_name(".replaced-step-000006"), 6)
    assert find_checkpoint(tmp_path) == aside
    prepare_folder(target)
    assert find_checkpoint(tmp_path) == target


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("nowhere", "nowhere, but there is no such folder"),
        ("empty", "it holds no whole checkpoint"),
        ("empty/file", "it holds no whole checkpoint"),
        ("step-000001", "has no manifest.json, so it is no whole checkpoint"),
        (".saving-step-000002", "is left over from a save that did not end"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_sentence(tmp_path: Path, where: str, sentence: str) -> None:
    for name in ("empty", "step-000001", ".saving-step-000002"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path / where)
    assert sentence in str(caught.value)
    assert str(tmp_path / where) in str(caught.value)


# --- Whose checkpoint ---------------------------------------------------------------------------


def test_the_manifest_says_what_was_saved(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step-000003", 3)
    manifest = validate_checkpoint(path, IDENTITY)
    assert manifest == read_manifest(path)
    assert (manifest.step, manifest.num_ranks, manifest.identity) == (3, 1, IDENTITY)


def test_names_do_not_decide(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step-000003", 3)
    validate_checkpoint(path, RunIdentity(IDENTITY.corpus, IDENTITY.model, "moved", "renamed"))


def test_another_corpus_or_model_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step-001200", 1200)
    with pytest.raises(CheckpointError) as caught:
        validate_checkpoint(path, RunIdentity("9999", IDENTITY.model, "code", "tiny"))
    assert str(caught.value) == (
        "step-001200 was saved from corpus 'books' (digest 01234567), but this run reads 'code' (digest 9999); go back "
        "to the corpus, tokenizer and limits it was saved with, or start anew without resume"
    )
    with pytest.raises(CheckpointError, match=r"saved from model 'tiny' .*, but this run trains with digest 77;"):
        validate_checkpoint(path, RunIdentity(IDENTITY.corpus, "77"))


@pytest.mark.parametrize("position", range(0, 260, 7))
def test_no_changed_byte_of_a_manifest_passes(tmp_path: Path, position: int) -> None:
    path = make_checkpoint(tmp_path / "step-000003", 3)
    content = bytearray((path / "manifest.json").read_bytes())
    content[position % len(content)] ^= 1
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_manifest(path)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"format": 1}', '{"format": 1, "files": {"a": 3}}', "\x00"])
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    path = make_checkpoint(tmp_path / "step-000003", 3)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_manifest(path)


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step-000003", 3)
    manifest = Manifest(3, 1, IDENTITY, (("../outside", 1, 1),))
    (path / "manifest.json").write_text(json.dumps(manifest_json(manifest)))
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(path)


# --- The same model -----------------------------------------------------------------------------


def digest(**keys: Any) -> str:
    return model_digest(LlamaConfig(**{"hidden_size": 64, "num_attention_heads": 4, **keys}))


def test_the_model_digest_sees_mathematics_and_sizes() -> None:
    others: list[dict[str, Any]] = [
        {"hidden_size": 128},
        {"num_hidden_layers": 3},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"pad_token_id": 0},
    ]
    digests = {digest(), *(digest(**keys) for keys in others)}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "bfloat16"},
        {"use_cache": False},
        {"name_or_path": "elsewhere"},
        {"attn_implementation": "eager"},
        {"architectures": ["LlamaForCausalLM"]},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    ],
)
def test_the_model_digest_does_not_see_how_and_where(keys: dict[str, Any]) -> None:
    assert digest(**keys) == digest()


# --- Values and folders -------------------------------------------------------------------------


def test_progress_goes_through_json_unchanged() -> None:
    progress = Progress(7, DataState(2, 5), {"data.seed": 3, "data.tokens_per_step": None})
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


@pytest.mark.parametrize("data", [None, [], {}, {"step": "7", "data": {"epoch": 0, "position": 0}, "settings": {}}])
def test_progress_of_another_shape_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"progress.json"):
        Progress.from_json(data)


def test_a_folder_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    saving = prepare_folder(target)
    (saving / "one").touch()
    assert not target.exists()
    publish_folder(saving, target)
    saving = prepare_folder(target)
    (saving / "two").touch()
    assert [path.name for path in target.iterdir()] == ["one"]
    publish_folder(saving, target)
    assert [path.name for path in target.iterdir()] == ["two"]
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (prepare_folder(target) / "half").touch()
    assert list(prepare_folder(target).iterdir()) == []


def test_the_last_checkpoints_are_kept_and_one_whose_removal_is_cut_short_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (9, 10, 1_000_000):
        make_checkpoint(folder / f"step-{step:06d}", step)
    remove_old_checkpoints(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000010", "step-1000000"]
    (folder / "step-1000000").rename(folder / ".old-step-1000000")
    assert find_checkpoint(tmp_path).name == "step-000010"
    with pytest.raises(CheckpointError, match="left over from a save that did not end"):
        find_checkpoint(folder / ".old-step-1000000")
