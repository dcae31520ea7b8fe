"""Findings: their kinds and order; and errors of one site alone, on the audit's sample of its input rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.precision.observation import groups
from assay.precision.observation.observing import Observed
from assay.precision.observation.sites import Site
from assay.precision.prediction.predictor import Predictor
from assay.precision.schemes import SCHEMES

KINDS = {
    "nonfinite": 0,
    "overflow": 0,
    "no_gradient": 1,
    "router_ties": 1,
    "unseen_expert": 1,
    "static_scale": 1,
    "underflow": 2,
    "outlier_channel": 2,
    "outlier_row": 2,
    "outlier_column": 2,
    "massive_token": 2,
    "granularity": 2,
    "scales": 2,
    "bits": 2,
    "dead": 3,
    "tied": 3,
}
"""Kinds of findings and their rank: what breaks a model (0), what a prediction can't show (1), what costs (2), notes
(3)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about one site, with a remedy."""

    kind: str
    """Of `KINDS`."""
    site: str
    words: str
    """One sentence."""
    numbers: dict[str, Any]
    """The sentence's data by name: numbers, indices, names of schemes."""
    remedy: str
    """One sentence."""
    weight: float = field(default=0.0)
    """The predicted error at this site of the affected scheme, in the metric's unit."""

    def __str__(self) -> str:
        return f"{self.site}: {self.words} {self.remedy}"


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by rank of the kind, then by weight; equal ones keep their order."""
    return sorted(findings, key=lambda finding: (KINDS[finding.kind], -finding.weight))


def linears(observed: Observed) -> list[Site]:
    """Return the sites of products, each weight once: a head whose weight is the embedding table counts, its table does
    not."""
    products = {str(site) for site in observed.sites if site.type == "linear"}
    return [site for site in observed.sites if site.type == "linear" and site.tied not in products]


def owner(site: Site) -> str:
    """Return the name of the site that holds a site's scheme: the first use of the weight."""
    return site.tied or str(site)


def rows_of(observed: Observed, site: str, part: str = "") -> Tensor | None:
    """Return the sample of a site's values [R, K]."""
    seen = observed.statistics.get((str(site), part))
    return torch.cat(seen.rows) if seen is not None and seen.rows else None


def matrices(observed: Observed, site: str) -> Mapping[int | None, Tensor]:
    """Return the weights [N, K] of a site by expert; {None: weight} without experts."""
    return observed.weights.get(str(site), {})


def local_error(observed: Observed, site: Site, scheme: str) -> float | None:
    """Return the squared error of a linear's output over its square, on the sample of inputs; None for a scheme off the
    menu.

    Of experts the first that got tokens represents all.
    """
    rows, weights = rows_of(observed, site), matrices(observed, site)
    if rows is None or not weights or scheme not in observed.menu(site) or not bool(rows.isfinite().all()):
        return None
    expert, weight = next(iter(weights.items()))
    exact = groups.linear(rows, weight)
    size = float(exact.square().sum())
    stored = product_of(observed, site, scheme, rows, weight, expert)
    return float((stored - exact).square().sum()) / size if size > 0 else None


def product_of(
    observed: Observed, site: Site, scheme: str, rows: Tensor, weight: Tensor, expert: int | None = None
) -> Tensor:
    """Return a linear's output [R, N] for rows [R, K] of its input, or [R, G * K] of one in groups, under a scheme."""
    name, chosen = owner(site), SCHEMES[scheme]
    of_weight = observed.qparams.weight(name, chosen, weight, expert)
    of_input = observed.qparams.input(name, chosen, weight, expert)
    stored = weight if of_weight is None else of_weight(weight)
    return groups.linear(rows if of_input is None else of_input(rows), stored)


def at_stake(predictor: Predictor, site: str) -> float:
    """Return the largest finite error of an 8-bit scheme at this site, or of any scheme where the menu has none of 8
    bits."""
    observed = predictor.observed
    menu = observed.menu(site)
    eight = [
        name
        for name in menu
        if all(q is None or q.element.bits == 8 for q in (SCHEMES[name].weight, SCHEMES[name].activation))
    ]
    costs = [predictor.site_error(site, name) for name in eight or menu]
    return max((cost for cost in costs if math.isfinite(cost)), default=0.0)


def remedied(
    observed: Observed, site: Site, base: str, others: tuple[str, ...], advice: str, otherwise: str
) -> tuple[str, dict[str, Any]]:
    """Return a remedy, with local errors under the affected scheme and the best of others; ``otherwise`` where none of
    them halves the squared error, or the menu lacks them."""
    before = local_error(observed, site, base)
    errors = {name: error for name in others if (error := local_error(observed, site, name)) is not None}
    if before is None or not errors:
        return otherwise, {}
    best = min(errors, key=errors.__getitem__)
    numbers = {"suffers": base, "better": best, "error": before, "error_with_better": errors[best]}
    if errors[best] * 2 > before:
        return otherwise, numbers
    return (
        f"{advice}: {best} makes {before / max(errors[best], 1e-30):.0f} times less squared error than {base}.",
        numbers,
    )
