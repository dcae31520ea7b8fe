"""What can go wrong in a verification, one class per thing that the caller can mend."""

from __future__ import annotations

from assay.runtime.errors import AssayError, SettingError

__all__ = [
    "ContractError",
    "DeviceLost",
    "ReproError",
    "SettingError",
    "TableError",
    "TargetError",
    "VerificationError",
]


class VerificationError(AssayError, AssertionError):
    """A kernel did not pass; the message is the verdict's report."""


class ContractError(AssayError, ValueError):
    """A contract that names something unknown, or contradicts itself."""


class DeviceLost(AssayError, RuntimeError):
    """An earlier kernel has left this process without its device."""


class ReproError(AssayError, ValueError):
    """A repro line that does not parse."""


class TargetError(AssayError, ValueError):
    """A kernel named ``package.module:function`` that cannot be loaded."""


class TableError(AssayError, ValueError):
    """A table of kernels that does not say what is needed to examine them."""


class BenchError(AssayError, ValueError):
    """A bench that can't be run, or a record of one that can't be read or compared."""


class TuneError(AssayError, ValueError):
    """A space of choices that can't be searched, or a record of a search that can't be read or doesn't fit."""
