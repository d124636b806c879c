from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nestsp.data.lengths import LENGTH_TABLES, draw_batch, read_lengths
from nestsp.errors import DataError

TABLE_ERROR = 0.05  # of a quantile: interpolation and 200,000 draws


def read(path: Path) -> list[int]:
    values: list[int] = read_lengths(str(path), num_samples=0, seed=0).tolist()
    return values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"length": 5}\n\n{"text": "abc"}\n7\n'),
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
        ("a.jsonl", '{"tokens": 5}', "neither 'length' nor 'text'"),
        ("a.jsonl", '{"length": 5', "cannot be read"),
        ("a.jsonl", '{"length": -5}', r"length 0 of .* is -5, but a length is a whole number"),
        ("a.jsonl", '{"length": 2.5}', "is 2.5, but"),
        ("a.jsonl", '{"length": true}', "is True, but"),
        ("a.csv", "length\nx\n", "cannot be read"),
        ("a.csv", "a,b\n1,2\n", "one of them must be named 'length'"),
        ("a.txt", "5", "neither a corpus nor such a file"),
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


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="none of 2 sequences is left: 1 are empty and 1 are longer than 50 tokens"):
        draw_batch(np.array([0, 90]), max_tokens=8, max_length=50)


def test_a_jsonl_of_numbers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(n) for n in range(3)))
    assert read(path) == [0, 1, 2]
