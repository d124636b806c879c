"""Exact attention of nested groups: kernels, what each group exchanges, and the driver that interleaves the groups."""
