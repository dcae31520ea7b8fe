"""An assignment simulated: weights, inputs and values replaced by what their schemes store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_float32
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import groups
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.tracer import LookUp, Product, Tracer, Visitor
from assay.precision.prediction.perturbations import Perturbation, perturbations_of
from assay.precision.schemes import SCHEMES, Scheme, Split

SPLITS = (":all_reduce", ":accumulator")
"""Sites of a linear whose schemes take its sum in parts: those of ranks, and of each the steps of its accumulator."""


class Simulator:
    """A visitor that runs a model as an assignment would have it: a dict of site names to schemes.

    Weights are kept as the schemes store them, by what is stored: what takes another assignment later, or runs other
    batches, has them.
    """

    def __init__(self, assignment: Mapping[str, Scheme], qparams: QParams, tied: Mapping[str, str]) -> None:
        self._assignment = assignment
        self._qparams = qparams
        self._tied = tied
        self._weights: dict[tuple[str, int | None, Perturbation], torch.Tensor] = {}
        self.tracer: Tracer | None = None
        self.keeps_streamed = False
        """Whether weights are kept too that are in memory only while their module runs."""

    @classmethod
    def of(cls, observed: Observed, assignment: Mapping[str, str]) -> Simulator:
        """For a checked assignment of scheme names."""
        simulator = cls({}, observed.qparams, observed.tied)
        simulator.take(assignment)
        return simulator

    def take(self, assignment: Mapping[str, str]) -> None:
        """Simulate another assignment, of scheme names, from now on."""
        self._assignment = {name: SCHEMES[scheme] for name, scheme in assignment.items()}

    def forget(self) -> None:
        """Drop the weights that are kept."""
        self._weights.clear()

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
        how = None if scheme is None else next((each for each in perturbations_of(scheme) if each[0] == "weight"), None)
        if scheme is None or how is None:
            return weight
        if (owner, expert, how) in self._weights:
            return self._weights[owner, expert, how]
        of_weight = self._qparams.weight(owner, scheme, weight, expert)
        stored = weight if of_weight is None else of_weight(weight)
        if self.keeps_streamed or self.tracer is None or self.tracer.streamed(weight) is None:
            self._weights[owner, expert, how] = stored
        return stored


def split_product(x: torch.Tensor, weight: torch.Tensor, splits: Sequence[Split], product: Product) -> torch.Tensor:
    """x @ weight' with the sum over K in parts, each partial and each running sum rounded; the parts again in parts.

    The bias comes last, in full precision, as epilogues have it.
    """
    several = groups.count(x, weight)
    laid = x.reshape(math.prod(x.shape[:-1]), several, weight.shape[-1]).transpose(0, 1)
    summed = _summed(laid, torch.unflatten(weight, 0, (several, -1)), splits)
    out = summed.transpose(0, 1).reshape(*x.shape[:-1], weight.shape[0])
    return out + product(torch.zeros_like(x), weight)


def _summed(x: torch.Tensor, weight: torch.Tensor, splits: Sequence[Split]) -> torch.Tensor:
    """x [G, R, K] and a weight [G, N, K] to [G, R, N]."""
    if not splits:
        return x @ weight.mT
    split, *inner = splits
    columns = weight.shape[-1]
    length = split.length or -(-columns // split.parts)
    partial, total = format_named(split.partial), format_named(split.total)
    running: torch.Tensor | None = None
    for start in range(0, columns, length):
        some = slice(start, start + length)
        part = round_float32(_summed(x[..., some], weight[..., some], inner), partial)
        running = round_float32(part if running is None else running + part, total)
    return x @ weight.mT if running is None else running  # of no columns at all


def simulated(
    model: torch.nn.Module, batch: Any, metric: Metric, observed: Observed, assignment: Mapping[str, str]
) -> torch.Tensor:
    """What is compared of the model's outputs for a batch with an assignment simulated."""
    return output_of(model, batch, metric, Simulator.of(observed, assignment))


def output_of(model: torch.nn.Module, batch: Any, metric: Metric, visitor: Visitor) -> torch.Tensor:
    """What is compared of the model's outputs for a batch, run by way of a visitor."""
    with torch.no_grad(), evaluating(model), traced(model, visitor):
        return metric.output(call(model, batch), mapping(batch))
