"""Number formats, rounding into them, and the precision audit of a model.

Importing this package imports nothing heavy: each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from assay.precision.errors import AssayError

if TYPE_CHECKING:
    from assay.precision import formats
    from assay.precision.advice import Finding, advise, reliability
    from assay.precision.auditing import Audit, audit
    from assay.precision.prediction import Prediction
    from assay.precision.recommendation import Assignment
    from assay.precision.rounding import round_to

__all__ = [
    "AssayError",
    "Assignment",
    "Audit",
    "Finding",
    "Prediction",
    "advise",
    "audit",
    "formats",
    "reliability",
    "round_to",
]

_HOMES = {
    "Assignment": "assay.precision.recommendation",
    "Audit": "assay.precision.auditing",
    "Finding": "assay.precision.advice",
    "Prediction": "assay.precision.prediction",
    "advise": "assay.precision.advice",
    "audit": "assay.precision.auditing",
    "formats": "assay.precision.formats",
    "reliability": "assay.precision.advice",
    "round_to": "assay.precision.rounding",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
