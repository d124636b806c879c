"""Measurements with targets; each file is a command, results are in docs/benchmarks.md."""
