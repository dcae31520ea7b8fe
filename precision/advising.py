"""What an audit finds beside its numbers: where it breaks, and where its prediction says nothing."""

from collections.abc import Mapping

from assay.precision.advice import Finding, findings
from assay.precision.advice.passes import random_control
from assay.precision.auditing import Audit


def advise(audit: Audit) -> list[Finding]:
    """All findings of an audit: what breaks first, then what a prediction can't see, what costs most, and notes.

    No assignment is run; one more backward pass over the calibration data gives the random control.
    """
    predictor = audit.predictor
    given = audit.model, audit.batches, predictor
    return findings(predictor, lambda menus: random_control(*given, menus, audit.chosen_on.chain))


def reliability(audit: Audit, assignment: Mapping[str, str]) -> list[str]:
    """Reasons to measure this assignment rather than to trust its prediction, a sentence each; none: trust it.

    Runs one backward pass over the calibration data the first time it is asked about a model with routers, and, like
    `predict`, the calibration where there is none yet. Raises BadAssignment, UnknownScheme.
    """
    return audit.reliability(assignment)
