"""Models with their sites open: what several tests do with one batch of one."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.precision.observation.operations import traced
from assay.precision.observation.qparams import QParams, menu_of
from assay.precision.observation.running import call, evaluating
from assay.precision.observation.sites import Observer
from assay.precision.prediction.perturbations import Perturbation
from assay.precision.prediction.sensitivity import Sensitivity, Term
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES

FORMATS = ("bf16", "w8a8", "w8a16", "w4a16-g32", "kv-fp8", "a-fp8", "w4a16-g32-awq")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from tensors(each)


def observed(model: torch.nn.Module, *given: Any, rtol: float = 1e-4, atol: float = 1e-4) -> Observer:
    """The sites of a model, which gives opened what it gives by itself."""
    observer = Observer(model)
    with torch.no_grad():
        expected = list(tensors(model(*given)))
        with traced(model, observer):
            found = list(tensors(model(*given)))
    assert [each.shape for each in found] == [each.shape for each in expected]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    return observer


class Opened:
    """A model, one batch, its sites and menus, and the products of given cotangents."""

    def __init__(self, model: torch.nn.Module, batch: Any, size: int, formats: tuple[str, ...] = FORMATS) -> None:
        self.model, self.batch, self.size = model.eval(), batch, size
        observer = Observer(model)
        self.reference = self.run(observer)
        self.sites = observer.sites
        self.tied = {str(site): site.tied for site in self.sites.values() if site.tied}
        self.menus = {str(site): menu_of(site, formats) for site in self.sites.values()}
        self.fits = QParams(observer.statistics, observer.weights, observer.sharing_factors(), observer.fused())

    def run(self, visitor: Any) -> Tensor:
        with torch.no_grad(), evaluating(self.model), traced(self.model, visitor):
            outputs = call(self.model, self.batch)
        return outputs if isinstance(outputs, Tensor) else outputs[0]

    def simulated(self, assignment: Mapping[str, str]) -> Tensor:
        schemes = {name: SCHEMES[scheme] for name, scheme in assignment.items()}
        return self.run(Simulator(schemes, self.fits, self.tied))

    def terms(self, cotangent: Tensor) -> dict[tuple[str, Perturbation], Term]:
        visitor = Sensitivity(self.menus, self.fits, self.tied, self.size)
        with evaluating(self.model):
            with traced(self.model, visitor) as tracer:
                visitor.tracer = tracer
                outputs = call(self.model, self.batch)
            output = outputs if isinstance(outputs, Tensor) else outputs[0]
            torch.autograd.grad(output, visitor.anchor, cotangent, allow_unused=True)
        return visitor.terms
