"""Campaigns: examine the kernels of a table in worker processes, resuming where an earlier run stopped.

In: a TOML table of kernels. Out: rows of verdicts. Called by `assay verify`, `assay survey`.
"""
