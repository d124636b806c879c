"""How long a person waits for the first line of ``nestsp plan``, and for all of it.

    python -m benchmarks.planning.first_output [--runs 10]

Measured here, from the start of a new process. Wall time means something only on an otherwise idle machine, so the load
is printed, and the CPU time that the process had used by then (Linux).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.planning.where import where

COMMAND = ("plan", "wikipedia", "--cluster", "8x8:h100", "--model", "qwen3-30b-a3b")


def measure() -> tuple[float, float, float]:
    """Seconds until the first line, CPU seconds until then, and seconds until the end."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "nestsp", *COMMAND], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        first = time.perf_counter() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user and in kernel mode
        process.stdout.read()
    return first, cpu_s, time.perf_counter() - began


def main() -> None:
    """Measure and print least, median and most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    given = parser.parse_args()
    measure()  # reads everything from disk once
    times = [measure() for _ in range(given.runs)]
    print(f"{where()}, load {os.getloadavg()[0]:.1f}; nestsp {' '.join(COMMAND)}")
    for name, values in zip(("first line", "CPU time until then", "all of it"), zip(*times, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f}, {given.runs} runs)")


if __name__ == "__main__":
    main()
