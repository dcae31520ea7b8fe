"""Where the quadratic form says nothing of an assignment, so that only a measurement does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from assay.precision.advice.experts import experts_of
from assay.precision.advice.passes import routing_of
from assay.precision.model.running import batch_size

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["reliability"]

_FLIPS = 0.01
"""Share of changed choices of experts that a prediction is trusted up to."""
_FEW = 8
"""Sequences from which on correlations are told from chance."""
_WIDE = 5.0
"""Factor either way beyond which an interval says little."""
_BEYOND = 3.0
"""Factor beyond the calibrated range up to which its line is trusted."""


def reliability(audit: Audit, assignment: Mapping[str, str]) -> list[str]:
    """Reasons to measure this assignment rather than to trust its prediction, a sentence each; none: trust it.

    Runs one backward pass over the calibration data the first time it is asked about a model with routers, and, like
    `predict`, the calibration where there is none yet. Raises BadAssignment, UnknownScheme.
    """
    chosen = audit.checked(assignment)
    costs = {site: audit.contribution(site, scheme) for site, scheme in chosen.items()}
    broken = [site for site, cost in costs.items() if not math.isfinite(cost)]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return [f"{chosen[broken[0]]} makes infinities or NaN at {broken[0]}{more}: no error can be predicted."]
    return [*_few(audit), *_outside(audit, chosen), *_flips(audit, chosen), *_unseen(audit, chosen)]


def _few(audit: Audit) -> list[str]:
    count = sum(map(batch_size, audit.batches))
    if count >= _FEW:
        return []
    return [f"{count} sequence{'s' * (count > 1)} can't show which errors go together: give {_FEW} or more."]


def _outside(audit: Audit, chosen: Mapping[str, str]) -> list[str]:
    prediction = audit.predict(chosen)
    predicted = prediction.error
    measured = [pair.measured for _, pair in audit.measured if math.isfinite(pair.measured) and pair.measured > 0]
    if not predicted > 0 or not measured:
        return []
    if prediction.high > _WIDE**2 * prediction.low:
        return [
            f"The interval is wide, {prediction.low:.2g} to {prediction.high:.2g}: predictions fail for this model."
        ]
    least, most = min(measured), max(measured)
    if least / _BEYOND <= predicted <= most * _BEYOND:
        return []
    return [
        f"The predicted error, {predicted:.3g}, lies far outside of what was measured to calibrate its interval, "
        f"{least:.3g} to {most:.3g}."
    ]


def _flips(audit: Audit, chosen: Mapping[str, str]) -> list[str]:
    routing = routing_of(audit)
    share = 0.0 if routing is None else routing.flips(audit.keys(chosen))
    if routing is None or share < _FLIPS:
        return []
    return [
        f"{share:.1%} of the choices of experts are expected to change: the routers' margins move by "
        f"{routing.noise(audit.keys(chosen)):.2g}, and a prediction sees no flip."
    ]


def _unseen(audit: Audit, chosen: Mapping[str, str]) -> list[str]:
    found = []
    for experts in experts_of(audit):
        without = [expert for expert, load in enumerate(experts.loads) if not load]
        if without and any(str(site) in chosen for site in experts.sites):
            names = ", ".join(map(str, without[:8]))
            found.append(f"No calibration token reached expert {names} of {experts.name}: its error is not in any sum.")
    return found
