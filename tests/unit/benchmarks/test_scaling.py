from __future__ import annotations

from benchmarks.planning.scaling import HEAD, PLANNERS, measure


def test_a_size_has_a_line_for_each_planner_and_the_nested_one_is_closer_to_the_bound() -> None:
    lines, slowest = measure(64, 1)
    assert [line[HEAD.index("planner")] for line in lines] == list(PLANNERS)
    assert all(len(line) == len(HEAD) for line in lines)
    adaptive, nested = (float(line[HEAD.index("to bound")].strip("+%")) for line in lines)
    assert 0 <= nested <= adaptive
    assert slowest > 0
