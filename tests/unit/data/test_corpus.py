"""Corpora: which documents a source has, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nestsp.data.corpus import Corpus, Skipped, open_corpus
from nestsp.errors import DataError


def _texts(corpus: Corpus) -> list[str]:
    return [item for item in corpus.read() if isinstance(item, str)]


# the standard library


def _as_stdlib(root: Path, *names: str) -> Corpus:
    return Corpus("stdlib", "stdlib", root, names)


def test_a_document_is_one_top_level_function_or_class_with_its_decorators(tmp_path: Path) -> None:
    source = (
        "import functools\n\n"
        "@functools.cache\n@functools.wraps(\n    len)\ndef f(x):\n    def inner(): ...\n    return 'a\x0cb'\n\n"
        "async def g():\n    pass\n"
        "if True:\n    def not_top_level(): ...\n"
        "class C:\n    def method(self): ..."  # no newline at the end
    )
    (tmp_path / "m.py").write_text(source)
    assert _texts(_as_stdlib(tmp_path, "m.py")) == [
        "@functools.cache\n@functools.wraps(\n    len)\ndef f(x):\n    def inner(): ...\n    return 'a\x0cb'\n",
        "async def g():\n    pass\n",
        "class C:\n    def method(self): ...\n",
    ]


def test_python_that_does_not_parse_or_decode_is_skipped_and_nothing_warns(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_bytes(b"# -*- coding: no-such-codec -*-\ndef f(): ...\n")
    (tmp_path / "c.py").write_bytes(b"def f(): return '\xff'\n")
    (tmp_path / "d.py").write_bytes(b"def f(): ...\n\x00\n")
    (tmp_path / "e.py").write_bytes(b"# -*- coding: latin-1 -*-\r\ndef f(): return '\xe9'\r\n")
    (tmp_path / "f.py").write_text("def f(): return '\\d' is 1\n")  # warns twice if it is let
    items = list(_as_stdlib(tmp_path, "a.py", "b.py", "c.py", "d.py", "e.py", "f.py").read())
    assert items == [Skipped("not valid Python")] * 4 + ["def f(): return 'é'\n", "def f(): return '\\d' is 1\n"]


def test_the_standard_library_is_listed_sorted_and_without_installed_packages() -> None:
    corpus = open_corpus("stdlib")
    assert list(corpus.files) == sorted(corpus.files)
    assert "ast.py" in corpus.files
    assert "json/decoder.py" in corpus.files
    assert not [name for name in corpus.files if re.search(r"(site|dist)-packages|__pycache__", name)]
    assert not [name for name in corpus.files if not name.endswith(".py")]


def test_documents_of_the_standard_library_are_its_functions_and_classes() -> None:
    corpus = open_corpus("stdlib")
    part = Corpus("stdlib", "stdlib", corpus.root, ("textwrap.py",))
    texts = _texts(part)
    assert [text.split("(")[0].split(":")[0] for text in texts] == [
        "class TextWrapper",
        "def wrap",
        "def fill",
        "def shorten",
        "def dedent",
        "def indent",
    ]


# a folder


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert list(open_corpus(str(tmp_path)).read()) == ["abc"]


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.PY", "sub/deep/d.rst", ".git/e.txt", ".hidden.txt", "f.png", "g.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.read()) == ["a.txt", "b.md", "sub/c.PY", "sub/deep/d.rst"]
    assert corpus.skipped == (("other suffix", 2),)
    assert corpus.num_items == 4


def test_a_file_that_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.txt").write_text("b")
    assert list(open_corpus(str(tmp_path)).read()) == [Skipped("not UTF-8"), "b"]


def test_links_that_lead_nowhere_or_round_in_circles_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing.txt")
    (tmp_path / "round").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe.txt")  # reading it would wait for ever
    assert list(open_corpus(str(tmp_path)).read()) == ["a"]


def test_order_and_content_of_files_are_in_the_digest_but_their_folder_is_not(tmp_path: Path) -> None:
    digests = []
    for number, (first, second) in enumerate([("x", "y"), ("x", "y"), ("y", "x"), ("xy", ""), ("x", "yz")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.txt").write_text(first)
        (folder / "b.txt").write_text(second)
        digests.append(open_corpus(str(folder)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


# what cannot be used


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of its 0 files is text by name; name text files \.txt"):
        open_corpus(str(tmp_path))
    (tmp_path / "part.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match=r"none of its 1 files is text by name; give one file, such as .*part\.jsonl"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("stdlb", "; did you mean 'stdlib'?"),
        ("no/such", "; give 'stdlib' or a folder of text files"),
        ("", "; give 'stdlib' or a folder of text files"),
    ],
)
def test_a_missing_source_is_refused_with_a_remedy(source: str, remedy: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"data.source is '{source}', but there is no such folder{remedy}")):
        open_corpus(source)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    corpus = open_corpus(str(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        list(corpus.read())
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        _ = corpus.digest


def test_data_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, nestsp.data.samples, nestsp.data.stream\n"
        "print(*({'torch', 'transformers', 'tokenizers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout.strip() == ""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
