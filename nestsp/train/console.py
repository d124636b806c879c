"""The screen of rank 0: a banner, a line a step, a progress bar below them. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Screen"]

# Where there is no terminal: work that is done before the first line needs none.
_FIRST_LINE_S = 3.0
_LINES_EVERY_S = 30.0


class Screen:
    """Writes for people, on one rank; other ranks have a silent one."""

    def __init__(self, *, silent: bool = False) -> None:
        self._console = Console(quiet=silent, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """Write some lines; above the progress bar if there is one."""
        self._console.print(text)

    @contextmanager
    def progress(self, what: str, total: int | None, done: int = 0, *, lines: bool = False) -> Iterator[Bar]:
        """Show a bar while something goes on.

        Args:
            what: Its name.
            total: How much there is of it; None if nobody knows.
            done: How much is done already.
            lines: Where there is no terminal, write a line now and then; otherwise nothing is shown there.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        hidden = self._console.quiet or not self._console.is_terminal
        with Progress(*columns, console=self._console, disable=hidden, transient=True) as progress:
            say = self.say if lines and hidden and not self._console.quiet else None
            yield Bar(progress, what, total, done, say)


class Bar:
    """One progress bar, or its lines."""

    def __init__(
        self, progress: Progress, what: str, total: int | None, done: int, say: Callable[[str], None] | None
    ) -> None:
        self._progress, self._what, self._say = progress, what, say
        self._task = progress.add_task(what, total=total, completed=done)
        self._next_line_at = time.monotonic() + _FIRST_LINE_S

    def set(self, done: int, total: int | None) -> None:
        """Move to a place."""
        self._progress.update(self._task, completed=done, total=total)
        if self._say is not None and time.monotonic() >= self._next_line_at:
            self._say(f"{self._what}: {done:,}" if not total else f"{self._what}: {done / total:.0%}")
            self._next_line_at = time.monotonic() + _LINES_EVERY_S
