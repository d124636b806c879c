"""The token store: built once, read in ranges, never trusted when damaged, never reused for other data."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import queue
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from nestsp.config import DataSource
from nestsp.data import store as store_module
from nestsp.data.rows import Source
from nestsp.data.sources import open_source
from nestsp.data.store import TokenStore, open_store
from nestsp.data.tokenizer import ByteTokenizer, MarkedTokens, Span, Tokens, open_tokenizer, token_dtype
from nestsp.errors import DataError

TEXTS = ["abc", "", "é", "x" * 1000]
BYTES = open_tokenizer("bytes")


def _corpus(folder: Path, texts: Sequence[str] = TEXTS) -> Source:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_source(DataSource(source=str(path)))


def _no_progress(done: int, total: int | None) -> None:
    raise AssertionError("built, although the store is there")


def _read(store: TokenStore, document: int, start: int, stop: int) -> Tokens:
    tokens = store.read(document, start, stop)
    assert isinstance(tokens, np.ndarray)
    return tokens


def _documents(store: TokenStore) -> list[bytes]:
    return [bytes(store.read(i, 0, int(store.lengths[i]))) for i in range(store.num_documents)]


def test_a_store_holds_every_document_in_order(tmp_path: Path) -> None:
    store = open_store(_corpus(tmp_path), BYTES, tmp_path / "cache")
    assert _documents(store) == [text.encode() for text in TEXTS]
    assert store.lengths.tolist() == [3, 0, 2, 1000]
    assert store.lengths.dtype == np.int64
    assert (store.num_documents, store.num_tokens, store.vocab_size) == (4, 1005, 256)
    assert store.skipped == ()


def test_a_range_is_read_as_a_copy(tmp_path: Path) -> None:
    store = open_store(_corpus(tmp_path), BYTES, tmp_path / "cache")
    tokens = _read(store, 0, 1, 3)
    assert type(tokens) is np.ndarray
    assert tokens.tolist() == [0x62, 0x63]
    tokens[:] = 0
    assert _read(store, 0, 0, 3).tolist() == [0x61, 0x62, 0x63]
    assert _read(store, 0, 3, 3).size == 0
    for start, stop in [(0, 4), (-1, 2), (2, 1)]:  # never a neighbour's tokens
        with pytest.raises(AssertionError):
            store.read(0, start, stop)


def test_the_second_time_nothing_is_built(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path)
    told: list[tuple[int, int | None]] = []
    first = open_store(corpus, BYTES, tmp_path / "cache", lambda done, total: told.append((done, total)))
    num_bytes = (tmp_path / "corpus.jsonl").stat().st_size
    assert told == [(num_bytes, num_bytes)]
    second = open_store(corpus, BYTES, tmp_path / "cache", _no_progress)
    assert (second.key, second.digest) == (first.key, first.digest)
    os.chmod(tmp_path / "cache", 0o500)  # a cache that others may only read
    try:
        assert _documents(open_store(corpus, BYTES, tmp_path / "cache", _no_progress)) == _documents(first)
    finally:
        os.chmod(tmp_path / "cache", 0o700)


def test_progress_knows_the_number_of_a_folders_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.txt").write_bytes(b"\xff")
    told: list[tuple[int, int | None]] = []
    store = open_store(
        open_source(DataSource(source=str(tmp_path))),
        BYTES,
        tmp_path / ".c",
        lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (3, 3)
    assert store.skipped == (("not UTF-8", 1),)


def test_a_changed_source_gives_another_store(tmp_path: Path) -> None:
    before = open_store(_corpus(tmp_path, ["abc"]), BYTES, tmp_path / "cache")
    path = tmp_path / "corpus.jsonl"
    stat = path.stat()
    changed = _corpus(tmp_path, ["abd"])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # neither size nor time tells
    after = open_store(changed, BYTES, tmp_path / "cache")
    assert after.key != before.key
    assert after.digest != before.digest
    assert (_documents(before), _documents(after)) == ([b"abc"], [b"abd"])


def test_another_tokenizer_gives_another_store(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path)
    one = open_store(corpus, BYTES, tmp_path / "cache")
    other = open_store(corpus, replace(ByteTokenizer(), identity="other"), tmp_path / "cache")
    assert one.key != other.key
    assert one.digest == other.digest  # of the tokens, which are the same


@dataclass(frozen=True)
class _Spelled:
    """Each character's number plus an offset."""

    vocab_size: int
    offset: int
    name: str = "spelled"
    eos_id: int | None = None

    @property
    def identity(self) -> str:
        return f"{self.vocab_size},{self.offset}"

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        dtype = token_dtype(self.vocab_size)
        return [np.array([ord(character) + self.offset for character in text], dtype=dtype) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], *, whole: bool
    ) -> list[MarkedTokens]:
        raise AssertionError("no text is marked")


@pytest.mark.parametrize(("vocab_size", "name"), [(256, "uint8"), (65_536, "uint16"), (200_000, "uint32")])
def test_tokens_take_the_smallest_integer_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, name: str) -> None:
    tokenizer = _Spelled(vocab_size, vocab_size - 128)
    store = open_store(_corpus(tmp_path, ["a~", "b"]), tokenizer, tmp_path / "cache")
    assert store.tokens.dtype.name == name
    assert _read(store, 0, 0, 2).tolist() == [ord("a") + vocab_size - 128, ord("~") + vocab_size - 128]
    plain = np.load(store.folder / "tokens.npy")  # the file is plain .npy
    assert plain.tolist() == store.tokens.tolist()


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 2)


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def _falling_offsets(folder: Path) -> None:
    offsets = np.load(folder / "offsets.npy")
    offsets[1] = 10**6
    np.lib.format.open_memmap(folder / "offsets.npy", mode="r+")[:] = offsets


