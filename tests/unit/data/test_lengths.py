from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from nestsp.config import DataConfig
from nestsp.data.lengths import LENGTH_TABLES, Lengths, draw_batch, draw_batches, open_lengths, read_lengths
from nestsp.data.samples import open_samples
from nestsp.errors import DataError

TABLE_ERROR = 0.05  # of a quantile: interpolation and 200,000 draws


def read(path: Path) -> list[int]:
    values: list[int] = read_lengths(str(path), num_samples=0, seed=0).tolist()
    return values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"length": 5}\n\n{"text": "abc"}\n7\n'),
        ("a.jsonl", '{"length": 5, "text": "x"}\n{"input_ids": [1, 2, 3], "text": "x"}\n7.0\n'),
        ("a.csv", 'id,text\nx,12345\ny,abc\nz,"a,\nbcde"\n'),
        ("a.csv", "id,length\nx,5\ny,3\nz,7\n"),
        ("a.csv", "5\n3\n7\n"),
    ],
)
def test_text_files_give_their_lengths(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read(path) == [5, 3, 7]


def test_arrays_give_their_lengths(tmp_path: Path) -> None:
    lengths = np.array([5, 3, 7], np.int32)
    np.save(tmp_path / "a.npy", lengths)
    np.savez(tmp_path / "a.npz", other=np.zeros(2), lengths=lengths)
    assert read(tmp_path / "a.npy") == read(tmp_path / "a.npz") == [5, 3, 7]


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.jsonl", "", "has no lengths"),
        ("a.jsonl", '{"tokens": 5}', "line 1 has none of 'length', 'input_ids' and 'text'"),
        ("a.jsonl", '5\n"five"\n', "line 2 is neither a number nor an object"),
        ("a.jsonl", '{"text": 5}', "line 1 has 5 as 'text'"),
        ("a.jsonl", "NaN", "has length nan, but"),
        ("a.jsonl", "1e30", "is a whole number from 0 to"),
        ("a.jsonl", '{"length": 5', "cannot be read"),
        ("a.jsonl", '{"length": -5}', r"sequence 0 of .* has length -5, but a length is a whole number"),
        ("a.jsonl", '{"length": 2.5}', "has length 2.5, but"),
        ("a.jsonl", '{"length": true}', "has length True, but"),
        ("a.csv", "length\nx\n", "cannot be read"),
        ("a.csv", "a,b\n1,2\n", "one of them must be 'length' or 'text'"),
        ("a.csv", "a,length\n1\n", "row 1 has only 1 column"),
        ("a.npy", "", "cannot be read: it is no NumPy file"),
        ("a.npy", "5", "cannot be read: it is no NumPy file"),
        ("a.npz", "PK\x03\x04", "cannot be read: it is no NumPy file"),
        ("a.parquet", "5", "cannot be read"),
        ("a.txt", "5", "neither a known name nor such a file"),
    ],
)
def test_bad_lengths_are_one_clear_sentence(tmp_path: Path, name: str, text: str, rule: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=rule):
        read(path)


def test_a_missing_file_and_a_misspelt_corpus_are_named() -> None:
    with pytest.raises(DataError, match="no such file"):
        read(Path("nowhere.npz"))
    with pytest.raises(DataError, match="did you mean 'wikipedia'"):
        read(Path("wikpedia"))


@pytest.mark.parametrize(
    ("name", "median", "high"), [("wikipedia", 347, 10_919), ("github", 712, 27_776), ("arxiv", 12_529, 82_176)]
)
def test_a_table_gives_back_its_quantiles(name: str, median: int, high: int) -> None:
    drawn = read_lengths(name, num_samples=200_000, seed=0)
    assert np.quantile(drawn, 0.5) == pytest.approx(median, rel=TABLE_ERROR)
    assert np.quantile(drawn, 0.99) == pytest.approx(high, rel=TABLE_ERROR)
    assert drawn.min() >= 1


def test_the_tail_of_arxiv_begins_where_its_table_ends() -> None:
    table = LENGTH_TABLES["arxiv"]
    drawn = table.draw(np.linspace(0, 1, 1_000_000, endpoint=False))
    assert (drawn > 131_072).mean() == pytest.approx(0.00245, rel=0.01)
    assert (drawn > 1_310_720).mean() == pytest.approx(0.00245 * 10**-2.29, rel=0.1)
    assert (np.diff(drawn) >= 0).all()


def test_a_batch_takes_samples_in_order_and_counts_what_it_drops() -> None:
    drawn = draw_batch(np.array([4, 0, 90, 3, 5, 1]), max_tokens=8, max_length=50)
    assert drawn.batch.ids == (0, 3)
    assert drawn.batch.lengths == (4, 3)
    assert (drawn.num_empty, drawn.num_too_long) == (1, 1)
    following = draw_batch(np.array([4, 0, 90, 3, 5, 1]), max_tokens=8, max_length=50, start=4)
    assert following.batch.ids == (4, 5)


def test_what_is_over_the_limit_is_dropped_truncated_or_refused_and_counted() -> None:
    lengths = np.array([10, 5000])
    dropped = draw_batch(lengths, max_tokens=None, max_length=4096)
    truncated = draw_batch(lengths, max_tokens=None, max_length=4096, over_length="truncate")
    assert (dropped.batch.lengths, dropped.num_too_long) == ((10,), 1)
    assert (truncated.batch.lengths, truncated.num_too_long) == ((10, 4096), 1)
    with pytest.raises(DataError, match="sequence 1 has 5,000 tokens, but the limit is 4,096"):
        draw_batch(lengths, max_tokens=None, max_length=4096, over_length="error")
    assert draw_batch(lengths, max_tokens=4000, max_length=4096, over_length="truncate").num_too_long == 0


