"""Triton kernels on a CPU, with the numbers that a GPU gives and every access to memory checked."""

from assay.verify.interpreter.faults import SanitizerError
from assay.verify.interpreter.session import (
    KNOWN_VERSIONS,
    UnknownTriton,
    Watch,
    check_emulated,
    emulated_device,
    emulating,
    faithful,
    sanitized,
    triton_is_loaded,
)

__all__ = [
    "KNOWN_VERSIONS",
    "SanitizerError",
    "UnknownTriton",
    "Watch",
    "check_emulated",
    "emulated_device",
    "emulating",
    "faithful",
    "sanitized",
    "triton_is_loaded",
]
