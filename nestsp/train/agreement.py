"""One outcome for all ranks: what is refused on one is refused on all, by the same sentence, and no rank waits on.

Price: one gather of a few bytes over a CPU group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from nestsp import errors
from nestsp.errors import CheckpointError, NestspError

__all__ = ["agree", "everywhere", "one_sentence", "reason", "together"]

T = TypeVar("T")
E = TypeVar("E", bound=NestspError)


def everywhere(error: E) -> E:
    """Mark an error that every rank raises alike, so that rank 0 alone says it."""
    error.raised_on_all_ranks = True
    return error


def agree(group: dist.ProcessGroup, action: Callable[[], T]) -> list[T]:
    """Do something on every rank that may be refused on some; then it is refused on all.

    Args:
        group: A CPU group of all ranks.
        action: This rank's work; may do no collectives.

    Returns:
        Every rank's result, by rank.

    Raises:
        NestspError: The error of the lowest rank that had one, on every rank; named by the rank if others had another.
    """
    result: T | None = None
    mine: tuple[str, str] | None = None
    try:
        result = action()
    except NestspError as error:
        mine = (type(error).__name__, str(error))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (mine, result), group=group)
    errors_by_rank = [error for error, _ in outcomes]
    for rank, outcome in enumerate(errors_by_rank):
        if outcome is not None:
            name, message = outcome
            alike = all(other == outcome for other in errors_by_rank)
            shared: NestspError = getattr(errors, name)(message if alike else f"rank {rank}: {message}")
            raise everywhere(shared)
    return [value for _, value in outcomes]


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """As `agree`, for a result that stays on its rank."""
    box: list[T] = []
    agree(group, lambda: box.append(action()))
    return box[0]


@contextmanager
def one_sentence(task: str, remedy: str) -> Iterator[None]:
    """Say of whatever goes wrong in some work on files what could not be done, why, and what to do.

    Args:
        task: Subject and verb, such as ``step-000003 could not be saved``.
        remedy: What the user can do; not used where the work raises a sentence of its own.

    Raises:
        CheckpointError: The work raised something.
    """
    try:
        yield
    except NestspError:
        raise
    except Exception as error:
        raise CheckpointError(f"{task}: {reason(error)}; {remedy}") from error


def reason(error: BaseException) -> str:
    """Why something failed, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return (text if len(text) <= 300 else text[:297] + "...") or type(error).__name__
