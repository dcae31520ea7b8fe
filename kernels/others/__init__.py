"""Adapters of other projects' kernels to the signatures of the specs, if a line of `configs/others.toml` is too short.

A module is imported only if the package that it adapts is installed.
"""
