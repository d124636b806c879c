"""Which rank is blamed, and with which exit code, when a job ends."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nestsp.train.launch import _report


def failure(rank: int, code: int, timestamp: int) -> ProcessFailure:
    ended = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="nowhere")
    ended.timestamp = timestamp
    return ended


@pytest.mark.parametrize(
    ("codes", "exit_code", "said"),
    [
        # (rank, exit code, when)
        ([(0, 2, 1), (1, 2, 1)], 2, ""),
        ([(0, 2, 2), (1, -15, 1)], 2, ""),
        ([(0, 3, 1), (1, 3, 1)], 1, ""),
        (
            [(0, 1, 2), (2, 1, 1)],
            1,
            "nestsp: rank 2 ended with exit code 1; its error is above; all ranks were ended\n",
        ),
        ([(0, 1, 1), (2, -9, 2)], 1, "nestsp: rank 2 was ended by signal 9 (SIGKILL); all ranks were ended\n"),
        (
            [(0, -15, 2), (1, 1, 1)],
            1,
            "nestsp: rank 1 ended with exit code 1; its error is above; all ranks were ended\n",
        ),
        ([(0, -15, 1), (1, 1, 2)], 1, "nestsp: rank 0 was ended by signal 15 (SIGTERM); all ranks were ended\n"),
        ([(3, -6, 1)], 1, "nestsp: rank 3 was ended by signal 6 (SIGABRT); all ranks were ended\n"),
    ],
    ids=str.split("refused refused-late said-itself raised killed-before-raised launcher-ended stranger-ended aborted"),
)
def test_the_rank_that_failed_first_is_named(
    codes: list[tuple[int, int, int]], exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report([failure(*each) for each in codes]) == exit_code
    assert capsys.readouterr().err == said
