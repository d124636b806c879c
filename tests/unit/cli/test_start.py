"""What planning commands load, and when: users wait for the first line, and planning needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Runs the command line; the last line of standard error is what was loaded at the first write and at the end.
OBSERVED = """
import json, sys

class Screen:
    first = None

    def write(self, text):
        if text.strip() and Screen.first is None:
            Screen.first = sorted(sys.modules)
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False

sys.stdout = Screen()
from nestsp.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps([Screen.first, sorted(sys.modules)]), file=sys.stderr)
"""


def loaded(folder: Path, *arguments: str) -> tuple[set[str], set[str]]:
    """Modules at the first line that a command prints, and at its end."""
    done = subprocess.run(
        [sys.executable, "-c", OBSERVED, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stderr.splitlines()[-1])
    return set(first), set(last)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_first_line_comes_before_anything_slow_is_loaded_and_torch_never(command: str, tmp_path: Path) -> None:
    options = ("--cluster", "1x2:h100", "--model", "qwen3-0.6b", "--max-tokens", "20000", "--planner", "nsp")
    batches = ("--batches", "1") if command == "simulate" else ()
    first, last = loaded(tmp_path, command, "github", *options, *batches)
    assert "numpy" in first
    assert not {"nestsp.planners", "nestsp.simulate", "nestsp.config", "highspy", "tokenizers", "rich.progress"} & first
    assert "nestsp.planners.search" in last
    assert not {"torch", "transformers", "matplotlib", "pyarrow"} & last
