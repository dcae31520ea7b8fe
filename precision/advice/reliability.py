"""Assignments whose quadratic form is not reliable, so that only a measurement is."""

import math
from collections.abc import Mapping, Sequence

from assay.precision.advice.routers import Routing, experts_of
from assay.precision.prediction.predictor import Predictor
from assay.runtime.errors import listed

_FLIPS = 0.01  # Share of changed choices of experts that a prediction is trusted up to,
_MADE = 0.1  # and share of the predicted error that they make
_HARDLY = 0.5  # Expected number of changed choices below which none is likely
_FEW = 8  # Sequences from which correlations can be distinguished from chance
_WIDE = 5.0  # Factor either way beyond which an interval is too wide
_BELOW = 3.0  # Factor below the smallest calibrated error down to which the fit is trusted


def reasons(
    predictor: Predictor, assignment: Mapping[str, str], measured: Sequence[float], routing: Routing | None
) -> list[str]:
    """Return the reasons to measure a checked assignment rather than trust its prediction, a sentence each; empty:
    trust it.

    predictor: a calibrated one. measured: the errors of the assignments that were measured to calibrate it.
    """
    observed = predictor.observed
    broken = [site for site, scheme in assignment.items() if not math.isfinite(predictor.site_error(site, scheme))]
    if broken:
        where = listed(broken)
        return [f"{assignment[broken[0]]} makes infinities or NaN at {where}: no error can be predicted."]
    sentences, count = [], observed.sequences
    if count < _FEW:
        few = f"{count} sequence{'s' * (count > 1)}"
        sentences.append(f"{few} can't show which errors go together: give {_FEW} or more.")
    sentences += [*_outside(predictor, assignment, measured), *_flips(predictor, assignment, routing)]
    for experts in experts_of(observed):
        without = [str(expert) for expert, load in enumerate(experts.loads) if not load]
        if without and any(str(site) in assignment for site in experts.sites):
            names = listed(without, most=8)
            sentences.append(
                f"No calibration token reached expert {names} of {experts.name}: its error is not in any sum."
            )
    return sentences


def _outside(predictor: Predictor, assignment: Mapping[str, str], measured: Sequence[float]) -> list[str]:
    prediction, point = predictor.predict(assignment), predictor.calibration_point(assignment, 0.0)
    usable = [error for error in measured if math.isfinite(error) and error > 0]
    if not prediction.error > 0 or not usable:
        return []
    sentences = []
    if predictor.calibration.exceeds_limit(point):
        largest = predictor.calibration.scale * predictor.calibration.limit
        sentences.append(
            f"The predicted error, {prediction.error:.3g}, is large: of those measured to calibrate, none above "
            f"{largest:.3g} lies where it was predicted, so its interval is a guess."
        )
    if prediction.high > _WIDE**2 * prediction.low:
        sentences.append(
            f"The interval is wide, {prediction.low:.2g} to {prediction.high:.2g}: predictions fail for this model."
        )
    elif prediction.error < min(usable) / _BELOW:
        sentences.append(
            f"The predicted error, {prediction.error:.3g}, lies far below what was measured to calibrate its interval, "
            f"{min(usable):.3g} to {max(usable):.3g}."
        )
    return sentences


def _flips(predictor: Predictor, assignment: Mapping[str, str], routing: Routing | None) -> list[str]:
    if routing is None:
        return []
    keys, point = predictor.keys(assignment), predictor.calibration_point(assignment, 0.0)
    share, count, made = routing.flips(keys), routing.count(keys), predictor.calibration.jump_share(point)
    guessed = predictor.calibration.depends_on_flips(point)
    if not guessed and (count < _HARDLY or (share < _FLIPS and made < _MADE)):
        return []
    return [
        f"{100 * share:.2g} % of the choices of experts, one for each token and layer, are expected to change, as the "
        f"routers' margins move by {routing.noise(keys):.2g}; what each costs differs widely, and they may make "
        f"{100 * made:.0f} % of the error{', so its interval is a guess' if guessed else ''}."
    ]
