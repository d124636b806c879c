"""Makes of a run's settings what it minimises, the user's own function among it, and tries that on a few numbers.

What would be wrong without a word later is found here: a loss of tokens that is no sum over them, or that counts tokens
without a target, would depend on the plan; a loss of sequences that differs between ranks would mix their gradients.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestsp.data.stream import DataState
from nestsp.errors import ConfigError, NestspError
from nestsp.execute.local import LocalTokens, TokenLoss, weighted_sum
from nestsp.execute.losses import SequenceLoss, SequenceSums, require_loss, try_loss
from nestsp.execute.objective import Objective
from nestsp.model.loss import IGNORED_TARGET
from nestsp.train.agreement import everywhere
from nestsp.train.prepare import Prepared, router_loss_coefficient
from nestsp.train.world import World

__all__ = ["load_function", "make_objective", "try_token_loss"]

# Of float32 sums of six numbers; and of float64 functions on processors of several kinds.
_ROUNDING = 1e-4
_ROUNDING_64 = 1e-9

_REFERENCE_HINT = ", or set train.reference: true if it compares with sums.reference_S"


def make_objective(prepared: Prepared, world: World) -> Objective:
    """What the run minimises; imports the user's module, if there is one. Every rank must call it.

    Raises:
        ConfigError: There is no such function, or it is no loss, or there is no factor of the auxiliary loss; on every
            rank.
    """
    train = prepared.config.train
    tried: list[float] = []

    def make() -> Objective:
        token_loss: TokenLoss = weighted_sum
        sequence_loss: SequenceLoss | None = None
        if train.token_loss is not None:
            token_loss = _checked(load_function("train.token_loss", train.token_loss))
            with _one_sentence("train.token_loss", train.token_loss):
                tried.append(try_token_loss(token_loss, world.device))
        if train.sequence_loss is not None:
            sequence_loss = load_function("train.sequence_loss", train.sequence_loss)
        coefficient = 0.0 if train.router_loss == "off" else router_loss_coefficient(prepared)
        return Objective(token_loss, sequence_loss, train.router_loss, coefficient)

    objective = world.together(make)
    if tried:
        _require_the_same("train.token_loss", "numbers", [(value,) for value in world.gather(tried[0])], _ROUNDING)
    if objective.sequence_loss is not None:
        _try_on_all_ranks(objective.sequence_loss, prepared, world)
    return objective


def load_function(key: str, name: str) -> Callable[..., Any]:
    """The function ``module:function``; the working directory is searched as `python -m` does it.

    Args:
        key: Of the setting.
        name: Its value.

    Raises:
        ConfigError: There is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ConfigError(f"{key} is {name!r}, but it must be module:function; write it as my_losses:preference")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that reads its arguments ends, if they are ours
        raise ConfigError(
            f"{key} is {name!r}, but importing {module_name} ended with {type(error).__name__}: "
            f"{' '.join(str(error).split())}; correct it, or run where the module lies"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} is {name!r}, but {module_name} has no function {function_name}; correct it")
    return function  # type: ignore[no-any-return]


def try_token_loss(loss: TokenLoss, device: torch.device) -> float:
    """Refuse a loss of tokens that would depend on which tokens a rank holds.

    Args:
        loss: Called with a filler, with six tokens, and with these in two parts.
        device: Of its tensors.

    Returns:
        What it gives for the six tokens.

    Raises:
        ConfigError: It is no sum over tokens, or counts tokens without a target.
    """

    def value(part: slice) -> float:
        nll_T = torch.tensor([0.0, 2.5, 0.75, 4.0, 1.25, 3.0, 0.5], device=device)[part].requires_grad_()
        ids = torch.arange(7, device=device)[part]
        targets = torch.where(ids == 0, IGNORED_TARGET, ids + 1)
        weights = torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1.0], device=device)[part]
        return loss(LocalTokens(ids, ids, targets, weights, torch.zeros_like(ids), len(ids)), nll_T).item()

    filler, whole, parts = value(slice(0, 1)), value(slice(1, 7)), [value(slice(1, 3)), value(slice(3, 7))]
    if filler != 0:
        raise ConfigError(
            f"train.token_loss gives {filler:g} for a token without a target, but it must give 0; multiply by "
            "(tokens.targets >= 0)"
        )
    if not abs(whole - sum(parts)) <= _ROUNDING * max(abs(whole), *map(abs, parts)):
        raise ConfigError(
            f"train.token_loss gives {whole:g} for six tokens, but {parts[0]:g} and {parts[1]:g} for two parts of "
            "them, and it must be a sum over tokens, which lie on many ranks; return the sum, which is divided once by "
            "the batch's target weight, or make it a train.sequence_loss"
        )
    return whole


def _try_on_all_ranks(loss: SequenceLoss, prepared: Prepared, world: World) -> None:
    """Call a loss of sequences on the run's first batch and likelihoods near 1 a token.

    Raises:
        ConfigError: It is no loss, or not the same on all ranks; on every rank.
    """
    batch, _ = prepared.stream.take(DataState())
    targets = prepared.samples.num_targets[np.array(batch.ids) % prepared.samples.num_samples]
    weight_S = torch.from_numpy(targets.astype(np.float64)).to(world.device)
    nll_S = weight_S * torch.linspace(0.5, 1.5, len(weight_S), dtype=torch.float64, device=world.device)
    reference_S = 1.1 * nll_S if prepared.config.train.reference else None
    if not weight_S.any():  # such a batch is not given to the loss
        return

    def attempt() -> tuple[float, ...]:
        with _one_sentence("train.sequence_loss", prepared.config.train.sequence_loss):
            return try_loss(loss, SequenceSums(batch.ids, nll_S, weight_S, reference_S))

    _require_the_same("train.sequence_loss", "sums", world.agree(attempt), _ROUNDING_64)


def _require_the_same(key: str, of: str, values: Sequence[tuple[float, ...]], rounding: float) -> None:
    """Refuse a loss that differs between ranks: value first, then derivatives."""
    for rank, value in enumerate(values):
        if not np.allclose(value, values[0], rtol=rounding, atol=rounding):
            also = ", with other derivatives," if len(value) > 1 else ""
            raise everywhere(
                ConfigError(
                    f"{key} gave {values[0][0]:.9g} on rank 0 and {value[0]:.9g} on rank {rank}{also} for the same "
                    f"{of}, but it must follow from its argument alone; leave out random numbers and the rank, and "
                    "read the same files on all hosts"
                )
            )


@contextmanager
def _one_sentence(key: str, name: str | None) -> Iterator[None]:
    """Say where a user's function failed.

    Raises:
        ConfigError: It raised something.
    """
    try:
        yield
    except NestspError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} is {name!r}, but when it was tried it ended with {type(error).__name__}: "
            f"{' '.join(str(error).split())} ({Path(last.filename).name}, line {last.lineno}); correct it"
            f"{_REFERENCE_HINT if 'NoneType' in str(error) and key == 'train.sequence_loss' else ''}"
        ) from error


def _checked(function: Callable[..., Any]) -> TokenLoss:
    def token_loss(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
        value: Tensor = function(tokens, nll_T)
        require_loss(value, "the result of train.token_loss", "its second argument")
        return value

    return token_loss
