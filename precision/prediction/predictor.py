"""The prediction of any assignment's error, and the assignments that are measured to calibrate it.

Static scales: a static scale is that of the largest magnitude of the calibration data. Other sequences that exceed it
are clipped at one value at least, with an error of the excess, beside the rounding errors of all their values.
`saturation` compares the squares of both, as if the output depended on all values in the same way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from assay.precision.metrics import Metric
from assay.precision.observation.observing import Observed
from assay.precision.observation.sites import Site
from assay.precision.prediction.calibration import UNCALIBRATED, Calibration, Measured
from assay.precision.prediction.perturbations import Key, is_repeated, perturbations_of
from assay.precision.prediction.quadratic_form import Prediction, QuadraticForm
from assay.precision.sampling import OtherSequences
from assay.precision.schemes import SCHEMES, Quantizer
from assay.precision.schemes.fitting import fit_values


def saturation(observed: Observed, others: OtherSequences, shares: Mapping[Key, float]) -> np.ndarray | float:
    """Return the clipping error in each draw of ``others``, [D], over an error of which each key has a share."""
    total: np.ndarray | float = 0.0
    for key, share in shares.items():
        if key not in others.saturation_cache:
            others.saturation_cache[key] = _saturation_of(observed, others, key)
        total = total + share * others.saturation_cache[key]
    return total


def _saturation_of(observed: Observed, others: OtherSequences, key: Key) -> np.ndarray | float:
    """Return the same over the error of one key; of a cache, whose keys and values have a scale each, the larger."""
    site, (kind, stored, transform) = key
    if kind not in ("values", "queries") or not isinstance(stored, Quantizer) or transform != "none":
        return 0.0
    if stored.per == "element" or (stored.dynamic and stored.scale_format != "float8_e4m3fn"):
        return 0.0
    largest_ratio: np.ndarray | float = 0.0
    for (name, part), seen in observed.statistics.items():
        if name != site or (part == "queries") != (kind == "queries") or not seen.rows or seen.experts:
            continue
        tops, moments = torch.cat(seen.sequence_maxima), seen.moments()
        if len(tops) != observed.sequences or not bool((tops.isfinite() & (tops > 0)).all()):
            continue
        # The largest of a sequence is in no sample, and of floats it is rounded most.
        rows, largest = moments.rows, tops[:, None].expand(-1, moments.rows.shape[-1])
        change, change_at_top = (fit_values(stored, moments)(x) - x for x in (rows, largest))
        squares = float(change.square().sum(1).mean()) * seen.count / len(tops) + float(change_at_top.square().mean())
        if squares > 0:
            largest_ratio = np.maximum(largest_ratio, others.excess_squares(tops.double().numpy(force=True)) / squares)
    return largest_ratio


_WITHIN = 2.0
"""The relative uncertainty of a site within attention or a KV cache: a step in a score moves whole rows of
probabilities further than a quadratic form follows (docs/evidence.md)."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts checked assignments' errors in the metric's unit, and the quadratic form in which they add up."""

    observed: Observed
    metric: Metric
    form: QuadraticForm
    calibration: Calibration = UNCALIBRATED
    others: OtherSequences | None = None
    """The sequences that the interval is to hold for; None: those of the calibration data."""
    flips: Callable[[Sequence[Key]], float] | None = None
    """Returns the expected number of routers' choices that change over the data; None: no routers are known."""

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """Return the error of an assignment with its interval."""
        raw = self.calibration_point(assignment, 0.0)
        ends = (0.0, 0.0)
        if self.others is not None and 0 < raw.predicted < math.inf:
            keys = self.keys(assignment)
            clipped = saturation(self.observed, self.others, self.form.shares(keys))
            ends = self.others.ends(self.form.profile(keys), self.metric.power, clipped)
        return Prediction(*self.calibration.interval(raw, ends), self.calibration.level_of(raw))

    def calibration_point(self, assignment: Mapping[str, str], measured: float) -> Measured:
        """Return the assignment's uncalibrated prediction with a measured error, for calibration."""
        error, effective = self.uncalibrated(assignment)
        keys = self.keys(assignment)
        flips = None if self.flips is None else self.flips(keys)
        return Measured(error, measured, effective, self.form.noise(keys) / self.metric.power**2, flips)

    def uncalibrated(self, assignment: Mapping[str, str]) -> tuple[float, float]:
        """Return the error before calibration, and the effective number of sites, one within attention counting a
        quarter."""
        keys = self.keys(assignment)
        squares = self.form.of(keys)
        error = math.inf if math.isinf(squares) else float(self.metric.error(squares, self.observed.weight))

        def spread(key: Key) -> float:
            site = self.observed.by_name.get(key[0])
            return _WITHIN if site is not None and site.in_attention else 1.0

        return error, self.form.effective(keys, spread)

    def site_error(self, site: str, scheme: str) -> float:
        """Return the error of one site alone, before calibration."""
        return self.uncalibrated({self.observed.weight_site(site): scheme})[0]

    def squares(self, assignment: Mapping[str, str]) -> float:
        """Return the quadratic form of an assignment, in which errors of choices add up except for cross terms."""
        return self.form.of(self.keys(assignment))

    def squares_at(self, error: float) -> float:
        """Return the quadratic form at which the calibrated prediction is ``error``."""
        return self.metric.squares(self.calibration.raw(error), self.observed.weight)

    def keys(self, assignment: Mapping[str, str]) -> list[Key]:
        """Return the form's keys of an assignment, without sites whose input an earlier site already stores in the same
        way."""
        schemes = {name: SCHEMES[scheme] for name, scheme in assignment.items()}
        return [
            (name, perturbation)
            for name, scheme in schemes.items()
            for perturbation in perturbations_of(scheme)
            if not (perturbation[0] == "values" and is_repeated(name, schemes, self.observed.sources))
        ]

    def corrected(self, assignment: Mapping[str, str], measured: float) -> Predictor:
        """Return the predictor that gives the measured error of an assignment, with the same calibration."""
        squares = self.squares_at(measured) if math.isfinite(measured) else math.inf
        return replace(self, form=self.form.corrected(self.keys(assignment), squares))


