"""Makes of a run's settings what it minimises, the user's own functions among it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nestsp.errors import ConfigError
from nestsp.execute.local import LocalTokens, TokenLoss, weighted_sum
from nestsp.execute.losses import require_loss
from nestsp.execute.objective import Objective
from nestsp.train.prepare import Prepared, router_loss_coefficient

__all__ = ["make_objective"]


def make_objective(prepared: Prepared) -> Objective:
    """What the run minimises; imports the user's module, if there is one.

    Raises:
        ConfigError: There is no such function, or no factor of the auxiliary loss.
    """
    train = prepared.config.train
    sequence_loss = None if train.sequence_loss is None else _load("train.sequence_loss", train.sequence_loss)
    token_loss = weighted_sum if train.token_loss is None else _checked(_load("train.token_loss", train.token_loss))
    coefficient = 0.0 if train.router_loss == "off" else router_loss_coefficient(prepared)
    return Objective(token_loss, sequence_loss, train.router_loss, coefficient)


def _checked(function: Callable[..., Any]) -> TokenLoss:
    def token_loss(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
        value: Tensor = function(tokens, nll_T)
        require_loss(value, "train.token_loss's result", "nll")
        return value

    return token_loss


def _load(key: str, name: str) -> Callable[..., Any]:
    """The function ``module:function``; the working directory is searched as `python -m` does it.

    Raises:
        ConfigError: There is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ConfigError(f"{key} is {name!r}, but it must be module:function, such as my_losses:preference")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{key} is {name!r}, but importing {module_name} ended with {type(error).__name__}: "
            f"{' '.join(str(error).split())}; correct it, or run where the module lies"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} is {name!r}, but {module_name} has no function {function_name}; correct it")
    return function  # type: ignore[no-any-return]
