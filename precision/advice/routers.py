"""Mixtures of experts: their routers, their tokens, and how far assignments move the routers' margins."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.configs import architectures
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import traced
from assay.precision.observation.running import call, evaluating
from assay.precision.observation.sites import Site
from assay.precision.observation.tracer import Product
from assay.precision.prediction.backward import products_of
from assay.precision.prediction.perturbations import Key
from assay.precision.prediction.quadratic_form import QuadraticForm
from assay.precision.prediction.row_sampling import RowSampler
from assay.precision.prediction.sensitivity import Sensitivity


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, by the common prefix of their sites' names."""

    name: str
    sites: tuple[Site, ...]
    loads: tuple[int, ...]
    """Tokens of each expert."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router that selects ``top`` experts for each token."""

    site: Site
    top: int
    tokens: int
    margins: Tensor
    """For a sample of tokens, float32 [R]: the smallest selected logit less the largest other."""


def experts_of(observed: Observed) -> list[Experts]:
    """Return layers of experts: parameters [E, N, K], or numbered modules below one called ``experts``."""
    stacked: dict[str, list[Site]] = {}
    for site in observed.sites:
        if (name := architectures.experts_of(site)) and site.type == "linear":
            stacked.setdefault(name, []).append(site)
    results = []
    for name, sites in stacked.items():
        seen = [observed.statistics[str(site), ""] for site in sites]
        if seen[0].experts:
            loads = [seen[0].experts.get(expert, 0) for expert in range(sites[0].shape[0])]
        else:
            below = [module[len(name) + 1 :] for module in observed.modules if module.startswith(f"{name}.")]
            counts = dict.fromkeys(sorted(int(number) for number in below if number.isdigit()), 0)
            for site, each in zip(sites, seen, strict=True):
                number = str(site)[len(name) + 1 :].partition(".")[0]
                if number.isdigit():
                    counts[int(number)] = max(counts[int(number)], each.count)
            loads = list(counts.values())
        results.append(Experts(name, tuple(sites), tuple(loads)))
    return results


def routers_of(observed: Observed) -> list[Router]:
    """Return routers with experts in the same module. The number of experts for each token is counted, not read from a
    config."""
    routers = []
    experts = {each.name.rpartition(".")[0]: each for each in experts_of(observed)}
    for site in observed.sites:
        seen = observed.statistics.get((str(site), ""))
        beside = experts.get(str(site).rpartition(".")[0])
        if seen is None or not seen.logits or beside is None or not seen.count:
            continue
        top = round(sum(beside.loads) / seen.count)
        logits = torch.cat(seen.logits)
        if 0 < top < logits.shape[-1]:
            largest = logits.topk(top + 1, -1).values
            routers.append(Router(site, top, seen.valid_rows, largest[:, -2] - largest[:, -1]))
    return routers


def flip_share(margins: Tensor, noise: float) -> float:
    """Return the expected share of tokens whose choice changes under normal noise of this standard deviation in their
    margin."""
    if noise <= 0:
        return 0.0
    return float(torch.special.ndtr(-margins.double() / noise).mean())


class _Routed(Sensitivity):
    """A visitor that collects the routers' logits."""

    def __init__(self, routers: Container[str], *rest: Any) -> None:
        super().__init__(*rest)
        self.logits: list[tuple[str, Tensor]] = []  # Of each router that ran
        self._routers = routers

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        output = super().linear(name, x, weight, expert, product)
        if name in self._routers:
            self.logits.append((name, output))
        return output


@dataclass(frozen=True)
class Routing:
    """How far an assignment moves the margins of a model's routers, to first order, as a quadratic form over sites.

    The cotangent of each token at each router is a random sign times (onehot of the last selected expert - onehot of
    the first not selected), so the form is the sum of squared changes of the margins over all tokens and routers.
    """

    form: QuadraticForm
    routers: tuple[Router, ...]

    def noise(self, keys: Sequence[Key]) -> float:
        """Return the root mean square change of a margin, in units of logits, for an assignment's `Predictor.keys`;
        infinite where they hold infinities."""
        return float((self.form.of(keys) / sum(router.tokens for router in self.routers)) ** 0.5)

    def flips(self, keys: Sequence[Key]) -> float:
        """Return the expected share of choices, over tokens and routers, that change."""
        return flip_share(torch.cat([router.margins for router in self.routers]), self.noise(keys))

    def count(self, keys: Sequence[Key]) -> float:
        """Return the expected number of choices that change, each of a token at a router."""
        return self.flips(keys) * sum(router.tokens for router in self.routers)


def routing_of(model: torch.nn.Module, batches: Sequence[Any], observed: Observed) -> Routing | None:
    """Return the margins' form, and routers with their margins over these batches, from one forward and backward pass
    for each batch; None for a model without routers."""
    routers = tuple(routers_of(observed))
    if not routers:
        return None
    generator = torch.Generator().manual_seed(0)
    tops = {str(router.site): router.top for router in routers}
    margins: dict[tuple[str, int], list[Tensor]] = {}

    def visitor_of(size: int, index: int) -> _Routed:
        every_row = RowSampler(seed=index, exact=True)
        return _Routed(tops, observed.menus, observed.qparams, observed.tied, size, every_row)

    def form(visitor: _Routed, index: int) -> None:
        with evaluating(model), traced(model, visitor):
            call(model, batches[index])
        cotangents = []
        margins.update({(name, index): [] for name in tops})
        for name, logits in visitor.logits:
            largest, order = logits.detach().topk(tops[name] + 1, -1)
            margins[name, index].append((largest[..., -2] - largest[..., -1]).flatten().cpu())
            sign = torch.randint(0, 2, (*logits.shape[:-1], 1), generator=generator).to(logits) * 2 - 1
            cotangent = torch.zeros_like(logits).scatter_(-1, order[..., -2:-1], sign)
            cotangents.append(cotangent.scatter_(-1, order[..., -1:], -sign))
        torch.autograd.grad([logits for _, logits in visitor.logits], visitor.anchor, cotangents, allow_unused=True)

    products, over_these = products_of(batches, visitor_of, form), []
    for router in routers:
        every = [each for (name, _), some in margins.items() if name == str(router.site) for each in some]
        whole = torch.cat([router.margins[:0], *every])
        over_these.append(replace(router, tokens=len(whole), margins=whole))
    return Routing(QuadraticForm(products), tuple(over_these))
