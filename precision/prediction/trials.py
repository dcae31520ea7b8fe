"""What is measured to calibrate predictions: random assignments, from dense to sparse, and some of the front."""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from assay.precision.observation.sites import Site
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.prediction.predictor import Predictor
from assay.precision.schemes import SCHEMES

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


def without_gradient(predictor: Predictor, measure: Measure) -> tuple[Site, ...]:
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
    found = SCHEMES[scheme]
    stored = (found.weight, found.activation, found.queries)
    return sum(each.bits((1, 128)) for each in stored if each is not None)


def drawn(
    predictor: Predictor, best: Callable[[int], list[dict[str, str]]], seed: int, places: range
) -> list[dict[str, str]]:
    """Random assignments of `_KINDS`, each of a place its own, so that more of them begin with those of fewer, apart
    from those of the front.

    best: so many assignments of the front, at most.
    """
    draws = [random.Random(f"{seed} {place}") for place in places]
    kinds = [draw.choice(_KINDS) for draw in draws]
    chosen = [assignment for assignment in best(kinds.count(_BEST)) if assignment] if _BEST in kinds else []
    found, menus = [], _menus(predictor)
    for draw, kind in zip(draws, kinds, strict=True):
        if kind is _BEST and chosen:
            found.append(chosen.pop(draw.randrange(len(chosen))))
        else:
            share, fine = kind or _FINE
            found.append(_random(menus, draw, share, fine))
    return found


def tried(predictor: Predictor, measure: Measure, assignments: Iterable[dict[str, str]]) -> list[Trial]:
    """Assignments predicted, before calibration, and measured."""
    return [(assignment, predictor.told(assignment, measure(assignment))) for assignment in assignments]


def renewed(predictor: Predictor, trials: Iterable[Trial]) -> list[Trial]:
    """Trials as a predictor that has learnt something predicts them, before calibration."""
    return [(assignment, predictor.told(assignment, pair.measured)) for assignment, pair in trials]


def calibrated(predictor: Predictor, trials: Iterable[Trial]) -> Predictor:
    """The predictor with the interval that fits what it predicts of these trials now; `Calibration.fitted`."""
    pairs = [pair for _, pair in renewed(predictor, trials)]
    return replace(predictor, calibration=Calibration.fitted(pairs, power=predictor.metric.power))


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
