"""Losses by name: what a run is given is found, tried, and refused before anything is computed with it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nestsp
from nestsp.errors import ConfigError, NumericsError
from nestsp.execute.local import LocalTokens, weighted_sum
from nestsp.execute.losses import SequenceSums, try_loss
from nestsp.train.objective import load_function, try_token_loss
from tests.e2e.runs import tiny

CPU = torch.device("cpu")
Loss = Callable[[LocalTokens, Tensor], Tensor]


def test_a_function_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    (tmp_path / "losses_of_a_test.py").write_text("def twice(tokens, nll):\n    return 2 * nll.sum()\n")
    assert load_function("train.token_loss", "losses_of_a_test:twice")(None, torch.ones(3)).item() == 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_losses", "'my_losses', but it must be module:function; write it as my_losses:preference"),
        ("my losses:f", "'my losses:f', but it must be module:function"),
        ("./my_losses.py:f", "'./my_losses.py:f', but it must be module:function"),
        ("no_such_module:f", "importing no_such_module ended with ModuleNotFoundError: No module named 'no_such_modu"),
        ("a_broken_module:f", "importing a_broken_module ended with ZeroDivisionError: division by zero; correct it"),
        ("a_script:f", "importing a_script ended with SystemExit: usage; correct it"),
        ("json:no_such", "but json has no function no_such; correct it"),
        ("json:__doc__", "but json has no function __doc__; correct it"),
    ],
)
def test_a_function_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "a_broken_module.py").write_text("1 / 0\n")
    (tmp_path / "a_script.py").write_text("raise SystemExit('usage')\n")
    with pytest.raises(ConfigError) as caught:
        load_function("train.token_loss", name)
    assert said in str(caught.value)
    assert str(caught.value).startswith("train.token_loss is ")


def focal(tokens: LocalTokens, nll: Tensor) -> Tensor:
    return (tokens.weights * (1 - (-nll).exp()).square() * nll).sum()


def documented() -> str:
    """The module that the page about losses shows."""
    page = (Path(nestsp.__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n# my_losses\.py\n(.*?)```", page, re.S)
    assert isinstance(code, str)
    return code


def test_the_documented_losses_are_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "documented_losses.py").write_text(documented())
    try_token_loss(load_function("train.token_loss", "documented_losses:focal"), CPU)
    sums = SequenceSums((4, 5), torch.tensor([6.0, 4.0]).double(), torch.tensor([3.0, 4.0]).double())
    loss, *slopes = try_loss(load_function("train.sequence_loss", "documented_losses:preference"), sums)
    assert loss == pytest.approx(-math.log(1 / (1 + math.exp(2.0))))  # the rejected one is likelier by 1 a token
    assert slopes[0] > 0 > slopes[1]


@pytest.mark.parametrize("loss", [weighted_sum, focal])
def test_a_sum_over_tokens_is_taken(loss: Loss) -> None:
    try_token_loss(loss, CPU)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda tokens, nll: nll.mean(), "it must be a sum over tokens, which lie on many ranks"),
        (
            lambda tokens, nll: (nll * tokens.weights).sum() / tokens.weights.sum(),
            "it must be a sum over tokens, which lie on many ranks",
        ),
        (lambda tokens, nll: (nll - 3).square().sum(), "gives 9 for a token without a target, but it must give 0"),
        (lambda tokens, nll: nll.sum() * torch.nan, "gives nan for a token without a target"),
    ],
    ids=["mean", "weighted mean", "fillers", "nan"],
)
def test_a_loss_of_tokens_that_would_depend_on_the_plan_is_refused(loss: Loss, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^train\.token_loss gives ") as caught:
        try_token_loss(loss, CPU)
    assert said in str(caught.value)


def test_a_loss_of_sequences_must_be_a_scalar_with_a_finite_gradient() -> None:
    sums = SequenceSums((4, 7), torch.tensor([3.0, 1.0]).double(), torch.tensor([3.0, 1.0]).double())
    assert try_loss(lambda sums: (sums.nll_S * torch.tensor([2, -1])).sum(), sums) == (5.0, 2.0, -1.0)
    bad: list[tuple[Callable[[SequenceSums], Any], str]] = [
        (lambda sums: sums.nll_S, r"is a tensor \[2\], but it must be a scalar tensor that follows from nll_S; end it"),
        (lambda sums: sums.nll_S.detach().sum(), "is a tensor without gradient, but"),
        (lambda sums: sums.nll_S.sum().item(), "is float, but"),
    ]
    for loss, said in bad:
        with pytest.raises(ConfigError, match=said):
            try_loss(loss, sums)
    with pytest.raises(NumericsError, match=r"the loss is 0\.0, and its derivative is not finite for sequences \[4\]"):
        try_loss(lambda sums: (sums.nll_S[0] - 3).sqrt(), sums)


def test_a_reference_that_no_loss_compares_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.reference is true, but there is no train\.sequence_loss that com"):
        tiny("train.reference=true")


def test_a_run_has_one_loss() -> None:
    with pytest.raises(ConfigError, match=r"train has token_loss 'a:b' and sequence_loss 'c:d', but a run has one"):
        tiny("train.token_loss=a:b", "train.sequence_loss=c:d")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.over_length=drop", r"data\.over_length is drop, but data\.samples_together is 2, and a run of them wo"),
        ("data.over_length=split", r"data\.over_length is split, but data\.samples_together is 2"),
        ("data.sequences_per_step=3", r"data\.sequences_per_step is 3, but data\.samples_together is 2, and a step"),
    ],
)
def test_what_would_tear_samples_that_stay_together_is_refused(override: str, said: str) -> None:
    size = ("data.tokens_per_step=null",) if "sequences_per_step" in override else ()
    with pytest.raises(ConfigError, match=said):
        tiny("data.samples_together=2", override, *size)
