"""What an audit measures to correct and to calibrate its predictions: doubtful schemes alone, random assignments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from assay.precision.model.parts import parts_of
from assay.precision.model.sites import Site
from assay.precision.prediction import Key
from assay.precision.schemes import SCHEMES

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["KINDS", "check_doubtful", "random_assignment", "without_gradient"]

KINDS = ((1.0, False), (1.0, True), (0.3, False), (0.1, False), (0.0, False))
"""Of the assignments that are measured to calibrate: the share of sites that they take, and whether finely; a share of
0: one scheme wherever it may stand."""


def without_gradient(audit: Audit) -> tuple[Site, ...]:
    """Sites of which no scheme has an effect to first order, though one has when it is measured: what comes after them
    rounds, detaches or picks. Each that has no effect is measured alone, unless all of them together change nothing."""
    silent = {
        site: max(audit.menu(site), key=lambda scheme: len(audit.keys({str(site): scheme})))
        for site in audit.sites
        if not site.tied and not any(audit.squares({str(site): scheme}) for scheme in audit.menu(site))
    }
    if not silent or audit.measure({str(site): scheme for site, scheme in silent.items()}) == 0:
        return ()
    return tuple(site for site, scheme in silent.items() if audit.measure({str(site): scheme}) != 0)


def check_doubtful(audit: Audit, count: int, done: Callable[[], None]) -> list[tuple[str, str, float, float]]:
    """Measure the ``count`` schemes alone whose predictions have the largest standard errors: mostly some of large
    errors that few sequences make, where the quadratic form may fail. What is measured takes the place of what was
    predicted in the audit's form. ``done`` is called after each.

    Gives site, scheme, the error as it was predicted, and as it was measured.
    """
    form, schemes = audit.form, dict[Key, tuple[str, str]]()
    for site in audit.sites:
        for scheme in sorted(audit.menu(site), key=_parts) if not site.tied else ():
            for key in audit.keys({str(site): scheme}):
                schemes.setdefault(key, (str(site), scheme))
    found = []
    for key in sorted(schemes, key=form.doubt, reverse=True)[:count]:
        name, scheme = schemes[key]
        predicted, measured = audit.contribution(name, scheme), audit.measure({name: scheme})
        audit.correct({name: scheme}, measured)
        found.append((name, scheme, predicted, measured))
        done()
    return found


def _parts(scheme: str) -> int:
    return len(parts_of(SCHEMES[scheme]))


def random_assignment(audit: Audit, draw: random.Random, share: float, *, fine: bool) -> dict[str, str]:
    """A random scheme at every site, or at a random share of them (one at least), or for a share of 0 one wherever it
    may stand; ``fine``: of the half of each menu with the smaller errors."""
    sites = [site for site in audit.sites if not site.tied]
    if not share:
        scheme = draw.choice(sorted({scheme for site in sites for scheme in audit.menu(site)}))
        return {str(site): scheme for site in sites if scheme in audit.menu(site)}
    some = [site for site in sites if draw.random() < share] or [draw.choice(sites)]
    return {str(site): draw.choice(_finer(audit, site) if fine else audit.menu(site)) for site in some}


def _finer(audit: Audit, site: str) -> list[str]:
    by_error = sorted(audit.menu(site), key=lambda scheme: audit.squares({str(site): scheme}))
    return by_error[: (len(by_error) + 1) // 2]
