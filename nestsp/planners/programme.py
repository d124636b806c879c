"""FlexSP's mixed-integer programme of one microbatch, solved by HiGHS.

Deterministic: one thread, and a limit on nodes in place of time. Imports the solver, so who may need no programme
imports this late.
"""

from __future__ import annotations

import highspy
import numpy as np
import numpy.typing as npt

__all__ = ["solve_programme"]

Floats = npt.NDArray[np.float64]


class _Silent(highspy.Highs):
    """HiGHS would write its banner to standard output when it is made, before any option can be set."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def solve_programme(
    seconds: Floats,
    sizes: Floats,
    counts: npt.NDArray[np.int64],
    levels: npt.NDArray[np.int64],
    degrees: npt.NDArray[np.int64],
    free_bytes: float,
    upper_s: float,
    max_nodes: int,
) -> npt.NDArray[np.int64] | None:
    """Solve one microbatch: int64 [groups, buckets], sequences of each bucket in each group; None if none was found.

    Args:
        seconds: [levels, buckets], seconds of one sequence of a bucket.
        sizes: The same in bytes on each rank.
        counts: [buckets], sequences of each bucket.
        levels: [groups], the level of each possible group.
        degrees: [levels], ranks of a group.
        free_bytes: What a rank may hold.
        upper_s: A time that is known to be possible.
        max_nodes: Nodes that the solver may look at.
    """
    num_groups, num_buckets = len(levels), len(counts)
    # Columns: the time; for each group whether it exists, then its sequences of each bucket.
    width = 1 + num_buckets
    num_columns = 1 + num_groups * width
    exists = 1 + width * np.arange(num_groups)
    holds = exists[:, None] + 1 + np.arange(num_buckets)
    upper = np.ones(num_columns)
    upper[0] = upper_s
    fits = (seconds <= upper_s) & (sizes <= free_bytes)
    upper[holds] = np.where(fits[levels], counts, 0)
    rows: list[tuple[float, float, npt.NDArray[np.int64], Floats]] = []
    infinity = highspy.kHighsInf
    for p, level in enumerate(levels):
        columns = np.concatenate([[0], holds[p]])
        rows.append((-infinity, 0.0, columns, np.concatenate([[-1.0], seconds[level]])))
        columns = np.concatenate([[exists[p]], holds[p]])
        rows.append((-infinity, 0.0, columns, np.concatenate([[-1.0], sizes[level] / free_bytes])))
        if p and levels[p - 1] == level:  # groups of one degree in order
            rows.append((0.0, infinity, exists[[p - 1, p]], np.array([1.0, -1.0])))
    for q in range(num_buckets):
        rows.append((float(counts[q]), float(counts[q]), holds[:, q], np.ones(num_groups)))
    rows.append((-infinity, float(degrees.max()), exists, degrees[levels].astype(float)))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, len(rows)
    model.col_cost_ = np.concatenate([[1.0], np.zeros(num_columns - 1)])
    model.col_lower_, model.col_upper_ = np.zeros(num_columns), upper
    model.row_lower_ = np.array([row[0] for row in rows])
    model.row_upper_ = np.array([row[1] for row in rows])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row[2]) for row in rows])])
    model.a_matrix_.index_ = np.concatenate([row[2] for row in rows])
    model.a_matrix_.value_ = np.concatenate([row[3] for row in rows])
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kContinuous] + [kinds.kInteger] * (num_columns - 1)
    solver = _Silent()  # type: ignore[no-untyped-call]
    for option, value in (
        ("threads", 1),
        ("random_seed", 0),
        ("mip_max_nodes", max_nodes),
        ("mip_rel_gap", 0.005),
    ):
        solver.setOptionValue(option, value)
    solver.passModel(model)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = np.array(solver.getSolution().col_value)
    chosen: npt.NDArray[np.int64] = np.rint(values[holds]).astype(np.int64)
    return chosen
