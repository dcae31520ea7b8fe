"""Two more backward passes: one for random changes as large as the schemes', one for the margins of routers."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.precision.advice.experts import Router, flip_share, routers_of
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import call, evaluating
from assay.precision.observation.tracer import Product
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.perturbations import Key
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.products import differentiate, products_of
from assay.precision.prediction.quadratic_form import QuadraticForm
from assay.precision.prediction.sensitivity import Sensitivity
from assay.precision.prediction.turns import Turns
from assay.precision.schemes import FakeQuantizer

Control = Callable[[Mapping[str, tuple[str, ...]]], QuadraticForm]
"""Names of schemes, by the owners of weights, to the form for random changes as large as theirs."""


def random_control(
    model: torch.nn.Module,
    batches: Sequence[Any],
    predictor: Predictor,
    menus: Mapping[str, tuple[str, ...]],
    chain: Chain | None = None,
) -> QuadraticForm:
    """The form for changes of normal entries that are as large in all as those of the schemes in ``menus``, which are
    named by the owners of weights, over all calibration data. chain: as in `differentiate`."""
    generator = torch.Generator().manual_seed(0)

    def random_change(stored: FakeQuantizer, x: torch.Tensor) -> torch.Tensor:
        size = (stored(x) - x).square().mean().sqrt()
        return size * torch.randn(x.shape, generator=generator).to(x)

    observed = replace(predictor.observed, menus=menus)
    products = differentiate(model, batches, predictor.metric, observed, change=random_change, chain=chain)
    return QuadraticForm(products)


class _Routed(Sensitivity):
    """A visitor that keeps what the routers give."""

    def __init__(self, routers: Container[str], *rest: Any) -> None:
        super().__init__(*rest)
        self.logits: list[tuple[str, torch.Tensor]] = []
        """Of each router that ran."""
        self._routers = routers

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        output = super().linear(name, x, weight, expert, product)
        if name in self._routers:
            self.logits.append((name, output))
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
        """Root mean square change of a margin, in units of logits, by an assignment's `Predictor.keys`; infinite where
        they hold infinities."""
        return float((self.form.of(keys) / sum(router.tokens for router in self.routers)) ** 0.5)

    def flips(self, keys: Sequence[Key]) -> float:
        """Expected share of choices, over tokens and routers, that change."""
        return flip_share(torch.cat([router.margins for router in self.routers]), self.noise(keys))

    def count(self, keys: Sequence[Key]) -> float:
        """Expected number of choices that change, each of a token at a router."""
        return self.flips(keys) * sum(router.tokens for router in self.routers)


def routing_of(model: torch.nn.Module, batches: Sequence[Any], observed: Observed) -> Routing | None:
    """The margins' form, and routers with their margins over these batches, from one forward and backward pass a batch;
    None for a model without routers."""
    routers = tuple(routers_of(observed))
    if not routers:
        return None
    generator = torch.Generator().manual_seed(0)
    tops = {str(router.site): router.top for router in routers}
    margins: dict[tuple[str, int], list[torch.Tensor]] = {}

    def visitor_of(size: int, index: int) -> _Routed:
        every_row = Turns(seed=index, exact=True)
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
        every = [found for (name, _), some in margins.items() if name == str(router.site) for found in some]
        return replace(router, tokens=sum(map(len, every)), margins=torch.cat([router.margins[:0], *every]))

    return Routing(QuadraticForm(products), tuple(map(over_these, routers)))
