"""Two more backward passes: one for random changes as large as the schemes', one for the margins of routers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from assay.precision.advice.experts import Router, flip_share, routers_of
from assay.precision.model.menu import Fits
from assay.precision.model.products import products_of
from assay.precision.model.running import mapping
from assay.precision.model.sensitivity import Sensitivity
from assay.precision.model.tap import Product
from assay.precision.prediction import Key, QuadraticForm
from assay.precision.schemes import Scheme, Stored

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["Routing", "control_of", "routing_of"]


@dataclass(frozen=True, slots=True)
class Random(Stored):
    """A random change of normal entries, as large in all as the one that ``stored`` makes."""

    stored: Stored | None = None
    start: int = 0
    """The first row, of some rows of a weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.stored is not None
        size = (self.stored(x) - x).square().mean().sqrt()
        generator = torch.Generator().manual_seed(x.numel() + self.start)
        return x + size * torch.randn(x.shape, generator=generator).to(x)

    def of_rows(self, start: int, stop: int) -> Stored:
        assert self.stored is not None
        return replace(self, stored=self.stored.of_rows(start, stop), start=start)

    def at_rows(self, index: torch.Tensor) -> Stored:
        assert self.stored is not None
        return replace(self, stored=self.stored.at_rows(index))


class Controls(Fits):
    """What schemes would store, replaced by random changes of the same size."""

    def __init__(self, fits: Fits) -> None:
        super().__init__({})
        self._fits = fits

    def weight(self, name: str, scheme: Scheme, weight: torch.Tensor, expert: int | None = None) -> Stored | None:
        return self._random(self._fits.weight(name, scheme, weight, expert))

    def values(self, name: str, scheme: Scheme, part: str = "") -> Stored | None:
        return self._random(self._fits.values(name, scheme, part))

    def input(self, name: str, scheme: Scheme, weight: torch.Tensor, expert: int | None = None) -> Stored | None:
        return self._random(self._fits.input(name, scheme, weight, expert))

    def _random(self, stored: Stored | None) -> Stored | None:
        if stored is None:
            return None
        return Random(**{f.name: getattr(stored, f.name) for f in fields(Stored)}, stored=stored)


def control_of(audit: Audit, menus: Mapping[str, tuple[str, ...]]) -> QuadraticForm:
    """The form for random changes as large as those of the schemes in ``menus``, which are named by the owners of
    weights, over all calibration data."""
    generator = torch.Generator().manual_seed(0)

    def backward(visitor: Sensitivity, outputs: Any, batch: Any) -> None:
        output = audit.metric.output(outputs, mapping(batch))
        cotangent = audit.metric.cotangent(output.detach(), mapping(batch), generator)
        torch.autograd.grad(output, visitor.anchor, cotangent, allow_unused=True)

    controls = Controls(audit.fits)
    products = products_of(
        audit.model,
        audit.batches,
        lambda size, seed: Sensitivity(menus, controls, _tied(audit), size, seed=seed),
        backward,
    )
    return QuadraticForm(products)


def _tied(audit: Audit) -> dict[str, str]:
    return {str(site): site.tied for site in audit.sites if site.tied}


class _Routed(Sensitivity):
    """A visitor that keeps what the routers give."""

    routers: Mapping[str, int]

    def __init__(self, routers: Mapping[str, int], *rest: Any) -> None:
        super().__init__(*rest)
        self.routers = routers
        self.logits: list[tuple[torch.Tensor, int]] = []

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        output = super().linear(name, x, weight, expert, product)
        if name in self.routers:
            self.logits.append((output, self.routers[name]))
        return output


@dataclass(frozen=True)
class Routing:
    """How far an assignment moves the margins of a model's routers, to first order, as a quadratic form over sites.

    The cotangent of each token at each router is a random sign times (onehot of the last expert picked - onehot of the
    first not picked), so the form is the sum of squared changes of the margins over all tokens and routers.
    """

    form: QuadraticForm
    routers: tuple[Router, ...]

    def noise(self, keys: Sequence[Key]) -> float:
        """Root mean square change of a margin, in units of logits, by an assignment's `Audit.keys`; infinite where they
        hold infinities."""
        return float((self.form.of(keys) / sum(router.tokens for router in self.routers)) ** 0.5)

    def flips(self, keys: Sequence[Key]) -> float:
        """Expected share of choices, over tokens and routers, that change."""
        return flip_share(torch.cat([router.margins for router in self.routers]), self.noise(keys))


_ROUTINGS: weakref.WeakKeyDictionary[Audit, Routing | None] = weakref.WeakKeyDictionary()


def routing_of(audit: Audit) -> Routing | None:
    """The margins' form of an audit, made when first asked for; None for a model without routers."""
    if audit not in _ROUTINGS:
        routers = tuple(routers_of(audit))
        _ROUTINGS[audit] = Routing(_routing_form(audit, routers), routers) if routers else None
    return _ROUTINGS[audit]


def _routing_form(audit: Audit, routers: tuple[Router, ...]) -> QuadraticForm:
    generator = torch.Generator().manual_seed(0)
    menus = {str(site): audit.menu(str(site)) for site in audit.sites}
    tops = {str(router.site): router.top for router in routers}

    def backward(visitor: Sensitivity, _outputs: Any, _batch: Any) -> None:
        assert isinstance(visitor, _Routed)
        cotangents = []
        for logits, top in visitor.logits:
            order = logits.detach().topk(top + 1, -1).indices
            sign = torch.randint(0, 2, (*logits.shape[:-1], 1), generator=generator).to(logits) * 2 - 1
            cotangent = torch.zeros_like(logits).scatter_(-1, order[..., -2:-1], sign)
            cotangents.append(cotangent.scatter_(-1, order[..., -1:], -sign))
        torch.autograd.grad([logits for logits, _ in visitor.logits], visitor.anchor, cotangents, allow_unused=True)

    products = products_of(
        audit.model,
        audit.batches,
        lambda size, seed: _Routed(tops, menus, audit.fits, _tied(audit), size, (0, 1), seed),
        backward,
    )
    return QuadraticForm(products)
