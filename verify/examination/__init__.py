"""Examination: a kernel against its op, over fixed phases and fuzzed cases.

In: a kernel, an op and settings. Out: a `Verdict`. Called by users, the pytest plugin, campaigns and `mutation`.
"""
