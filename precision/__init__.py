"""The precision audit of a model: what any choice of number formats for its parts costs, predicted and measured."""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay import formats
    from assay.formats.rounding import round_to
    from assay.precision.advice import Finding
    from assay.precision.auditing import Audit, advise, audit, reliability
    from assay.precision.baseline import Baseline, baselines
    from assay.precision.cache import Cache, fingerprint
    from assay.precision.choice.recommendation import Assignment
    from assay.precision.choice.roofline import Shape
    from assay.precision.prediction.quadratic_form import Prediction
    from assay.precision.sampling import Difference, MeasuredError, difference
    from assay.runtime.errors import AssayError

__all__ = [
    "AssayError",
    "Assignment",
    "Audit",
    "Baseline",
    "Cache",
    "Difference",
    "Finding",
    "MeasuredError",
    "Prediction",
    "Shape",
    "advise",
    "audit",
    "baselines",
    "difference",
    "fingerprint",
    "formats",
    "reliability",
    "round_to",
]

__getattr__, __dir__ = lazy(__name__)
