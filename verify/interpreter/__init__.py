"""Triton kernels on a CPU, with the numbers that a GPU gives."""

from assay.verify.interpreter.session import faithful, faithful_where_used

__all__ = ["faithful", "faithful_where_used"]
