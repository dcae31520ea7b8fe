"""Triton kernels on a CPU, with the numbers that a GPU gives and every access to memory checked.

In: a Triton launch, inside ``with faithful():`` or an examination. Out: the results that Triton's NVIDIA backend
gives, and a `SanitizerError` at the first access that isn't right. Called by users (`faithful`), by the plugin and
by `assay.verify.harness`; usable alone.
"""

from assay.interpreter.assignment import Assignment, Choice, Configs
from assay.interpreter.errors import DependentPrograms, NotInterpreted, SanitizerError
from assay.interpreter.fake_cuda.world import pretend_cuda, pretended, put_on_device, suspended
from assay.interpreter.numerics.emission import NVIDIA, Emission
from assay.interpreter.replacing import lasting
from assay.interpreter.session import (
    KNOWN_VERSIONS,
    UnknownTriton,
    Watch,
    assigned,
    check_emulated,
    device_to_pretend,
    emulated_device,
    emulated_emission,
    emulating,
    faithful,
    sanitized,
    triton_is_loaded,
)

__all__ = [
    "KNOWN_VERSIONS",
    "NVIDIA",
    "Assignment",
    "Choice",
    "Configs",
    "DependentPrograms",
    "Emission",
    "NotInterpreted",
    "SanitizerError",
    "UnknownTriton",
    "Watch",
    "assigned",
    "check_emulated",
    "device_to_pretend",
    "emulated_device",
    "emulated_emission",
    "emulating",
    "faithful",
    "lasting",
    "pretend_cuda",
    "pretended",
    "put_on_device",
    "sanitized",
    "suspended",
    "triton_is_loaded",
]
