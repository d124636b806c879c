"""What ``nestsp plan`` and ``nestsp simulate`` ask for alike: one definition of each option, and one value of all."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from nestsp.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # NumPy comes with it, and other commands need none
    from nestsp.data.lengths import OverLength

__all__ = ["PLANNER_NAMES", "PlanningOptions", "over_length_policy", "planner_names", "with_planning_options"]

# "all" leaves out flexsp, which takes seconds to minutes where the others take milliseconds.
PLANNER_NAMES = ("batch-adaptive", "basp", "disjoint", "flexsp", "nsp")
_FAST = tuple(name for name in PLANNER_NAMES if name != "flexsp")
_OVER_LENGTH: tuple[OverLength, ...] = ("drop", "truncate", "split", "error")


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """The options that both commands have; each field is one.

    Raises:
        ConfigError: One of them is what it cannot be.
    """

    planner: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"all, which is {', '.join(_FAST)}; or some of these and flexsp, with commas. flexsp solves programmes"
            " for seconds to minutes; all,flexsp adds it to the others.",
        ),
    ] = "all"
    max_length: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Limit of a sequence.")] = None
    over_length: Annotated[
        str,
        typer.Option(
            metavar="|".join(_OVER_LENGTH), help="What becomes of sequences over --max-length; they are counted."
        ),
    ] = "drop"
    seed: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="Of what is drawn from a built-in table, and of orders.")
    ] = 0
    memory: Annotated[
        float | None,
        typer.Option(min=1e-3, metavar="GIB", help="What a rank may use; by default 90 % of its device."),
    ] = None
    network: Annotated[
        float | None,
        typer.Option(min=1e-3, metavar="GBIT_PER_S", help="A host's network cards together, if not the profile's own."),
    ] = None
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH", help="Measures texts: bytes, a folder with a tokenizer.json, or a name on the Hub."
        ),
    ] = "bytes"

    def __post_init__(self) -> None:
        planner_names(self.planner)
        over_length_policy(self.over_length)
        for option in ("memory", "network"):
            value = getattr(self, option)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{option} is {value}, but it must be a number above 0; correct it")

    @property
    def planners(self) -> list[str]:
        """The planners asked for, each once."""
        return planner_names(self.planner)

    @property
    def policy(self) -> OverLength:
        """What becomes of sequences over the limit."""
        return over_length_policy(self.over_length)


def planner_names(text: str) -> list[str]:
    """The planners that an option asks for: ``all``, or names with commas between them.

    Raises:
        ConfigError: One of them is no planner.

    >>> planner_names("all,flexsp")
    ['batch-adaptive', 'basp', 'disjoint', 'nsp', 'flexsp']
    """
    names: list[str] = []
    for name in (name.strip() for name in text.split(",")):
        if name != "all" and name not in PLANNER_NAMES:
            raise ConfigError(
                f"--planner is {name!r}, but the planners are all, {', '.join(PLANNER_NAMES)}; name some of them, with "
                f"commas{did_you_mean(name, PLANNER_NAMES)}"
            )
        names += _FAST if name == "all" else [name]
    return list(dict.fromkeys(names))


def over_length_policy(text: str) -> OverLength:
    """What ``--over-length`` asks for.

    Raises:
        ConfigError: It is none of the policies.
    """
    for policy in _OVER_LENGTH:
        if text == policy:
            return policy
    raise ConfigError(
        f"--over-length is {text!r}, but the policies are {', '.join(_OVER_LENGTH)}; take one"
        f"{did_you_mean(text, _OVER_LENGTH)}"
    )


def with_planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: with an option for each field of `PlanningOptions` where it has ``options``."""
    hints, shared = (get_type_hints(of, include_extras=True) for of in (command, PlanningOptions))
    fields = dataclasses.fields(PlanningOptions)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name == "options":
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=shared[field.name]
                )
                for field in fields
            ]
        else:
            annotation = hints[parameter.name]
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        options = PlanningOptions(**{field.name: given.pop(field.name) for field in fields})
        command(**given, options=options)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called
