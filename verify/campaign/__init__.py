"""Campaigns: many examinations from a table, in worker processes, resumed where they were stopped.

In: a TOML table of kernels. Out: rows of verdicts. Called by `assay verify`, `assay survey`.
"""
