"""An assignment simulated: weights, inputs and values replaced by what their schemes store; and its error measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.formats.format import format_named
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.tracer import LookUp, Product, Tracer
from assay.precision.schemes import SCHEMES, Scheme, Split
from assay.precision.schemes.rounding import round_element

SPLITS = (":all_reduce", ":accumulator")
"""Sites of a linear whose schemes take its sum in parts: those of ranks, and of each the steps of its accumulator."""


class Simulator:
    """A visitor that runs a model as an assignment would have it: a dict of site names to schemes."""

    def __init__(self, assignment: Mapping[str, Scheme], qparams: QParams, tied: Mapping[str, str]) -> None:
        self._assignment = assignment
        self._qparams = qparams
        self._tied = tied
        self._weights: dict[tuple[str, int | None], torch.Tensor] = {}
        self.tracer: Tracer | None = None

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        owner = self._tied.get(name, name)
        scheme = self._assignment.get(owner)
        stored = self._weight(name, weight, expert)
        if scheme is not None:
            of_input = self._qparams.input(owner, scheme, weight, expert)
            x = x if of_input is None else of_input(x)
        summed = [self._assignment[name + suffix].split for suffix in SPLITS if name + suffix in self._assignment]
        splits = [split for split in summed if split is not None]
        return split_product(x, stored, splits, product) if splits else product(x, stored)

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        return look_up(self._weight(name, weight, None))

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        scheme = self._assignment.get(name)
        if scheme is None:
            return x
        stored = self._qparams.values(name, scheme, part)
        return x if stored is None else stored(x)

    def _weight(self, name: str, weight: torch.Tensor, expert: int | None) -> torch.Tensor:
        owner = self._tied.get(name, name)
        scheme = self._assignment.get(owner)
        if scheme is None:
            return weight
        if (owner, expert) in self._weights:
            return self._weights[owner, expert]
        of_weight = self._qparams.weight(owner, scheme, weight, expert)
        stored = weight if of_weight is None else of_weight(weight)
        if self.tracer is None or self.tracer.streamed(weight) is None:
            self._weights[owner, expert] = stored
        return stored


def split_product(x: torch.Tensor, weight: torch.Tensor, splits: Sequence[Split], product: Product) -> torch.Tensor:
    """x @ weight' with the sum over K in parts, each partial and each running sum rounded; the parts again in parts.

    The bias comes last, in full precision, as epilogues have it.
    """
    nothing = x.new_zeros(*x.shape[:-1], weight.shape[-1])
    return _summed(x, weight, splits) + product(nothing, weight)


def _summed(x: torch.Tensor, weight: torch.Tensor, splits: Sequence[Split]) -> torch.Tensor:
    if not splits:
        return x @ weight.mT
    split, *inner = splits
    columns = weight.shape[-1]
    length = split.length or -(-columns // split.parts)
    partial, total = format_named(split.partial), format_named(split.total)
    running: torch.Tensor | None = None
    for start in range(0, columns, length):
        some = slice(start, start + length)
        part = round_element(_summed(x[..., some], weight[..., some], inner), partial)
        running = round_element(part if running is None else running + part, total)
    return x @ weight.mT if running is None else running  # of no columns at all


def simulated(
    model: torch.nn.Module, batch: Any, metric: Metric, observed: Observed, assignment: Mapping[str, str]
) -> torch.Tensor:
    """What is compared of the model's outputs for a batch with an assignment simulated."""
    schemes = {name: SCHEMES[scheme] for name, scheme in assignment.items()}
    simulator = Simulator(schemes, observed.qparams, observed.tied)
    with torch.no_grad(), evaluating(model), traced(model, simulator):
        return metric.output(call(model, batch), mapping(batch))
