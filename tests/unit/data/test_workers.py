"""Workers: the same store whatever their number, errors of the first bad row, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestsp.config import DataSource
from nestsp.data import sources
from nestsp.data.chat import ChatTemplate, open_template
from nestsp.data.rows import Source
from nestsp.data.sources import open_source
from nestsp.data.store import TokenStore, open_store
from nestsp.data.tokenizer import open_tokenizer
from nestsp.errors import DataError
from tests.unit.data.chats import CHAT, MARKED, save_tokenizer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)


def _chats(folder: Path, num_rows: int = 120, bad: int | None = None) -> Source:
    lines = [json.dumps({"messages": CHAT[: 2 + number % 4], "n": number}) for number in range(num_rows)]
    if bad is not None:
        lines[bad] = '{"messages": 3, "n": 0}'
    (folder / "chats.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return open_source(DataSource(source=str(folder / "chats.jsonl")))


def _build(folder: Path, source: Source, num_workers: int) -> TokenStore:
    tokenizer = str(save_tokenizer(folder / "tokenizer", MARKED))
    return open_store(
        source,
        open_tokenizer(tokenizer),
        folder / f"stores-{num_workers}",
        template=open_template(None, tokenizer),
        num_workers=num_workers,
    )


def test_a_store_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    source = _chats(tmp_path)
    assert len(list(source.chunks(()))) > 8
    alone = _build(tmp_path, source, 1)
    together = _build(tmp_path, source, 3)
    assert (together.key, together.digest) == (alone.key, alone.digest)
    for name in ("tokens", "weights", "offsets", "num_targets"):
        assert (alone.folder / f"{name}.npy").read_bytes() == (together.folder / f"{name}.npy").read_bytes()


def test_the_first_bad_row_is_named_by_whichever_worker_met_it(tmp_path: Path) -> None:
    source = _chats(tmp_path, bad=41)
    with pytest.raises(DataError, match=r"chats\.jsonl, line 42, has a number as 'messages'"):
        _build(tmp_path, source, 2)


def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    source = _chats(tmp_path, 2000)
    killed: list[int] = []

    def kill(done: int, total: int | None) -> None:
        if not killed:
            killed.append(_children()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(DataError, match="a process that tokenises ended with exit code -9"):
        open_store(source, open_tokenizer("bytes"), tmp_path / "s", kill, form="chat", template=_plain(), num_workers=2)
    assert _children() == []


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    _chats(tmp_path, 20_000)
    code = (
        "import sys; from pathlib import Path; from nestsp.config import DataConfig; from nestsp.data import sources\n"
        "from nestsp.data.samples import open_samples; from tests.unit.data.test_workers import _children\n"
        "sources.CHUNK_BYTES = 2000\n"
        f"config = DataConfig(source={str(tmp_path / 'chats.jsonl')!r}, tokens_per_step=1, workers=2,\n"
        f"    cache_dir={str(tmp_path / 'stores')!r}, tokenizer={str(save_tokenizer(tmp_path / 't', MARKED))!r})\n"
        "open_samples(config, lambda done, total: print(*_children(), flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as builder:
        assert builder.stdout is not None
        workers = [int(pid) for pid in builder.stdout.readline().split()]
        builder.kill()
    assert workers
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its builder"
        time.sleep(0.05)


def _plain() -> ChatTemplate:
    return ChatTemplate("a template", MARKED, {})


def _children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in listed if b"nestsp.data.workers" in _command(int(pid)) and not _is_zombie(int(pid))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
