"""Errors of one site alone, on the rows of its input that the audit kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from assay.precision.model.sites import Site
from assay.precision.schemes import SCHEMES

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["at_stake", "linears", "local_error", "matrices", "owner", "product_of", "remedied", "rows_of"]


def linears(audit: Audit) -> list[Site]:
    """Sites of products, each weight once: a head whose weight is the table of embeddings is one, its table is not."""
    products = {str(site) for site in audit.sites if site.place == "linear"}
    return [site for site in audit.sites if site.place == "linear" and site.tied not in products]


def owner(site: Site) -> str:
    """The name under which an audit holds what schemes do to a site: that of the weight's first use."""
    return site.tied or str(site)


def rows_of(audit: Audit, site: str, part: str = "") -> torch.Tensor | None:
    """The sample of values [R, K] that passed a site."""
    seen = audit.seen.get((str(site), part))
    return torch.cat(seen.rows) if seen is not None and seen.rows else None


def matrices(audit: Audit, site: str) -> Mapping[int | None, torch.Tensor]:
    """Weights [N, K] of a site by expert; {None: weight} without experts."""
    return audit.weights.get(str(site), {})


def local_error(audit: Audit, site: Site, scheme: str) -> float | None:
    """Squared error of a linear's output over its square, on the sample of inputs; None where it isn't on the menu.

    Of experts the first that got tokens stands for all.
    """
    rows, found = rows_of(audit, site), matrices(audit, site)
    if rows is None or not found or scheme not in audit.menu(site) or not bool(rows.isfinite().all()):
        return None
    expert, weight = next(iter(found.items()))
    exact = rows @ weight.mT
    size = float(exact.square().sum())
    stored = product_of(audit, site, scheme, rows, weight, expert)
    return float((stored - exact).square().sum()) / size if size > 0 else None


def product_of(
    audit: Audit, site: Site, scheme: str, rows: torch.Tensor, weight: torch.Tensor, expert: int | None = None
) -> torch.Tensor:
    """What a linear gives for rows [R, K] of its input under a scheme, [R, N]."""
    name, chosen = owner(site), SCHEMES[scheme]
    of_weight = audit.fits.weight(name, chosen, weight, expert)
    of_input = audit.fits.input(name, chosen, weight, expert)
    return (rows if of_input is None else of_input(rows)) @ (weight if of_weight is None else of_weight(weight)).mT


def at_stake(audit: Audit, site: str) -> float:
    """The largest finite error that a scheme of 8 bits makes at this site, or any where the menu has none of 8 bits."""
    menu = audit.menu(site)
    eight = [
        name
        for name in menu
        if all(q is None or q.element_bits == 8 for q in (SCHEMES[name].weight, SCHEMES[name].activation))
    ]
    costs = [audit.contribution(site, name) for name in eight or menu]
    return max((cost for cost in costs if math.isfinite(cost)), default=0.0)


def remedied(
    audit: Audit, site: Site, base: str, others: tuple[str, ...], advice: str, otherwise: str
) -> tuple[str, dict[str, Any]]:
    """A remedy, with local errors under the scheme that suffers and under the best of others; ``otherwise`` where none
    of them halves the squared error, or the menu lacks them."""
    before = local_error(audit, site, base)
    errors = {name: error for name in others if (error := local_error(audit, site, name)) is not None}
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
