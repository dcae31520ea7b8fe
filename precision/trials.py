"""What an audit measures to correct and to calibrate its predictions: doubtful schemes alone, random assignments."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from assay.precision.prediction import Key

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["KINDS", "check_doubtful", "random_assignment"]

_DOUBTFUL = 0.1
"""Relative standard error beyond which a prediction is checked by a measurement."""
KINDS = ((1.0, False), (1.0, True), (0.3, False), (0.1, False))
"""Of the assignments that are measured to calibrate: the share of sites that they take, and whether finely."""


def check_doubtful(audit: Audit, count: int) -> list[tuple[str, str, float, float]]:
    """Measure up to ``count`` schemes alone where few sequences make most of the predicted error: there steps are
    large, and the quadratic form may fail. What is measured takes the place of what was predicted in the audit's form.

    Gives site, scheme, the error as it was predicted, and as it was measured.
    """
    form, pairs = audit.form, dict[Key, tuple[str, str]]()
    for site in audit.sites:
        for scheme in audit.menu(site) if not site.tied else ():
            key = max(audit.keys({str(site): scheme}), key=form.doubt, default=None)
            if key is not None and form.doubt(key) > _DOUBTFUL * form.of([key]):
                pairs.setdefault(key, (str(site), scheme))
    found = []
    for key in sorted(pairs, key=form.doubt, reverse=True)[:count]:
        name, scheme = pairs[key]
        predicted, measured = audit.contribution(name, scheme), audit.measure({name: scheme})
        if math.isfinite(measured):
            form.correct(key, audit.as_squares(measured) - audit.squares({name: scheme}))
        found.append((name, scheme, predicted, measured))
    return found


def random_assignment(audit: Audit, draw: random.Random, share: float, *, fine: bool) -> dict[str, str]:
    """A random scheme at every site, or at a random share of them (one at least); ``fine``: of the half of each menu
    with the smaller errors."""
    sites = [site for site in audit.sites if not site.tied]
    some = [site for site in sites if draw.random() < share] or [draw.choice(sites)]
    return {str(site): draw.choice(_finer(audit, site) if fine else audit.menu(site)) for site in some}


def _finer(audit: Audit, site: str) -> list[str]:
    by_error = sorted(audit.menu(site), key=lambda scheme: audit.squares({str(site): scheme}))
    return by_error[: (len(by_error) + 1) // 2]
