"""The prediction of any assignment's error: a value, of which what is measured makes another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from assay.precision.metrics import Metric
from assay.precision.observation.observing import Observed
from assay.precision.prediction.calibration import UNCALIBRATED, Calibration, Measured
from assay.precision.prediction.overruns import overruns
from assay.precision.prediction.perturbations import Key, is_repeated, perturbations_of
from assay.precision.prediction.quadratic_form import Prediction, QuadraticForm
from assay.precision.sampling import OtherSequences
from assay.precision.schemes import SCHEMES

_WITHIN = 2.0
"""How many times as far off the error of one site is within attention and of a KV cache, where a step in a score moves
whole rows of probabilities beyond what a quadratic form follows (docs/evidence.md)."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Assignments, checked ones, to errors in the metric's unit and to the quadratic form in which they add up."""

    observed: Observed
    metric: Metric
    form: QuadraticForm
    calibration: Calibration = UNCALIBRATED
    others: OtherSequences | None = None
    """Those that the interval is to hold for; None: the error is over the sequences that are calibrated on."""
    flips: Callable[[Sequence[Key]], float] | None = None
    """How many of the routers' choices are expected to change over the data; None: no routers are known."""

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """The error of an assignment with its interval."""
        raw = self.told(assignment, 0.0)
        ends = (0.0, 0.0)
        if self.others is not None and 0 < raw.predicted < math.inf:
            keys, power = self.keys(assignment), self.metric.power
            overrun = overruns(self.observed, self.others, self.form.shares(keys))
            ends = self.others.ends(self.form.profile(keys), power, overrun)
        return Prediction(*self.calibration.interval(raw, ends), self.calibration.promised(raw))

    def told(self, assignment: Mapping[str, str], measured: float) -> Measured:
        """What calibration takes of an assignment: its error before calibration, beside what was measured."""
        error, effective = self.uncalibrated(assignment)
        keys = self.keys(assignment)
        flips = None if self.flips is None else self.flips(keys)
        return Measured(error, measured, effective, self.form.noise(keys) / self.metric.power**2, flips)

    def uncalibrated(self, assignment: Mapping[str, str]) -> tuple[float, float]:
        """The error before calibration, and how many sites it comes from, one within attention counting a quarter."""
        keys = self.keys(assignment)
        squares = self.form.of(keys)
        error = math.inf if math.isinf(squares) else float(self.metric.error(squares, self.observed.weight))
        return error, self.form.effective(keys, self._spread)

    def _spread(self, key: Key) -> float:
        site = self.observed.by_name.get(key[0])
        return _WITHIN if site is not None and site.in_attention else 1.0

    def alone(self, site: str, scheme: str) -> float:
        """The error of one site alone, before calibration."""
        return self.uncalibrated({self.observed.owner(site): scheme})[0]

    def squares(self, assignment: Mapping[str, str]) -> float:
        """The quadratic form of an assignment: errors of choices add up in it, apart from cross terms."""
        return self.form.of(self.keys(assignment))

    def squares_at(self, error: float) -> float:
        """The quadratic form at which the calibrated prediction is ``error``."""
        return self.metric.squares(self.calibration.raw(error), self.observed.weight)

    def keys(self, assignment: Mapping[str, str]) -> list[Key]:
        """Of the form, those of what changes: not of values that an earlier site has left as this one would."""
        schemes = {name: SCHEMES[scheme] for name, scheme in assignment.items()}
        return [
            (name, perturbation)
            for name, scheme in schemes.items()
            for perturbation in perturbations_of(scheme)
            if not (perturbation[0] == "values" and is_repeated(name, schemes, self.observed.sources))
        ]

    def corrected(self, assignment: Mapping[str, str], measured: float) -> Predictor:
        """The predictor that gives the error that was measured of an assignment, calibrated as it is."""
        squares = self.squares_at(measured) if math.isfinite(measured) else math.inf
        return replace(self, form=self.form.corrected(self.keys(assignment), squares))
