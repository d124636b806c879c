"""The screen of rank 0: a banner, a line a step, a progress bar below them. Plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Screen"]


class Screen:
    """Writes for people, on one rank; other ranks have a silent one."""

    def __init__(self, *, silent: bool = False) -> None:
        self._console = Console(quiet=silent, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """Write some lines; above the progress bar if there is one."""
        self._console.print(text)

    @contextmanager
    def progress(self, what: str, total: int | None, done: int = 0) -> Iterator[Bar]:
        """Show a bar while something goes on; nothing where there is no terminal."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        hidden = self._console.quiet or not self._console.is_terminal
        with Progress(*columns, console=self._console, disable=hidden, transient=True) as progress:
            yield Bar(progress, what, total, done)


class Bar:
    """One progress bar."""

    def __init__(self, progress: Progress, what: str, total: int | None, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, completed=done)

    def set(self, done: int, total: int | None) -> None:
        """Move to a place."""
        self._progress.update(self._task, completed=done, total=total)
