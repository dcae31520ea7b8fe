"""The error of an assignment, measured: the model run with it simulated, beside the model as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.precision.metrics import Metric, Tally
from assay.precision.model.observing import Observed
from assay.precision.model.opening import opened
from assay.precision.model.running import call, mapping, settled
from assay.precision.model.simulation import Simulator
from assay.precision.schemes import SCHEMES

__all__ = ["measured"]


def measured(
    model: torch.nn.Module, batches: Sequence[Any], metric: Metric, observed: Observed, chosen: Mapping[str, str]
) -> float:
    """The metric over all batches for a dict of site names to scheme names; not finite where the model breaks."""
    simulator, tally = _simulator(observed, chosen), Tally()
    for index, batch in enumerate(batches):
        if observed.references is not None:
            reference = observed.references[index]
        else:
            reference = _output(model, batch, metric, _simulator(observed, {}))
        tally.add(metric.compare(reference, _output(model, batch, metric, simulator), mapping(batch)))
    return metric.mean(tally)


def _simulator(observed: Observed, chosen: Mapping[str, str]) -> Simulator:
    schemes = {name: SCHEMES[scheme] for name, scheme in chosen.items()}
    return Simulator(schemes, observed.fits, observed.tied)


def _output(model: torch.nn.Module, batch: Any, metric: Metric, simulator: Simulator) -> torch.Tensor:
    with torch.no_grad(), settled(model), opened(model, simulator):
        return metric.output(call(model, batch), mapping(batch))
