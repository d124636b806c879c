"""The example of a loss of whole sequences, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import nestsp
from tests.e2e.commands import TORCHRUN, run

EXAMPLE = Path(nestsp.__file__).parents[1] / "examples" / "preference.py"


def test_the_preference_example_learns_its_pairs_on_two_ranks(tmp_path: Path) -> None:
    result = run(tmp_path, "--standalone", "--nproc-per-node", "2", str(EXAMPLE), program=TORCHRUN)
    assert result.code == 0, result.out + result.err
    values = [float(value) for value in re.findall(r"^step \d/8  loss (\S+) ", result.out, re.M)]
    assert len(values) == 8
    assert values[0] == 0.6931  # log 2: no preference yet
    assert values[-1] < 0.3
    assert result.out.endswith("chosen preferred 100%\n")