def test_a_split_file_has_the_samples_that_training_on_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (10, 0, 5000, 8192, 3, 4096)))
    config = DataConfig(
        source=str(path), cache_dir=str(tmp_path), max_length=4096, over_length="split", tokens_per_step=1
    )
    lengths = open_lengths(str(path), num_samples=0, seed=0).split(4096)
    drawn = draw_batch(lengths.values, max_tokens=None, max_length=4096, over_length="split", cut=lengths.cut)
    assert list(drawn.batch.lengths) == open_samples(config).lengths.tolist() == [10, 4096, 904, 4096, 4096, 3, 4096]
    assert (drawn.num_empty, drawn.num_too_long) == (1, 4)


def test_batches_of_split_sequences_hold_every_token_once(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50))
    path = str(tmp_path / "a.npy")
    drawn, lengths = draw_batches(path, 99, max_tokens=60, max_length=20, over_length="split", seed=0)
    ids = [i for each in drawn for i in each.batch.ids]
    assert sorted(ids) == np.flatnonzero(lengths.values).tolist()
    assert sum(each.batch.num_tokens for each in drawn) == sum(range(50))
    assert max(max(each.batch.lengths) for each in drawn) == 20
    assert sum(each.num_too_long for each in drawn) == 2 * 20 + 3 * 9


def test_a_split_into_too_many_is_refused() -> None:
    with pytest.raises(DataError, match="splitting there makes 1,099,511,627,776 sequences of 1, and at most"):
        Lengths(np.array([2**40]), ()).split(1)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="none of 2 sequences is left: 1 are empty and 1 are longer than 50 tokens"):
        draw_batch(np.array([0, 90]), max_tokens=8, max_length=50)


def test_a_jsonl_of_numbers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(n) for n in range(3)))
    assert read(path) == [0, 1, 2]


def test_a_separator_inside_a_json_text_does_not_end_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x0c"}, ensure_ascii=False), encoding="utf-8")
    assert read(path) == [6]


def test_parquet_gives_lengths_of_numbers_tokens_and_texts(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tokens, texts = [[1] * 5, [], [1] * 7], ["12345", "", "1234567"]
    for columns in (
        {"length": [5, 0, 7], "text": ["x"] * 3},
        {"input_ids": tokens, "text": ["x"] * 3},
        {"text": texts, "other": [1, 2, 3]},
        {"anything": [5, 0, 7]},
    ):
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet") == [5, 0, 7]
    parquet.write_table(arrow.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="its columns are a, b, but one must be 'length', 'input_ids' or 'text'"):
        read(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"length": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"sequence 1 of .* has length None"):
        read(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow, which is not installed; pip install 'nestsp\[parquet\]'"):
        read(tmp_path / "a.parquet")


def test_a_folder_of_text_gives_a_length_for_each_file_and_says_what_it_skipped(tmp_path: Path) -> None:
    for name, content in {"a.txt": b"12345", "b.md": b"", "c.py": b"1234567", "d.txt": b"\xff", "e.bin": b"x"}.items():
        (tmp_path / name).write_bytes(content)
    lengths = open_lengths(str(tmp_path), num_samples=0, seed=0)
    assert lengths.values.tolist() == [5, 0, 7]
    assert set(lengths.notes) == {
        "3 texts measured by one token a byte",
        "1 file skipped: other suffix",
        "1 file skipped: not UTF-8",
    }


def test_a_folder_without_text_is_refused_without_naming_a_setting_of_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^the lengths are the folder"):
        read(tmp_path)


@pytest.mark.slow
def test_stdlib_gives_lengths_of_functions_and_classes() -> None:
    lengths = read_lengths("stdlib", num_samples=0, seed=0)
    assert len(lengths) > 10_000
    assert np.quantile(lengths, 0.999) > 20 * np.median(lengths)


def test_every_table_says_where_it_is_from() -> None:
    for name, table in LENGTH_TABLES.items():
        (note,) = open_lengths(name, num_samples=1, seed=3).notes
        assert note == f"drawn with seed 3 from built-in quantiles: {table.source}"


def test_batches_of_a_table_follow_one_another_and_do_not_depend_on_their_number() -> None:
    few, _ = draw_batches("wikipedia", 2, max_tokens=20_000, max_length=8_000, seed=1)
    many, lengths = draw_batches("wikipedia", 300, max_tokens=20_000, max_length=8_000, seed=1)
    assert (len(few), len(many)) == (2, 300)
    assert many[:2] == few
    assert few[1].batch.ids[0] >= few[0].stop
    assert all(lengths.values[i] == n for i, n in zip(many[-1].batch.ids, many[-1].batch.lengths, strict=True))


def test_batches_of_a_file_are_one_epoch_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50))
    orders = []
    for seed in (0, 0, 1):
        drawn, _ = draw_batches(str(tmp_path / "a.npy"), 99, max_tokens=100, max_length=40, seed=seed)
        orders.append([i for each in drawn for i in each.batch.ids])
        assert sorted(orders[-1]) == list(range(1, 41))
    assert orders[0] == orders[1] != orders[2]
