"""What a choice of scales can do for a site, and sites where nothing matters or one choice serves two."""

import math
from collections.abc import Iterator

import numpy as np

from assay.precision.advice.finding import Finding
from assay.precision.advice.local import at_stake, linears, matrices, owner
from assay.precision.advice.passes import Control
from assay.precision.observation.observing import Observed
from assay.precision.observation.sites import Site
from assay.precision.prediction.perturbations import perturbations_of
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.quadratic_form import QuadraticForm
from assay.precision.schemes import SCHEMES

_FAMILIES = (
    ("fp8-tensor", ("fp8", "fp8-block", "mxfp8")),
    ("fp8", ("fp8-block", "mxfp8")),
    ("w8a8", ("w8a8-smooth", "w8a8-hadamard", "w8a8-asym")),
    ("w8a8-static", ("w8a8",)),
    ("w4a16-g128", ("w4a16-g128-asym", "w4a16-g128-awq", "w4a16-g64", "w4a16-g32")),
    ("mxfp4", ("nvfp4", "nvfp4-hadamard")),
    ("w-mxfp4", ("w-nvfp4",)),
)
"""A scheme, and those of as many bits an element that differ from it in granularity or in how scales are chosen."""
_REPAIRED = 4.0
"""Ratio of squared errors from which another granularity is a repair."""
_LIFTED = 2.0
"""Ratio of an actual change's squared error to a random one's from which scales are to blame."""
_DEAD = 1e-9
"""Share of the median site's error below which a site counts as without effect."""


def scaling(predictor: Predictor, control: Control) -> Iterator[Finding]:
    """Sites at which other scales of as many bits are a repair; and of each family's costliest site, if there is none,
    whether better scales could help at all, or only more bits."""
    repaired = list(_granularities(predictor))
    yield from repaired
    yield from _bits_or_scales(predictor, control, {(finding.site, finding.numbers["scheme"]) for finding in repaired})


def _granularities(predictor: Predictor) -> Iterator[Finding]:
    """Schemes of one menu, compared by their predicted errors."""
    observed = predictor.observed
    for base, others in _FAMILIES:
        squares = {
            site: _squares_of(predictor.form, site, base) for site in linears(observed) if base in observed.menu(site)
        }
        finite = [square for square in squares.values() if math.isfinite(square)]
        mean = sum(finite) / max(len(finite), 1)
        for site, before in squares.items():
            if before < mean or before == 0:  # what costs little needs no repair
                continue
            after = {name: _squares_of(predictor.form, site, name) for name in others if name in observed.menu(site)}
            best = min(after, key=after.__getitem__, default="")
            if not best or before < _REPAIRED * after[best]:
                continue
            ratio = before / max(after[best], 1e-300)
            yield Finding(
                "granularity",
                str(site),
                f"{base} is predicted to make {min(ratio, 1e9):.3g} times the squared error of {best} here.",
                {"scheme": base, "better": best, "ratio": ratio},
                f"Of the two, take {best}.",
                predictor.alone(site, base),
            )


def _bits_or_scales(predictor: Predictor, control: Control, repaired: set[tuple[str, str]]) -> Iterator[Finding]:
    observed = predictor.observed
    menus: dict[Site, tuple[str, ...]] = {}
    for base, _ in _FAMILIES:
        costs = {site: predictor.alone(site, base) for site in linears(observed) if base in observed.menu(site)}
        costs = {site: cost for site, cost in costs.items() if math.isfinite(cost) and cost > 0}
        if costs and ((worst := max(costs, key=costs.__getitem__)), base) not in repaired:
            menus[worst] = (*menus.get(worst, ()), base)
    if not menus:
        return
    forms = control({owner(site): bases for site, bases in menus.items()})
    for site, bases in menus.items():
        ratios = {
            base: _squares_of(predictor.form, site, base) / random
            for base in bases
            if (random := _squares_of(forms, site, base)) > 0
        }
        for kind in ("scales", "bits"):
            said = [base for base, ratio in ratios.items() if (ratio > _LIFTED) is (kind == "scales")]
            if not said:
                continue
            base = max(said, key=lambda name: predictor.alone(site, name))
            yield Finding(
                kind,
                str(site),
                f"{base} costs most here, {ratios[base]:.2g} times the squared error of a random change as large: "
                + _meaning(ratios[base]),
                {"scheme": base, "ratio": ratios[base]},
                f"For {base} here, try groups, smoothing or a searched clip."
                if kind == "scales"
                else f"Where others have {base}, give this one more bits.",
                predictor.alone(site, base),
            )


def _squares_of(form: QuadraticForm, site: Site, scheme: str) -> float:
    return form.of([(owner(site), part) for part in perturbations_of(SCHEMES[scheme])])


def _meaning(ratio: float) -> str:
    if ratio > _LIFTED:
        return "it sits where it hurts, and better scales can help."
    if ratio > 1 / _LIFTED:
        return "scales can gain little."
    return "it falls where the output sees little of it, and scales can gain little."


def dead(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Linears whose change, by any scheme, doesn't reach the output that is compared; also weights that are all zero.

    A pooler is one where hidden states are compared: it is used, but elsewhere.
    """
    sites = [site for site in linears(observed) if observed.menu(site)]
    costs = {
        str(site): np.array([_squares_of(predictor.form, site, name) for name in observed.menu(site)]) for site in sites
    }
    schemes = {str(site): observed.menu(site) for site in sites}
    medians = {
        name: float(np.median([costs[site][menu.index(name)] for site, menu in schemes.items() if name in menu]))
        for name in {name for menu in schemes.values() for name in menu}
    }
    for site in sites:
        zero = all(float(weight.abs().max()) == 0 for weight in matrices(observed, site).values())
        limits = np.array([_DEAD * medians[name] for name in observed.menu(site)])
        if not zero and not (costs[str(site)] <= limits).all():
            continue
        yield Finding(
            "dead",
            str(site),
            "Its weight is all zero."
            if zero
            else f"No scheme here changes the output that is compared (metric {predictor.metric.name}): what this "
            "linear gives doesn't reach it.",
            {"parameters": site.parameters, "zero": zero},
            "Leave the layer out, or take the fewest bits; and ask whether this checkpoint is complete."
            if zero
            else "Any scheme will do for this output; where another one is used, audit with a loss of that one.",
        )


def no_gradient(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Sites that change the output though no gradient leads back to them, or none but zero."""
    reached = {name for name, _ in predictor.form.keys}
    for back, reason in (
        (False, "no gradient comes back to it, since what follows detaches, picks or defines none"),
        (True, "the gradient that comes back to it is zero, since what follows rounds, compares or saturates"),
    ):
        sites = [str(site) for site in observed.no_gradient if (str(site) in reached) == back]
        if not sites:
            continue
        more = f" and of {len(sites) - 1} more site{'s' * (len(sites) > 2)}" if len(sites) > 1 else ""
        yield Finding(
            "no_gradient",
            sites[0],
            f"No error of it{more} can be predicted: {reason}.",
            {"sites": sites},
            "It keeps its own format; for another audit what lies before that step by itself, with a loss of its own.",
        )


def tied(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Weights that two sites share."""
    for site in observed.sites:
        if site.tied:
            yield Finding(
                "tied",
                str(site),
                f"It holds the weight of {site.tied}: one scheme serves both, and its bytes count once.",
                {"owner": site.tied, "parameters": site.parameters},
                f"Choose for {site.tied}; exports that can't share a quantised weight store it twice.",
                at_stake(predictor, site.tied),
            )
