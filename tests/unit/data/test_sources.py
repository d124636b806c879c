"""Sources: files, folders, saved data sets and the Hub; their rows, their digests, and what is said of bad ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from nestsp.config import DataSource
from nestsp.data import hub as hub_module
from nestsp.data import sources
from nestsp.data.corpus import Skipped
from nestsp.data.rows import Source
from nestsp.data.sources import open_source
from nestsp.data.store import TokenStore, open_store
from nestsp.data.tokenizer import open_tokenizer
from nestsp.errors import DataError

BYTES = open_tokenizer("bytes")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def _open(path: object, **settings: Any) -> Source:
    return open_source(DataSource(source=str(path), **settings))


def _rows(source: Source) -> list[Any]:
    return [
        item if isinstance(item, Skipped) else dict(item[1])
        for chunk in source.chunks(source.columns())
        for item in chunk.rows()
    ]


def _jsonl(folder: Path, content: bytes) -> Source:
    path = folder / "corpus.jsonl"
    path.write_bytes(content)
    return _open(path)


def _build(source: Source, folder: Path, form: str = "auto") -> TokenStore:
    return open_store(source, BYTES, folder / "stores", form=form)


# .jsonl


def test_a_jsonl_line_is_a_row(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, '{"text": "é"}\r\n\n  \n{"id": 1, "text": ""}\n{"text": "last\\n"}'.encode())
    assert _rows(source) == [{"text": "é"}, {"id": 1, "text": ""}, {"text": "last\n"}]
    assert source.columns() == ("text",)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert _rows(_jsonl(tmp_path, b'\xef\xbb\xbf{"text": "a"}\n')) == [{"text": "a"}]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 40, 41, 42, 1000])
def test_every_line_is_in_one_chunk_wherever_the_cuts_fall(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    rows = [{"text": "x" * size} for size in (0, 3, 50, 1, 0, 200, 7)]
    source = _jsonl(tmp_path, b"\n".join(json.dumps(row).encode() for row in rows))
    assert _rows(source) == rows
    assert sum(chunk.size for chunk in source.chunks(())) == source.size == (tmp_path / "corpus.jsonl").stat().st_size


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b'{"text": "a"', "is not JSON at column 13"),
        (b"text", "is not JSON at column 1"),
        (b'["a"]', "is a list, but it must be an object"),
        (b'"a"', "is a string, but it must be an object"),
        (b"null", "is null, but it must be an object"),
        (b"{}", "has no field at all, but it needs the field 'text'"),
        (b'{"content": "a", "id": 3}', "has 'content', 'id', but it needs the field 'text'"),
        (b'{"text": 3}', "has a number as 'text'"),
        (b'{"text": null}', "has null as 'text'"),
        (b'{"text": true}', "has a boolean as 'text'"),
        (b'{"text": ["a"]}', "has a list as 'text'"),
        (b'{"text": "\xff"}', "is not UTF-8 at byte 10"),
        (b'{"text": "a\\ud800"}', "has half a surrogate pair in 'text' at character 1"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "is JSON that Python cannot read"),
        (b'{"text": "a"} {"text": "b"}', "is not JSON at column 15"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_a_malformed_line_is_named_with_its_file_and_number(
    tmp_path: Path, line: bytes, rule: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    source = _jsonl(tmp_path, b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'corpus.jsonl'}, line 3, {rule}")) as caught:
        _build(source, tmp_path)
    assert "; " in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_digest_follows_content_not_place(tmp_path: Path) -> None:
    first = _jsonl(tmp_path, b'{"text": "a"}\n')
    (tmp_path / "other").mkdir()
    assert _jsonl(tmp_path / "other", b'{"text": "a"}\n').content == first.content
    path = tmp_path / "corpus.jsonl"
    stat = path.stat()
    path.write_bytes(b'{"text": "b"}\n')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    assert first.digest() != first.content


# .parquet


def _parquet(path: Path, table: dict[str, list[Any]], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(table), path, **options)


def test_parquet_rows_are_read_group_by_group_and_only_their_columns(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(7)]
    _parquet(tmp_path / "a.parquet", {"id": list(range(7)), "text": texts}, row_group_size=3)
    source = _open(tmp_path / "a.parquet")
    chunks = list(source.chunks(["text"]))
    assert [chunk.size for chunk in chunks] == [3, 3, 1]
    assert [row for chunk in chunks for _, row in chunk.rows()] == [{"text": text} for text in texts]  # type: ignore[misc]
    store = _build(source, tmp_path)
    assert bytes(store.tokens) == "".join(texts).encode()
    assert store.meta["ignored"] == ["id"]


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", {"text": ["a", "b", "c", None]}, row_group_size=3)
    with pytest.raises(DataError, match=r"a\.parquet, row 3, has null as 'text', but it must be a string"):
        _build(_open(tmp_path / "a.parquet"), tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: .*; mend or remove it"):
        _open(tmp_path / "a.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow, which is not installed; pip install 'nestsp\[datasets\]'"):
        _open(tmp_path / "a.parquet")


# folders


def test_a_folder_of_data_files_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "data" / "README.md").write_text("A card, no sample.")
    source = _open(tmp_path / "data")
    assert _rows(source) == [{"text": "a.jsonl"}, {"text": "b/2.jsonl"}]
    assert source.skipped == (("other suffix", 1),)


def test_a_folder_of_text_stays_one_whatever_data_lie_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("{}")
    source = _open(tmp_path)
    assert _rows(source) == [{"text": "a"}]
    assert source.skipped == (("other suffix", 1),)


def test_a_folder_of_two_kinds_of_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    _parquet(tmp_path / "b.parquet", {"text": ["b"]})
    with pytest.raises(DataError, match=r"has \.jsonl and \.parquet files; give one kind, or a mixture"):
        _open(tmp_path)


def test_parquet_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", {"text": ["a"]})
    _parquet(tmp_path / "b.parquet", {"content": ["b"]})
    with pytest.raises(DataError, match=r"b\.parquet has the columns content, but .*a\.parquet has text; give files"):
        _open(tmp_path)


def test_files_that_are_named_for_splits_are_those_of_one(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        _parquet(tmp_path / "data" / f"{name}.parquet", {"text": [name]})
    source = _open(tmp_path)
    assert [row["text"] for row in _rows(source)] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert source.skipped == (("other split", 1),)
    assert [row["text"] for row in _rows(_open(tmp_path, split="test"))] == ["test-00000-of-00001"]
    with pytest.raises(DataError, match=r"data\.split is 'dev', but the files in .* are of test, train by name"):
        _open(tmp_path, split="dev")


@pytest.mark.parametrize("setting", [{"split": "test"}, {"subset": "small"}, {"revision": "main"}])
def test_a_choice_that_a_source_does_not_have_is_refused_never_ignored(tmp_path: Path, setting: dict[str, str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "a"}')
    _save(tmp_path / "saved", ["a"])
    for source in ("stdlib", *(tmp_path / name for name in ("a.jsonl", "texts", "rows", "saved"))):
        with pytest.raises(DataError, match=f"data.{next(iter(setting))} is '.*', but .* (has none|without splits)"):
            _open(source, **setting)


def test_a_folder_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 0 files is text by name"):
        _open(tmp_path)


# saved data sets


def _save(folder: Path, rows: list[str]) -> None:
    datasets.Dataset.from_dict({"text": rows, "id": list(range(len(rows)))}).save_to_disk(str(folder))


def test_a_saved_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CHUNK_ROWS", 2)
    _save(tmp_path / "saved", ["a", "bc", "def"])
    source = _open(tmp_path / "saved")
    assert [chunk.size for chunk in source.chunks(["text"])] == [2, 1]
    store = _build(source, tmp_path)
    assert (bytes(store.tokens), store.lengths.tolist()) == (b"abcdef", [1, 2, 3])
    assert store.meta["ignored"] == ["id"]


def test_a_split_of_saved_data_sets_is_chosen_by_name(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "held_out")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert _rows(_open(tmp_path / "saved")) == [{"text": "train"}]
    assert _rows(_open(tmp_path / "saved", split="held_out")) == [{"text": "held_out"}]
    with pytest.raises(DataError, match=r"data\.split is 'held-out', but .* has held_out, train; did you mean"):
        _open(tmp_path / "saved", split="held-out")


def test_a_damaged_saved_data_set_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "saved", ["a"])
    for path in (tmp_path / "saved").glob("*.arrow"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"saved cannot be read: .*; mend or remove it"):
        _open(tmp_path / "saved")


# the Hub, which tests reach no more than users without a network do


class _Hub:
    """Stands for the Hub: a folder of Parquet files under one commit."""

    commit = "a" * 40

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, 0

    def dataset_info(self, name: str, revision: str | None = None) -> Any:
        if name != "org/data":
            raise huggingface_hub.errors.HfHubHTTPError("no such data set", response=None)  # type: ignore[arg-type]
        return SimpleNamespace(sha=self.commit)

    def load_dataset(self, name: str, subset: str | None, **options: Any) -> Any:
        assert options.pop("revision") == self.commit
        self.opened += 1
        files = {options["split"]: str(self.folder / f"{subset or 'default'}-{options['split']}.parquet")}
        return _load_dataset("parquet", data_files=files, **options)


_load_dataset = datasets.load_dataset


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    hub = _Hub(tmp_path / "hub")
    _parquet(hub.folder / "default-train.parquet", {"text": [f"row {i}" for i in range(5)], "n": [0] * 5})
    _parquet(hub.folder / "small-test.parquet", {"text": ["small"]})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    monkeypatch.setattr(hub_module, "CHUNK_ROWS", 2)
    return hub


def test_a_data_set_on_the_hub_is_streamed_to_the_store(tmp_path: Path, hub: _Hub) -> None:
    store = _build(_open("org/data"), tmp_path)
    assert bytes(store.tokens) == b"row 0row 1row 2row 3row 4"
    assert store.meta["ignored"] == ["n"]
    small = _build(_open("org/data", subset="small", split="test"), tmp_path)
    assert bytes(small.tokens) == b"small"


def test_a_whole_commit_needs_no_network_once_it_is_tokenised(tmp_path: Path, hub: _Hub) -> None:
    first = _build(_open("org/data"), tmp_path)
    shutil.rmtree(hub.folder)
    opened = hub.opened
    hub.dataset_info = lambda *_, **__: pytest.fail("asked the Hub")  # type: ignore[method-assign]
    assert _build(_open("org/data", revision=hub.commit), tmp_path).key == first.key
    assert hub.opened == opened


def test_a_data_set_that_the_hub_does_not_give_is_refused(hub: _Hub) -> None:
    with pytest.raises(
        DataError, match=r"'org/dta', but there is no such file or folder, and the Hugging Face Hub does not give"
    ):
        _open("org/dta")


def test_a_split_that_the_hub_does_not_have_is_refused(tmp_path: Path, hub: _Hub) -> None:
    with pytest.raises(DataError, match=r"datasets cannot open its split 'dev' .* set data\.subset or data\.split"):
        _build(_open("org/data", split="dev"), tmp_path)


# what is none


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("stdlb", "; did you mean 'stdlib'?"),
        (
            "no/such.jsonl",
            "; give 'stdlib', a .jsonl or .parquet file, a folder, or a name on the Hub such as org/name",
        ),
        ("", "; give 'stdlib', a .jsonl or .parquet file, a folder, or a name on the Hub such as org/name"),
    ],
)
def test_a_missing_source_is_refused_with_a_remedy(source: str, remedy: str) -> None:
    with pytest.raises(
        DataError, match=re.escape(f"data.source is '{source}', but there is no such file or folder{remedy}")
    ):
        _open(source)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"but a file must be \.jsonl or \.parquet"):
        _open(tmp_path / "a.txt")


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, b'{"text": "a"}\n')
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl cannot be read: No such file"):
        _rows(source)
    with pytest.raises(DataError, match=r"corpus\.jsonl cannot be read: No such file"):
        source.digest()
