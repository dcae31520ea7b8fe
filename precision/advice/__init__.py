"""What an audit tells about a model beside its errors: findings, each with a remedy, and where not to trust it.

finding (kinds and their order) · ranges (overflow, underflow, static scales) · outliers · experts · effect (what a
choice of scales can do, what has no effect) · local (errors of one site's output) · passes · reliability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.precision.advice.effect import dead, no_gradient, scaling, tied
from assay.precision.advice.experts import near_ties, unseen_experts
from assay.precision.advice.finding import KINDS, Finding, ordered
from assay.precision.advice.outliers import channels, rows_and_columns, tokens
from assay.precision.advice.ranges import nonfinite, overflows, static_scales, underflows
from assay.precision.advice.reliability import reliability

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["KINDS", "Finding", "advise", "reliability"]

_DETECTORS = (
    nonfinite,
    overflows,
    no_gradient,
    near_ties,
    unseen_experts,
    static_scales,
    underflows,
    channels,
    rows_and_columns,
    tokens,
    scaling,
    dead,
    tied,
)


def advise(audit: Audit) -> list[Finding]:
    """All findings of an audit: what breaks first, then what a prediction can't see, what costs most, and notes.

    No assignment is run; one more backward pass over the calibration data gives the random control.
    """
    return ordered([finding for detector in _DETECTORS for finding in detector(audit)])