Measure = Callable[[Mapping[str, str]], float]
"""An assignment to its measured error."""
Trial = tuple[dict[str, str], Measured]
"""An assignment with its predicted and measured error."""

_BEST = None
_FINE = (1.0, True)
_KINDS = ((1.0, False), _FINE, (0.3, False), (0.1, False), (0.0, False), _BEST)
"""The kinds of assignments measured to calibrate, each drawn at random: from the Pareto front of bytes and error; or
the share of sites that take a scheme, and whether from the finer half; share 0: one scheme wherever possible."""


def sites_without_gradient(predictor: Predictor, measure: Measure) -> tuple[Site, ...]:
    """Return the sites where no scheme has an effect to first order, but one has when measured: later operations round,
    detach or select.

    Each silent site is measured alone in the scheme that stores most, in fewest bits, unless all together change
    nothing.
    """
    menus = predictor.observed.menus

    def bits(scheme: str) -> float:
        quantised = SCHEMES[scheme]
        stored = (quantised.weight, quantised.activation, quantised.queries)
        return sum(each.bits((1, 128)) for each in stored if each is not None)

    silent = {
        site: max(menus[site], key=lambda scheme: (len(predictor.keys({str(site): scheme})), -bits(scheme)))
        for site in predictor.observed.sites
        if not site.tied and not any(predictor.squares({str(site): scheme}) for scheme in menus[site])
    }
    if not silent or measure({str(site): scheme for site, scheme in silent.items()}) == 0:
        return ()
    return tuple(site for site, scheme in silent.items() if measure({str(site): scheme}) != 0)


def draw_assignments(
    predictor: Predictor, best: Callable[[int], list[dict[str, str]]], seed: int, indices: range
) -> list[dict[str, str]]:
    """Return random assignments of `_KINDS`, one for each index, so that a longer calibration begins with those of a
    shorter one, except for those of the front.

    best: returns at most this many assignments of the front.
    """
    draws = [random.Random(f"{seed} {index}") for index in indices]
    kinds = [draw.choice(_KINDS) for draw in draws]
    chosen = [assignment for assignment in best(kinds.count(_BEST)) if assignment] if _BEST in kinds else []
    assignments, menus = [], _menus(predictor)
    for draw, kind in zip(draws, kinds, strict=True):
        if kind is _BEST and chosen:
            assignments.append(chosen.pop(draw.randrange(len(chosen))))
        else:
            share, fine = kind or _FINE
            assignments.append(_random(menus, draw, share, fine))
    return assignments


def run_trials(predictor: Predictor, measure: Measure, assignments: Iterable[dict[str, str]]) -> list[Trial]:
    """Return assignments with their uncalibrated predictions and measured errors."""
    return [(assignment, predictor.calibration_point(assignment, measure(assignment))) for assignment in assignments]


def repredicted(predictor: Predictor, trials: Iterable[Trial]) -> list[Trial]:
    """Return trials with the predictions of a corrected predictor."""
    return [(assignment, predictor.calibration_point(assignment, pair.measured)) for assignment, pair in trials]


def recalibrated(predictor: Predictor, trials: Iterable[Trial]) -> Predictor:
    """Return the predictor with the interval fitted to its own predictions of these trials; see `Calibration.fit`."""
    pairs = [pair for _, pair in repredicted(predictor, trials)]
    return replace(predictor, calibration=Calibration.fit(pairs, power=predictor.metric.power))


def random_assignment(predictor: Predictor, draw: random.Random, share: float, *, fine: bool) -> dict[str, str]:
    """Return a random scheme at every site, or at a random share of them (at least one), or for share 0 one wherever
    possible; ``fine``: from the half of each menu with the smaller errors. None is predicted to break the model."""
    return _random(_menus(predictor), draw, share, fine)


def _random(menus: Mapping[str, list[str]], draw: random.Random, share: float, fine: bool) -> dict[str, str]:
    if not share:
        scheme = draw.choice(sorted({scheme for menu in menus.values() for scheme in menu}))
        return {site: scheme for site, menu in menus.items() if scheme in menu}
    taken = [site for site in menus if draw.random() < share] or [draw.choice(list(menus))]
    return {site: draw.choice(menus[site][: (len(menus[site]) + 1) // 2 if fine else None]) for site in taken}


def _menus(predictor: Predictor) -> dict[str, list[str]]:
    """Return the schemes of each site, the smallest error first, without those predicted to break the model."""
    menus = {}
    for site in predictor.observed.sites:
        if not site.tied:
            squares = {scheme: predictor.squares({str(site): scheme}) for scheme in predictor.observed.menus[site]}
            finite = [scheme for scheme in squares if math.isfinite(squares[scheme])]
            menus[str(site)] = sorted(finite, key=squares.__getitem__)
    return {site: menu for site, menu in menus.items() if menu}
