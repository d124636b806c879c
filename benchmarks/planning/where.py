"""Hardware and commit of a figure. Imports no torch, unlike `benchmarks.common`."""

from __future__ import annotations

import os
import platform
import subprocess

__all__ = ["where"]


def where() -> str:
    """One line: machine, Python, commit and whether the tree differs from it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, commit "
        f"{commit.stdout.strip() or 'unknown'}{' with changes' if changed.strip() else ''}"
    )
