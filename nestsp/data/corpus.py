"""Whole texts: the standard library's own source, or a folder of text files.

A corpus is a list of files and the rule that cuts a file into documents. It is read in one fixed order, one file at a
time, and its digest covers the content of every file, so data that changed are never mistaken for data
that did not. There is no shortcut by size and time: a time can be set back, or be too coarse to show a change. The
price is reading every byte at every start, about 1 s per GB from a warm disk cache.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from nestsp.errors import DataError, did_you_mean

__all__ = [
    "TEXT_SUFFIXES",
    "Corpus",
    "Skipped",
    "file_digest",
    "files_below",
    "is_hidden",
    "open_corpus",
    "unreadable",
]

TEXT_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        # prose and markup that people write by hand
        *("txt", "text", "md", "markdown", "rst", "adoc", "org", "tex"),
        # source code
        *(
            "py",
            "pyi",
            "c",
            "h",
            "cc",
            "cpp",
            "cxx",
            "hh",
            "hpp",
            "cu",
            "cuh",
            "rs",
            "go",
            "java",
            "kt",
            "scala",
            "swift",
        ),
        *(
            "m",
            "cs",
            "js",
            "jsx",
            "ts",
            "tsx",
            "rb",
            "php",
            "pl",
            "lua",
            "r",
            "jl",
            "hs",
            "ml",
            "f90",
            "zig",
            "sql",
            "sh",
        ),
    )
)
"""Suffixes of files that a folder's reader takes, in lower case: prose and source code. Data formats (.json, .csv,
.xml, .yaml and so on) are left out, because a text there is a field, not the file."""

_NO_UTF8 = "not UTF-8"
_NO_PYTHON = "not valid Python"
_OTHER_SUFFIX = "other suffix"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that gave no document, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in a fixed order, and the rule that cuts them into documents. Made by `open_corpus`.

    Attributes:
        source: What the user named.
        kind: Which rule.
        root: The folder that the files are in.
        files: Paths below ``root``, in reading order.
        skipped: (reason, number) of files that are not read at all.
    """

    source: str
    kind: Literal["stdlib", "folder"]
    root: Path
    files: tuple[str, ...]
    skipped: tuple[tuple[str, int], ...] = ()

    @property
    def num_items(self) -> int | None:
        """How many items `read` yields, or None if only reading tells."""
        return len(self.files) if self.kind == "folder" else None

    @property
    def digest(self) -> str:
        """Hex digest of all that decides which documents `read` yields: the rule, the content and order of files.

        Where the files lie does not count. For ``stdlib`` the Python version does, because it decides what parses.

        Raises:
            DataError: A file cannot be read.
        """
        whole = hashlib.sha256(self.kind.encode())
        if self.kind == "stdlib":
            whole.update(repr((sys.implementation.name, tuple(sys.version_info))).encode())
        for name in self.files:
            whole.update(file_digest(self.root / name))
        return whole.hexdigest()

    def read(self) -> Iterator[str | Skipped]:
        """Yield every document, or `Skipped` in place of a file that has none, in order.

        Raises:
            DataError: A file cannot be read.
        """
        for name in self.files:
            path = self.root / name
            match self.kind:
                case "stdlib":
                    yield from _definitions(_file_bytes(path))
                case "folder":
                    yield _whole_text(_file_bytes(path))


def open_corpus(source: str) -> Corpus:
    """List the files of a source.

    Args:
        source: ``"stdlib"`` for each top-level function and class of the running Python's standard library;
            or a folder, in which every file with one of `TEXT_SUFFIXES` is a document. Hidden files and folders are
            left out, links to folders are not followed.

    Raises:
        DataError: There is no such source, or it has no file that can be used.
    """
    if source == "stdlib":
        return _open_stdlib()
    path = Path(source).expanduser()
    if source and path.is_dir():
        return _open_folder(source, path)
    remedy = did_you_mean(source, ["stdlib"]) or "; give 'stdlib' or a folder of text files"
    raise DataError(f"data.source is '{source}', but there is no such folder{remedy}")


def _open_stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(name for name in files_below(root, _is_not_stdlib) if name.endswith(".py"))
    if not files:
        raise DataError(
            f"data.source is 'stdlib', but this Python has no .py files of its standard library in {root}; "
            "give a .jsonl file or a folder of text files"
        )
    return Corpus("stdlib", "stdlib", root, files)


def _open_folder(source: str, root: Path) -> Corpus:
    files = files_below(root, is_hidden)
    texts = tuple(name for name in files if PurePosixPath(name).suffix.lower() in TEXT_SUFFIXES)
    if not texts:
        lines = [name for name in files if name.lower().endswith(".jsonl")]
        remedy = f"give one file, such as {root / lines[0]}" if lines else "name text files .txt, or give a .jsonl file"
        raise DataError(
            f"data.source is the folder {source}, but none of its {len(files)} files is text by name; {remedy}"
        )
    num_others = len(files) - len(texts)
    return Corpus(source, "folder", root, texts, ((_OTHER_SUFFIX, num_others),) if num_others else ())


def _is_not_stdlib(name: str) -> bool:
    return name in ("site-packages", "dist-packages", "__pycache__")


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out by its name."""
    return name.startswith(".")


def files_below(root: Path, is_left_out: Callable[[str], bool]) -> list[str]:
    """Regular files below a folder as POSIX paths relative to it, sorted, but for names that are left out."""

    def refuse(error: OSError) -> None:
        raise DataError(
            f"the folder {error.filename} cannot be listed: {error.strerror}; mend its permissions"
        ) from error

    found: list[str] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not is_left_out(name)]  # not even walked
        paths = [Path(folder, name) for name in names if not is_left_out(name)]
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's content.

    Raises:
        DataError: It cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from None
    return digest.digest()


def unreadable(path: Path, error: OSError) -> DataError:
    """What to say of a file that the operating system does not give."""
    return DataError(f"the file {path} cannot be read: {error.strerror}; mend or remove it")


def _whole_text(content: bytes) -> str | Skipped:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Skipped(_NO_UTF8)


def _definitions(content: bytes) -> Iterator[str | Skipped]:
    """The source lines of each top-level function and class of a module, decorators included."""
    try:
        source = importlib.util.decode_source(content)
        with warnings.catch_warnings():  # test files of the standard library warn on purpose
            warnings.simplefilter("ignore")
            module = ast.parse(source)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):  # all are ways in which parsing fails
        yield Skipped(_NO_PYTHON)
        return
    lines = source.split("\n")  # not splitlines, which also cuts at form feeds
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
