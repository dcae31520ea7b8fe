"""Triton kernels on a CPU, with the numbers that a GPU gives."""

from assay.verify.interpreter.session import KNOWN_VERSIONS, UnknownTriton, faithful, triton_is_loaded

__all__ = ["KNOWN_VERSIONS", "UnknownTriton", "faithful", "triton_is_loaded"]