def _grow_meta(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta["num_tokens"] += 1
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        _remove("tokens.npy"),
        _remove("offsets.npy"),
        _remove("meta.json"),
        _cut("tokens.npy"),
        _cut("offsets.npy"),
        _cut("meta.json"),
        _write("tokens.npy", b""),
        _write("meta.json", b"[]"),
        _write("meta.json", b"{}"),
        _write("meta.json", b"\xff"),
        _falling_offsets,
        _grow_meta,
        shutil.rmtree,
    ],
)
def test_a_damaged_store_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    corpus = _corpus(tmp_path)
    store = open_store(corpus, BYTES, tmp_path / "cache")
    damage(store.folder)
    with pytest.raises(DataError, match="cannot be used"):
        TokenStore.open(store.folder)
    told: list[int] = []
    again = open_store(corpus, BYTES, tmp_path / "cache", lambda done, _: told.append(done))
    assert told
    assert _documents(again) == [text.encode() for text in TEXTS]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {store.key, f"{store.key}.lock"}


def test_a_store_under_another_name_is_refused(tmp_path: Path) -> None:
    store = open_store(_corpus(tmp_path), BYTES, tmp_path / "cache")
    moved = store.folder.rename(store.folder.with_name("other"))
    with pytest.raises(DataError, match=r"meta.json is of another store"):
        TokenStore.open(moved)


def test_an_interrupted_build_leaves_nothing_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = _corpus(tmp_path)

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_store(corpus, BYTES, tmp_path / "cache", interrupt)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    key = next((tmp_path / "cache").iterdir()).stem
    left = tmp_path / "cache" / f".{key}-killed"  # what a builder that was killed leaves
    (left / "new").mkdir(parents=True)
    store = open_store(corpus, BYTES, tmp_path / "cache")
    assert store.key == key
    assert not left.exists()


def test_a_source_that_changes_while_it_is_read_makes_no_store(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path)

    def change(done: int, total: int | None) -> None:
        _corpus(tmp_path, ["other"])

    with pytest.raises(DataError, match="changed while it was read"):
        open_store(corpus, BYTES, tmp_path / "cache", change)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_corpus_without_a_token_is_refused(tmp_path: Path, texts: list[str]) -> None:
    """Row G17: an empty file and empty texts."""
    with pytest.raises(DataError, match=rf"has {len(texts)} documents and no token, but it needs at least one"):
        open_store(_corpus(tmp_path, texts), BYTES, tmp_path / "cache")


def test_a_folder_of_files_that_are_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="has 0 documents and no token, 1 skipped as not UTF-8"):
        open_store(open_source(DataSource(source=str(tmp_path))), BYTES, tmp_path / ".cache")


def test_a_malformed_line_makes_no_store(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, has a number"):
        open_store(open_source(DataSource(source=str(tmp_path / "a.jsonl"))), BYTES, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written .* or set data\.cache_dir to another folder"):
        open_store(_corpus(tmp_path), BYTES, tmp_path / "cache")


def _open_in_process(folder: Path, barrier: Barrier, built: multiprocessing.queues.Queue[tuple[bool, str]]) -> None:
    corpus = open_source(DataSource(source=str(folder / "corpus.jsonl")))
    written: list[Any] = []
    write = store_module._write

    def counted(*args: Any) -> None:
        written.append(args)
        write(*args)

    vars(store_module)["_write"] = counted  # this process ends with the test
    barrier.wait(60)
    store = open_store(corpus, BYTES, folder / "cache")
    assert store.num_tokens == int(store.lengths.sum())
    built.put((bool(written), store.digest))


def test_of_several_processes_at_once_one_builds_and_all_get_the_same_store(tmp_path: Path) -> None:
    _corpus(tmp_path, [f"document {i} " * 50 for i in range(5000)])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    built = context.Queue()
    processes = [context.Process(target=_open_in_process, args=(tmp_path, barrier, built)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [built.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(writes for writes, _ in results) == [False, False, True]
    assert len({digest for _, digest in results}) == 1


def test_who_waits_tells_what_the_builder_has_written_of_its_progress(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    key = open_store(source, BYTES, tmp_path / "elsewhere").key
    (tmp_path / "cache").mkdir()
    told: queue.Queue[tuple[int, int | None]] = queue.Queue()
    with ThreadPoolExecutor(1) as threads, filelock.FileLock(tmp_path / "cache" / f"{key}.lock"):
        (tmp_path / "cache" / f"{key}.progress").write_text("[7, 1")  # half written
        waiter = threads.submit(open_store, source, BYTES, tmp_path / "cache", lambda *state: told.put(state))
        time.sleep(0.7)
        assert told.empty()
        (tmp_path / "cache" / f"{key}.progress").write_text("[7, 100]")
        assert told.get(timeout=60) == (7, 100)
        assert not waiter.done()
    assert waiter.result(timeout=60).num_tokens == 1005


def test_a_store_is_sent_to_another_process_by_its_place_not_its_tokens(tmp_path: Path) -> None:
    store = open_store(_corpus(tmp_path, ["x" * 100_000]), BYTES, tmp_path / "cache")
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    assert _documents(pickle.loads(sent)) == _documents(store)
