"""Mixtures of experts: routers near ties, experts without calibration tokens, and how far assignments move the
margins."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.configs import architectures
from assay.precision.advice.finding import Finding, at_stake, matrices, product_of, rows_of
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import traced
from assay.precision.observation.running import call, evaluating
from assay.precision.observation.sites import Site
from assay.precision.observation.tracer import Product
from assay.precision.prediction.backward import products_of
from assay.precision.prediction.perturbations import Key
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.quadratic_form import QuadraticForm
from assay.precision.prediction.row_sampling import RowSampler
from assay.precision.prediction.sensitivity import Sensitivity

_FLIPS = 0.02  # Share of tokens that rounding the router's own product to bfloat16 may reroute
_FEW = 0.05  # Share of an even load below which an expert counts as unseen
_LEAST = 8  # Tokens below which an expert counts as unseen too, if an even load is more than twice that


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
        name = architectures.experts_of(site)
        if name and site.type == "linear":
            stacked.setdefault(name, []).append(site)
    return [Experts(name, tuple(sites), _loads(observed, name, sites)) for name, sites in stacked.items()]


def _loads(observed: Observed, name: str, sites: list[Site]) -> tuple[int, ...]:
    seen = observed.statistics[str(sites[0]), ""]
    if seen.experts:
        return tuple(seen.experts.get(expert, 0) for expert in range(sites[0].shape[0]))
    numbers = {
        int(module[len(name) + 1 :])
        for module in observed.modules
        if module.startswith(f"{name}.") and module[len(name) + 1 :].isdigit()
    }
    counts = dict.fromkeys(sorted(numbers), 0)
    for site in sites:
        number = str(site)[len(name) + 1 :].partition(".")[0]
        if number.isdigit():
            counts[int(number)] = max(counts[int(number)], observed.statistics[str(site), ""].count)
    return tuple(counts.values())


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


def near_ties(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield routers whose choice is so close that rounding their own input and weight to bfloat16 changes it."""
    for router in routers_of(observed):
        rows, weights = rows_of(observed, router.site), matrices(observed, router.site)
        if rows is None or not weights:
            continue
        weight = weights[None]
        shares = {}
        for scheme in dict.fromkeys(("bf16", *observed.menu(router.site))):
            noise = product_of(observed, router.site, scheme, rows, weight) - rows @ weight.mT
            # A margin is the difference of two logits; what is common to all of them changes nothing.
            deviation = math.sqrt(2) * float((noise - noise.mean(-1, keepdim=True)).square().mean().sqrt())
            shares[scheme] = flip_share(router.margins, deviation)
        if shares["bf16"] > _FLIPS:
            yield Finding(
                "router_ties",
                str(router.site),
                f"The choice of {router.top} experts is close to a tie for many tokens: rounding the router's input "
                f"and weight to bfloat16 sends {shares['bf16']:.1%} of them elsewhere.",
                {"flips": shares, "median_margin": float(router.margins.median()), "top": router.top},
                "Leave the router as it is and measure what you choose: no prediction sees a flip.",
                at_stake(predictor, router.site),
            )


def unseen_experts(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield experts with almost no tokens: their scales are guesses, and their errors are missing from all sums."""
    for experts in experts_of(observed):
        even = sum(experts.loads) / max(len(experts.loads), 1)
        limit = max(_FEW * even, _LEAST if even > 2 * _LEAST else 0)
        for expert, load in enumerate(experts.loads):
            if load < limit or not load:
                yield Finding(
                    "unseen_expert",
                    experts.name,
                    f"Expert {expert} got {load} of {sum(experts.loads)} calibration tokens, where an even load is "
                    f"{even:.0f}: its scales and errors are not known.",
                    {"expert": expert, "tokens": load, "even": even},
                    "Calibrate on text that reaches it, or keep the experts of this layer as they are.",
                    max(at_stake(predictor, site) for site in experts.sites),
                )


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

    products = products_of(batches, visitor_of, form)

    def over_these(router: Router) -> Router:
        every = [each for (name, _), some in margins.items() if name == str(router.site) for each in some]
        return replace(router, tokens=sum(map(len, every)), margins=torch.cat([router.margins[:0], *every]))

    return Routing(QuadraticForm(products), tuple(map(over_these, routers)))
