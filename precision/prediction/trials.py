"""What is measured to correct and to calibrate predictions: single schemes, the front, random assignments."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from assay.precision.observation.sites import Site
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.prediction.perturbations import Key, perturbations_of
from assay.precision.prediction.predictor import Predictor
from assay.precision.schemes import SCHEMES

Measure = Callable[[Mapping[str, str]], float]
"""An assignment to its measured error."""
Alone = tuple[str, str, float, float]
"""Site, scheme, its error as it was predicted, and as it was measured."""
Trial = tuple[dict[str, str], Measured]
"""An assignment, with its error as it was predicted and as it was measured."""

KINDS = ((1.0, False), (1.0, True), (0.3, False), (0.1, False), (0.0, False))
"""Of the assignments that are measured to calibrate, of which each is drawn at random from these: the share of sites
that they take, and whether finely; a share of 0: one scheme wherever it may stand."""


def without_gradient(predictor: Predictor, measure: Measure) -> tuple[Site, ...]:
    """Sites of which no scheme has an effect to first order, though one has when it is measured: what comes after them
    rounds, detaches or picks. Each that has no effect is measured alone, unless all of them together change nothing."""
    menus = predictor.observed.menus
    silent = {
        site: max(menus[site], key=lambda scheme: len(predictor.keys({str(site): scheme})))
        for site in predictor.observed.sites
        if not site.tied and not any(predictor.squares({str(site): scheme}) for scheme in menus[site])
    }
    if not silent or measure({str(site): scheme for site, scheme in silent.items()}) == 0:
        return ()
    return tuple(site for site, scheme in silent.items() if measure({str(site): scheme}) != 0)


def doubted(predictor: Predictor, count: int, attention: int) -> list[tuple[str, str]]:
    """What is to be measured alone, (site, scheme): the ``count`` schemes whose predictions have the largest standard
    errors, mostly some of large errors that few sequences make, where the quadratic form may fail; then, of the stages
    of attention and the KV caches, the ``attention`` ones of the largest errors: rounding there is mispredicted by up
    to a factor of four, and such errors add up.
    """
    schemes: dict[Key, tuple[str, str]] = {}
    for site in predictor.observed.sites:
        menu = () if site.tied else predictor.observed.menus[site]
        for scheme in sorted(menu, key=lambda name: len(perturbations_of(SCHEMES[name]))):
            for key in predictor.keys({str(site): scheme}):
                schemes.setdefault(key, (str(site), scheme))
    doubtful = sorted(schemes, key=predictor.form.standard_error, reverse=True)[:count]
    inside = [key for key in schemes if key not in doubtful and predictor.observed.by_name[key[0]].in_attention]
    largest = sorted(inside, key=lambda key: predictor.form.of([key]), reverse=True)[:attention]
    return [schemes[key] for key in (*doubtful, *largest)]


def checked_alone(
    predictor: Predictor, measure: Measure, schemes: Iterable[tuple[str, str]]
) -> tuple[Predictor, list[Alone]]:
    """The predictor in which what is measured of schemes alone takes the place of what was predicted, and both."""
    found = []
    for name, scheme in schemes:
        predicted, measured = predictor.alone(name, scheme), measure({name: scheme})
        predictor = predictor.corrected({name: scheme}, measured, known=True)
        found.append((name, scheme, predicted, measured))
    return predictor, found


def tried(predictor: Predictor, measure: Measure, assignments: Iterable[dict[str, str]]) -> list[Trial]:
    """Assignments predicted, before calibration, and measured."""
    return [(assignment, predictor.told(assignment, measure(assignment))) for assignment in assignments]


def renewed(predictor: Predictor, trials: Iterable[Trial]) -> list[Trial]:
    """Trials as a predictor that has learnt something predicts them, before calibration."""
    return [(assignment, predictor.told(assignment, pair.measured)) for assignment, pair in trials]


def calibrated(predictor: Predictor, fit: Iterable[Trial], *judged: Iterable[Trial]) -> Predictor:
    """The predictor with the interval that fits what it predicts of these trials now; `Calibration.fitted`."""
    kinds = ([pair for _, pair in renewed(predictor, trials)] for trials in (fit, *judged))
    found = Calibration.fitted(*kinds, power=predictor.metric.power)
    return replace(predictor, calibration=found)


def random_assignment(predictor: Predictor, draw: random.Random, share: float, *, fine: bool) -> dict[str, str]:
    """A random scheme at every site, or at a random share of them (one at least), or for a share of 0 one wherever it
    may stand; ``fine``: of the half of each menu with the smaller errors."""
    menus = {str(site): predictor.observed.menus[site] for site in predictor.observed.sites if not site.tied}
    if not share:
        scheme = draw.choice(sorted({scheme for menu in menus.values() for scheme in menu}))
        return {site: scheme for site, menu in menus.items() if scheme in menu}
    taken = [site for site in menus if draw.random() < share] or [draw.choice(list(menus))]
    return {site: draw.choice(_finer(predictor, site) if fine else menus[site]) for site in taken}


def _finer(predictor: Predictor, site: str) -> list[str]:
    by_error = sorted(predictor.observed.menus[site], key=lambda scheme: predictor.squares({site: scheme}))
    return by_error[: (len(by_error) + 1) // 2]
