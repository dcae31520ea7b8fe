"""What an audit tells about a model beside its errors: findings, each with a remedy, and where not to trust it.

In: what was observed, the predictor of errors, the model and its batches for one more pass. Out: a list of `Finding`,
or of sentences. `auditing` calls.

finding (kinds and their order) · ranges (overflow, underflow, static scales) · outliers · experts · effect (what a
choice of scales can do, what has no effect) · local (errors of one site's output) · passes · reliability.
"""

from assay.precision.advice.effect import dead, no_gradient, scaling, tied
from assay.precision.advice.experts import near_ties, unseen_experts
from assay.precision.advice.finding import KINDS, Finding, ordered
from assay.precision.advice.outliers import channels, rows_and_columns, tokens
from assay.precision.advice.passes import Control
from assay.precision.advice.ranges import nonfinite, overflows, static_scales, underflows
from assay.precision.advice.reliability import reasons
from assay.precision.prediction.predictor import Predictor

__all__ = ["KINDS", "Finding", "findings", "reasons"]

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
    dead,
    tied,
)


def findings(predictor: Predictor, control: Control) -> list[Finding]:
    """What breaks first, then what a prediction can't see, what costs most, and notes. ``control`` is asked at most
    once, for sites whose scales may be to blame."""
    found = [finding for detector in _DETECTORS for finding in detector(predictor, predictor.observed)]
    return ordered([*found, *scaling(predictor, control)])
