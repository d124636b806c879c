from __future__ import annotations

import pytest

from benchmarks.shaped_links import LAYERS, LENGTHS, TREE, make_cost, make_plan, predicted_s

RATE = 20e6  # bytes/s between hosts
COST = make_cost((0.001, RATE), (0.0005, 1e9))


def test_the_prediction_in_turn_is_the_sum_of_paced_attention_and_exchanges_and_nothing_else() -> None:
    """Every rank does the same here, and the pairs' first exchange leaves when the root is done."""
    plan = make_plan()
    expected = 0.0
    for level, length in enumerate((LENGTHS[0], LENGTHS[1], LENGTHS[3])):
        heads = COST.shape.num_heads / TREE.degree(level)
        for direction in ("forward", "backward"):
            expected += float(COST.compute.attention_s(direction, heads, length, length**2, length))
        for links in (COST.comm.forward(level), COST.comm.backward(level)):
            expected += sum(link.seconds(length) for link in links)
    assert predicted_s(COST, plan, streaming=False) == pytest.approx(LAYERS * expected, rel=1e-4)


def test_streaming_is_predicted_to_gain_enough_to_be_measured() -> None:
    plan = make_plan()
    assert predicted_s(COST, plan, streaming=False) / predicted_s(COST, plan, streaming=True) > 1.25
