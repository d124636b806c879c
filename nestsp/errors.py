"""Every error that a user can cause, in one tree.

    NestspError
    ├── ConfigError        a setting is wrong, or two settings contradict each other
    ├── DataError          a corpus, tokenizer or store cannot be read or used
    ├── InfeasibleError    no plan fits the batch into the ranks
    ├── PlanError          a plan breaks a rule that every plan must keep
    ├── ModelError         a model asks for something that nestsp cannot run exactly
    ├── CheckpointError    a checkpoint is missing, damaged, or of another run
    ├── LaunchError        the ranks were not started as the run needs them
    └── NumericsError      a loss or a gradient is not a finite number

A message is one sentence: *subject (with its place) is value, but rule; remedy.* What a user did is raised as one of
these where it is first known and before any collective. What a programmer did is an ``assert``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InfeasibleError",
    "LaunchError",
    "ModelError",
    "NestspError",
    "NumericsError",
    "PlanError",
    "did_you_mean",
]


class NestspError(Exception):
    """Something a user can mend. The command line prints its sentence and exits with code 2.

    Attributes:
        raised_on_all_ranks: Every rank of the job raises it alike, so that one of them says it for all.
    """

    raised_on_all_ranks: bool = False


class ConfigError(NestspError):
    """A setting is wrong, or two settings contradict each other."""


class DataError(NestspError):
    """A corpus, tokenizer or token store cannot be read or used."""


class InfeasibleError(NestspError):
    """No plan fits the batch into the ranks. Names the sequence, what it needs, and what would make it fit."""


class PlanError(NestspError):
    """A plan breaks a rule that every plan must keep."""


class ModelError(NestspError):
    """A model asks for something that nestsp cannot run exactly."""


class CheckpointError(NestspError):
    """A checkpoint is missing, damaged, or of another run."""


class LaunchError(NestspError):
    """The ranks were not started as the run needs them."""


class NumericsError(NestspError):
    """A loss or a gradient is not a finite number."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or an empty string.

    >>> did_you_mean("nps", ["static", "nsp"])
    "; did you mean 'nsp'?"
    >>> did_you_mean("zzz", ["static", "nsp"])
    ''
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
