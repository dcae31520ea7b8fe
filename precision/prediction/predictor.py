"""X"""

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
    """What clipping adds in each draw of ``others``, [D], to an error of which each key has a share, over it."""
    total: np.ndarray | float = 0.0
    for key, share in shares.items():
        if key not in others.saturation_cache:
            others.saturation_cache[key] = _saturation_of(observed, others, key)
        total = total + share * others.saturation_cache[key]
    return total


def _saturation_of(observed: Observed, others: OtherSequences, key: Key) -> np.ndarray | float:
    """Over the error of one key; of a cache, whose keys and values have a scale each, the larger."""
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
        raw = self.calibration_point(assignment, 0.0)
        ends = (0.0, 0.0)
        if self.others is not None and 0 < raw.predicted < math.inf:
            keys, power = self.keys(assignment), self.metric.power
            saturation_cache = saturation(self.observed, self.others, self.form.shares(keys))
            ends = self.others.ends(self.form.profile(keys), power, saturation_cache)
        return Prediction(*self.calibration.interval(raw, ends), self.calibration.level_of(raw))

    def calibration_point(self, assignment: Mapping[str, str], measured: float) -> Measured:
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

    def site_error(self, site: str, scheme: str) -> float:
        """The error of one site alone, before calibration."""
        return self.uncalibrated({self.observed.weight_site(site): scheme})[0]

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


Measure = Callable[[Mapping[str, str]], float]
"""An assignment to its measured error."""
Trial = tuple[dict[str, str], Measured]
"""An assignment, with its error as it was predicted and as it was measured."""

_BEST = None
_FINE = (1.0, True)
_KINDS = ((1.0, False), _FINE, (0.3, False), (0.1, False), (0.0, False), _BEST)
"""Of the assignments that are measured to calibrate, of which each is drawn at random from these: one of the front of
bytes and error; or the share of sites that they take, and whether finely; a share of 0: one scheme wherever it may
stand."""


def sites_without_gradient(predictor: Predictor, measure: Measure) -> tuple[Site, ...]:
    """Sites of which no scheme has an effect to first order, though one has when it is measured: what comes after them
    rounds, detaches or picks. Each that has no effect is measured alone in the scheme that stores most, in fewest bits,
    unless all of them together change nothing."""
    menus = predictor.observed.menus
    silent = {
        site: max(menus[site], key=lambda scheme: (len(predictor.keys({str(site): scheme})), -_bits(scheme)))
        for site in predictor.observed.sites
        if not site.tied and not any(predictor.squares({str(site): scheme}) for scheme in menus[site])
    }
    if not silent or measure({str(site): scheme for site, scheme in silent.items()}) == 0:
        return ()
    return tuple(site for site, scheme in silent.items() if measure({str(site): scheme}) != 0)


def _bits(scheme: str) -> float:
    """That a scheme stores a row of 128 in, weight, input and queries together."""
    quantised = SCHEMES[scheme]
    stored = (quantised.weight, quantised.activation, quantised.queries)
    return sum(each.bits((1, 128)) for each in stored if each is not None)


def draw_assignments(
    predictor: Predictor, best: Callable[[int], list[dict[str, str]]], seed: int, indices: range
) -> list[dict[str, str]]:
    """Random assignments of `_KINDS`, each of a index its own, so that more of them begin with those of fewer, apart
    from those of the front.

    best: so many assignments of the front, at most.
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
    """Assignments predicted, before calibration, and measured."""
    return [(assignment, predictor.calibration_point(assignment, measure(assignment))) for assignment in assignments]


def repredicted(predictor: Predictor, trials: Iterable[Trial]) -> list[Trial]:
    """Trials as a predictor that has learnt something predicts them, before calibration."""
    return [(assignment, predictor.calibration_point(assignment, pair.measured)) for assignment, pair in trials]


def recalibrated(predictor: Predictor, trials: Iterable[Trial]) -> Predictor:
    """The predictor with the interval that fits what it predicts of these trials now; `Calibration.fit`."""
    pairs = [pair for _, pair in repredicted(predictor, trials)]
    return replace(predictor, calibration=Calibration.fit(pairs, power=predictor.metric.power))


def random_assignment(predictor: Predictor, draw: random.Random, share: float, *, fine: bool) -> dict[str, str]:
    """A random scheme at every site, or at a random share of them (one at least), or for a share of 0 one wherever it
    may stand; ``fine``: of the half of each menu with the smaller errors. None that is predicted to break the model."""
    return _random(_menus(predictor), draw, share, fine)


def _random(menus: Mapping[str, list[str]], draw: random.Random, share: float, fine: bool) -> dict[str, str]:
    if not share:
        scheme = draw.choice(sorted({scheme for menu in menus.values() for scheme in menu}))
        return {site: scheme for site, menu in menus.items() if scheme in menu}
    taken = [site for site in menus if draw.random() < share] or [draw.choice(list(menus))]
    return {site: draw.choice(menus[site][: (len(menus[site]) + 1) // 2 if fine else None]) for site in taken}


def _menus(predictor: Predictor) -> dict[str, list[str]]:
    """The schemes of each site, the smallest error first, without those that are predicted to break the model."""
    menus = {}
    for site in predictor.observed.sites:
        if not site.tied:
            squares = {scheme: predictor.squares({str(site): scheme}) for scheme in predictor.observed.menus[site]}
            finite = [scheme for scheme in squares if math.isfinite(squares[scheme])]
            menus[str(site)] = sorted(finite, key=squares.__getitem__)
    return {site: menu for site, menu in menus.items() if menu}
