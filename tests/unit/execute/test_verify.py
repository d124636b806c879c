"""The comparison itself: what it must not let pass."""

from __future__ import annotations

import math

import torch

from nestsp.execute.verify import Gradients, compare_gradients, parameter_group

RIGHT = {"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([1e-9]), "c.weight": None}
EXPERTS = {(0, 7, 0): (1, 2), (0, 7, 1): (0, 3)}


def test_equal_gradients_pass() -> None:
    reference = Gradients(2.0, RIGHT, EXPERTS)
    result = compare_gradients(reference, reference, 4)
    assert result.passes(0.0)
    assert result.loss == 0.5
    assert result.norm == 1.25
    assert result.num_routed == 2


def test_each_kind_of_difference_is_seen() -> None:
    reference = Gradients(2.0, RIGHT, EXPERTS)
    for planned in (
        Gradients(2.1, RIGHT, EXPERTS),
        Gradients(math.nan, RIGHT, EXPERTS),
        Gradients(2.0, {**RIGHT, "a.weight": torch.tensor([3.0, 4.1])}, EXPERTS),
        Gradients(2.0, {**RIGHT, "a.weight": torch.tensor([3.0, math.nan])}, EXPERTS),
        Gradients(2.0, {**RIGHT, "a.weight": None}, EXPERTS),
        Gradients(2.0, {**RIGHT, "c.weight": torch.ones(1)}, EXPERTS),
        Gradients(2.0, {**RIGHT, "d.weight": torch.ones(1)}, EXPERTS),
        Gradients(2.0, {k: v for k, v in RIGHT.items() if k != "a.weight"}, EXPERTS),
        Gradients(2.0, RIGHT, {**EXPERTS, (0, 7, 1): (0, 2)}),
        Gradients(2.0, RIGHT, {(0, 7, 0): (1, 2)}),
    ):
        assert not compare_gradients(planned, reference, 4).passes(1e-3), planned


def test_rounding_of_a_gradient_that_is_nearly_nothing_is_no_error() -> None:
    reference = Gradients(2.0, RIGHT, {})
    planned = Gradients(2.0, {**RIGHT, "b.weight": torch.tensor([2e-9])}, {})
    assert compare_gradients(planned, reference, 4).worst < 1e-3  # of a millionth of the whole gradient
    missing = Gradients(2.0, {**RIGHT, "c.weight": torch.zeros(3)}, {})
    assert compare_gradients(missing, reference, 4).passes(0.0)  # a missing gradient counts as zeros


def test_parameter_groups_leave_out_the_layer() -> None:
    assert parameter_group("model.layers.11.mlp.experts.gate_up_proj") == "mlp.experts.gate_up_proj"
    assert parameter_group("model.norm.weight") == "norm"
