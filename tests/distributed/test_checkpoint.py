"""Saved state: restored bit for bit on any number of ranks, refused in one sentence on all ranks when it cannot be."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.comm.groups import make_links
from nestsp.config import TrainConfig
from nestsp.data.stream import DataState, SampleStream
from nestsp.errors import CheckpointError
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import build_model, model_config
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.train.checkpoint import load_checkpoint, save_checkpoint
from nestsp.train.manifest import (
    Manifest,
    Progress,
    RunIdentity,
    find_checkpoint,
    manifest_json,
    model_digest,
    read_manifest,
)
from nestsp.train.parallelize import shard_root
from nestsp.train.run_state import run_state
from nestsp.train.update import make_optimizer, update
from tests.distributed.equivalence import COMMON, LLAMA, QWEN3, QWEN3_MOE, small_config
from tests.distributed.pool import RankPool

CPU = torch.device("cpu")
# Samples of these lengths, four a step: an epoch is three steps, the last one short.
STREAM = SampleStream(np.array([9, 2, 7, 1, 5, 3, 8, 4, 6, 2], dtype=np.int64), seed=5, sequences_per_step=4)
START = Progress(0, DataState())
CONFIG = TrainConfig(steps=6)


@dataclass(frozen=True, slots=True)
class Trainee:
    """A small model in training, as the trainer would hold it."""

    executor: Executor
    optimizer: torch.optim.AdamW
    tree: GroupTree
    identity: RunIdentity
    control: dist.ProcessGroup

    def train(self, progress: Progress, num_steps: int) -> tuple[Progress, list[tuple[float, tuple[int, ...]]]]:
        """Some steps; also the loss and sample ids of each."""
        seen = []
        for _ in range(num_steps):
            batch, after = STREAM.take(progress.data)
            loss = torch.zeros(())
            plan = plan_of(self.tree, batch)
            plan.check()
            loss += self.executor.run(self.executor.load(plan, read_tokens))
            dist.all_reduce(loss)
            update(self.executor.root, self.optimizer, total_weight=batch.num_tokens, max_grad_norm=1.0, lr=1e-2)
            progress = Progress(progress.step + 1, after, progress.settings)
            seen.append((loss.item(), batch.ids))
        return progress, seen

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, whole."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.executor.root.named_parameters():
            state[name] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = whole(value)
        return state

    def save(self, folder: Path, progress: Progress) -> Path:
        state = run_state(self.executor.root, self.optimizer, progress)
        return save_checkpoint(folder, state, self.identity, control_group=self.control)

    def load(self, path: Path, identity: RunIdentity | None = None) -> Progress:
        return load_checkpoint(
            path,
            self.executor.root,
            self.optimizer,
            identity=identity or self.identity,
            control_group=self.control,
        )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def read_tokens(identity: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(identity).integers(0, COMMON["vocab_size"], 100)[start:stop]


def plan_of(tree: GroupTree, batch: SequenceBatch) -> Plan:
    """The longest sequence on all ranks, the rest dealt over single ranks."""
    longest = max(range(batch.num_sequences), key=lambda p: batch.lengths[p])
    placed: dict[Group, list[int]] = {tree.group(0, 0): [longest]}
    for position in range(batch.num_sequences):
        if position != longest:
            placed.setdefault(tree.group(tree.num_levels - 1, position % tree.num_ranks), []).append(position)
    return Plan.of_groups(tree, batch, [placed], "test")


def make_trainee(rank: int, num_ranks: int, keys: dict[str, Any] = QWEN3_MOE, seed: int = 3) -> Trainee:
    config = model_config(small_config(keys))
    model = build_model(config, seed=seed)
    install_layer_runner(model)
    root = LossRoot(model, slice_tokens=5)
    shard_root(root, init_device_mesh("cpu", (num_ranks,)), compute_dtype=torch.float32, reduce_dtype=torch.float32)
    tree = GroupTree((num_ranks,) if num_ranks > 1 else ())
    links = make_links(tree, rank, CPU, ranks_per_host=num_ranks, timeout=timedelta(seconds=30))
    executor = Executor(root, model_shape(config), links, rank, CPU, CpuFlash(), AttentionTimer(CPU))
    identity = RunIdentity("corpus-digest", model_digest(config), "books", "tiny")
    optimizer = make_optimizer(root, CONFIG, fused=False)
    control = dist.group.WORLD
    assert control is not None
    return Trainee(executor, optimizer, tree, identity, control)


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error) if error.raised_on_all_ranks else f"on this rank alone: {error}"
    return ""


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- Restored -----------------------------------------------------------------------------------


def train_and_save(rank: int, num_ranks: int, folder: Path, keys: dict[str, Any], num_steps: int) -> dict[str, Tensor]:
    trainee = make_trainee(rank, num_ranks, keys)
    progress, _ = trainee.train(START, num_steps)
    trainee.save(folder, progress)
    return trainee.state()


def load_fresh(rank: int, num_ranks: int, folder: Path, keys: dict[str, Any]) -> tuple[Progress, dict[str, Tensor]]:
    trainee = make_trainee(rank, num_ranks, keys, seed=rank + 100)  # other weights, and none alike
    trainee.train(START, 1)  # and an optimizer that has a state to get rid of
    progress = trainee.load(find_checkpoint(folder))
    return progress, trainee.state()


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 4), (4, 2), (2, 3), (1, 4), (3, 1)])
def test_any_number_of_ranks_restores_the_same_bits(
    pool: RankPool, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    saved = pool.run(train_and_save, tmp_path, QWEN3_MOE, 2, ranks=saved_on)[0]
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for progress, loaded in pool.run(load_fresh, tmp_path, QWEN3_MOE, ranks=loaded_on):
        assert progress == Progress(2, STREAM.take(STREAM.take(DataState())[1])[1])
        assert same(saved, loaded)


def test_tied_embeddings_are_restored_and_stay_tied(pool: RankPool, tmp_path: Path) -> None:
    keys = {**LLAMA, "tie_word_embeddings": True}
    saved = pool.run(train_and_save, tmp_path, keys, 1, ranks=2)[0]
    assert not any("lm_head" in name for name in saved)
    assert same(saved, pool.run(load_fresh, tmp_path, keys, ranks=3)[0][1])


def test_a_run_saved_before_its_first_step_has_no_optimizer_state(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(train_and_save, tmp_path, QWEN3, 0, ranks=2)[0]
    assert not any("exp_avg" in name for name in saved)
    assert same(saved, pool.run(load_fresh, tmp_path, QWEN3, ranks=2)[0][1])


def stop_and_go(rank: int, num_ranks: int, folder: Path, stops: tuple[int, ...]) -> tuple[Any, dict[int, Any]]:
    straight = make_trainee(rank, num_ranks)
    _, seen = straight.train(START, 6)
    resumed = {}
    for stop in stops:
        first = make_trainee(rank, num_ranks)
        progress, before = first.train(START, stop)
        path = first.save(folder, progress)
        second = make_trainee(rank, num_ranks, seed=50)
        _, after = second.train(second.load(path), 6 - stop)
        resumed[stop] = (before + after, same(straight.state(), second.state()))
    return seen, resumed


def test_stopping_and_resuming_is_never_having_stopped(pool: RankPool, tmp_path: Path) -> None:
    """Rows G3, G5 and G7 of the shared cases: the same losses and sample ids, also from the first and last step and
    from the middle of the second epoch (step 4), and the same bits in the end."""
    for seen, resumed in pool.run(stop_and_go, tmp_path, (1, 3, 4, 5), ranks=3):
        for stop, (continued, same_bits) in resumed.items():
            assert continued == seen, stop
            assert same_bits, stop


def draw() -> tuple[Any, ...]:
    numbers = (random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal()))
    return (*torch.rand(3).tolist(), *numbers)


def save_and_draw(rank: int, num_ranks: int, folder: Path) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    draw()
    make_trainee(rank, num_ranks, QWEN3).save(folder, START)
    return draw()


def load_and_draw(rank: int, num_ranks: int, folder: Path) -> tuple[Any, ...]:
    make_trainee(rank, num_ranks, QWEN3).load(find_checkpoint(folder))
    return draw()


def test_random_numbers_go_on_where_they_stopped(pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(save_and_draw, tmp_path, ranks=2)
    assert expected[0] != expected[1]
    assert pool.run(load_and_draw, tmp_path, ranks=2) == expected


def test_on_another_number_of_ranks_no_two_draw_the_same_and_each_draws_it_again(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(save_and_draw, tmp_path, ranks=2)
    drawn = pool.run(load_and_draw, tmp_path, ranks=3)
    assert len({numbers[0] for numbers in drawn}) == 3
    assert len({numbers[3] for numbers in drawn}) == 3
    assert pool.run(load_and_draw, tmp_path, ranks=3) == drawn


# --- Refused ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(train_and_save, folder, QWEN3, 1, ranks=2)
    return find_checkpoint(folder)


def try_to_load(rank: int, num_ranks: int, path: Path, other: dict[str, str]) -> str:
    trainee = make_trainee(rank, num_ranks, QWEN3)
    before = trainee.state()
    text = refusal(lambda: trainee.load(path, replace(trainee.identity, **other)))
    if text:
        assert same(before, trainee.state())  # refused before anything was written
    return text


def first_shard(path: Path) -> Path:
    return path / "__1_0.distcp"


def truncate(path: Path) -> None:
    os.truncate(first_shard(path), first_shard(path).stat().st_size - 1)


def remove(path: Path) -> None:
    first_shard(path).unlink()


def flip_a_byte(path: Path) -> None:
    content = bytearray(first_shard(path).read_bytes())
    content[len(content) // 2] ^= 1
    first_shard(path).write_bytes(content)


def flip_a_digit_of_the_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 1', '"step": 2'))


def cut_the_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 40)


def claim_another_format(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 1', '"format": 99'))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "__1_0.distcp has"),
        (remove, "__1_0.distcp cannot be read (No such file"),
        (flip_a_byte, "__1_0.distcp has changed since it was saved"),
        (flip_a_digit_of_the_manifest, "manifest.json is damaged"),
        (cut_the_manifest, "has no readable manifest.json"),
        (claim_another_format, "has format 99, but this nestsp reads format 1"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_on_all_ranks(
    pool: RankPool, saved: Path, tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    path = shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    damage(path)
    texts = pool.run(try_to_load, path, {}, ranks=3)
    assert len(set(texts)) == 1
    assert sentence in texts[0]
    assert "\n" not in texts[0]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"corpus": "another", "corpus_name": "code"},
            "step-000001 was saved from corpus 'books' (digest corpus-d), but",
        ),
        ({"model": "another", "model_name": "big"}, "step-000001 was saved from model 'tiny'"),
    ],
)
def test_a_checkpoint_of_another_corpus_or_model_is_refused_by_name(
    pool: RankPool, saved: Path, other: dict[str, str], sentence: str
) -> None:
    for text in pool.run(try_to_load, saved, other, ranks=2):
        assert text.startswith(sentence)
        assert next(iter(reversed(other.values()))) in text


def try_other_sizes(rank: int, num_ranks: int, path: Path) -> str:
    trainee = make_trainee(rank, num_ranks, {**QWEN3, "num_attention_heads": 8})
    return refusal(lambda: trainee.load(path, read_manifest(path).identity))  # a digest that lies


def test_sizes_are_compared_even_if_the_digest_says_nothing(pool: RankPool, saved: Path) -> None:
    text = pool.run(try_other_sizes, saved, ranks=2)[0]
    assert "torch.float32 [48, 48], but this run's is torch.float32 [64, 48]" in text


# --- Refused: what could run code ----------------------------------------------------------------


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = str(sprung)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.sprung,)


def rewrite(path: Path, files: dict[str, bytes]) -> None:
    """Replace files and make the manifest fit, as someone who means harm would."""
    manifest = read_manifest(path)
    for name, content in files.items():
        (path / name).write_bytes(content)
    kept = [file for file in manifest.files if file[0] not in files]
    new = [(name, len(content), zlib.crc32(content)) for name, content in files.items()]
    changed = Manifest(manifest.step, manifest.num_ranks, manifest.identity, tuple(kept + new))
    (path / "manifest.json").write_text(json.dumps(manifest_json(changed)))


def metadata_of(path: Path) -> Metadata:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def trap_in_metadata(path: Path, trap: Trap) -> None:
    rewrite(path, {".metadata": pickle.dumps(trap)})


def trap_in_an_attribute(path: Path, trap: Trap) -> None:
    metadata = metadata_of(path)
    metadata.planner_data = {"x": trap}
    rewrite(path, {".metadata": pickle.dumps(metadata)})


def trap_in_an_entry_that_is_no_tensor(path: Path, trap: Trap) -> None:
    metadata = metadata_of(path)
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    rewrite(path, {".metadata": pickle.dumps(metadata), "trap.distcp": pickle.dumps(trap)})


def trap_in_a_tensor(path: Path, trap: Trap) -> None:
    torch.save(trap, path / "trap.distcp")
    content = (path / "trap.distcp").read_bytes()
    metadata = metadata_of(path)
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo("trap.distcp", 0, len(content))
    rewrite(path, {".metadata": pickle.dumps(metadata), "trap.distcp": content})


def file_outside(path: Path, trap: Trap) -> None:
    metadata = metadata_of(path)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"../{path.name}/{info.relative_path}")
    rewrite(path, {".metadata": pickle.dumps(metadata)})


def try_with_damage_allowed(rank: int, num_ranks: int, path: Path) -> str:
    trainee = make_trainee(rank, num_ranks, QWEN3)
    return refusal(lambda: trainee.load(path))


@pytest.mark.parametrize(
    ("lay", "sentence"),
    [
        (trap_in_metadata, ".metadata is refused: it names posix.mkdir"),
        (trap_in_an_attribute, ".metadata is refused: it names posix.mkdir"),
        (trap_in_an_entry_that_is_no_tensor, ".metadata is refused: it has entries that are no tensors"),
        (trap_in_a_tensor, "could not be loaded: Weights only load failed"),
        (file_outside, ".metadata is refused: it has entries that are no tensors in the checkpoint's own files"),
    ],
)
def test_nothing_in_a_checkpoint_can_run_code(
    pool: RankPool, saved: Path, tmp_path: Path, lay: Callable[[Path, Trap], None], sentence: str
) -> None:
    path = shutil.copytree(saved, tmp_path / saved.name)
    lay(path, Trap(tmp_path / "sprung"))
    texts = pool.run(try_with_damage_allowed, path, ranks=2)
    assert len(set(texts)) == 1
    assert sentence in texts[0]
    assert "\n" not in texts[0]
    assert not (tmp_path / "sprung").exists()


# --- Saving goes wrong ---------------------------------------------------------------------------


def save_on_a_full_disk(rank: int, num_ranks: int, folder: Path, full_rank: int, limit_bytes: int) -> tuple[str, str]:
    trainee = make_trainee(rank, num_ranks, QWEN3)
    progress, _ = trainee.train(START, 1)
    before = trainee.state()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full_rank:  # Python ignores the signal, so a longer file is an OSError, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        text = refusal(lambda: trainee.save(folder, progress))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(before, trainee.state())
    dist.barrier()  # rank 0 tidies up
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000"]
    progress, _ = trainee.train(progress, 1)
    return text, str(trainee.save(folder, progress))  # and there is space again


@pytest.mark.parametrize(
    ("full_rank", "limit_bytes"), [(1, 4096), (0, 4096), (2, 0)], ids=["a shard", "rank 0's", "the first byte"]
)
def test_one_rank_that_cannot_write_is_an_error_on_all_and_leaves_older_checkpoints_whole(
    pool: RankPool, saved: Path, tmp_path: Path, full_rank: int, limit_bytes: int
) -> None:
    older = shutil.copytree(saved, tmp_path / "checkpoints" / "step-000000")
    results = pool.run(save_on_a_full_disk, tmp_path, full_rank, limit_bytes, ranks=3)
    assert len({text for text, _ in results}) == 1
    text, later = results[0]
    assert text.startswith(f"rank {full_rank}: ")
    assert "step-000001 could not be saved: File too large; " in text
    assert "\n" not in text
    assert sorted(path.name for path in older.parent.iterdir()) == ["step-000000", "step-000002"]
    assert contents(older) == contents(saved)
    assert find_checkpoint(tmp_path) == Path(later)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def try_to_save(rank: int, num_ranks: int, folder: Path) -> str:
    trainee = make_trainee(rank, num_ranks, QWEN3)
    return refusal(lambda: trainee.save(folder, START))


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    texts = pool.run(try_to_save, tmp_path, ranks=2)
    assert len(set(texts)) == 1
    assert "could not be saved: File exists" in texts[0]
    assert (tmp_path / "checkpoints").read_text() == "a file, not a folder"


def save_twice(rank: int, num_ranks: int, folder: Path) -> list[str]:
    trainee = make_trainee(rank, num_ranks, QWEN3)
    progress, _ = trainee.train(START, 1)
    trainee.save(folder, progress)
    if rank == 0:  # as a killed run leaves it
        half = folder / "checkpoints" / ".saving-step-000007"
        shutil.copytree(folder / "checkpoints" / "step-000001", half)
        (half / "manifest.json").unlink()
    dist.barrier()
    assert find_checkpoint(folder).name == "step-000001"
    trainee.train(progress, 1)
    trainee.save(folder, progress)  # a step 1 with other weights
    state = trainee.state()
    trainee.train(progress, 1)
    trainee.load(find_checkpoint(folder))
    assert same(state, trainee.state())
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_step_saved_again_replaces_the_old_one_and_half_written_ones_are_neither_read_nor_kept(
    pool: RankPool, tmp_path: Path
) -> None:
    assert pool.run(save_twice, tmp_path, ranks=2)[0] == ["step-000001"]


def test_a_checkpoint_names_no_path_of_the_machine_that_saved_it(saved: Path) -> None:
    for name, content in contents(saved).items():
        for part in saved.parent.parts[1:]:  # a pickled path is a list of its parts
            assert part == "checkpoints" or os.fsencode(part) not in content, (name, part)
