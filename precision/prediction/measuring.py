"""Assignments measured: the model run as they would have it, sequence by sequence against what it gives by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.precision.cache import Cache
from assay.precision.errors import BadModel, NoData
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import KEPT, Observed
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.sites import Observer
from assay.precision.prediction.simulation import simulated
from assay.precision.sampling import MeasuredError


@dataclass(frozen=True, slots=True)
class Part:
    """Batches that errors are measured over, with what the model gives for them by itself."""

    name: str
    """What a cache knows it by."""
    batches: Sequence[Any]
    references: list[torch.Tensor] | None
    """The outputs that are compared, one a batch; None: too large to be kept."""
    weights: np.ndarray
    """[N]: what each sequence's distance is divided by, float64."""


def part_of(model: torch.nn.Module, batches: Sequence[Any], metric: Metric, name: str) -> Part:
    """A part of other data than was looked at, by a forward pass a batch.

    Raises BadModel for outputs that aren't finite, NoData where the metric compares nothing.
    """
    references: list[torch.Tensor] = []
    weights, size = [], 0
    for index, batch in enumerate(batches):
        with torch.no_grad(), evaluating(model), traced(model, Observer(model)):
            reference = metric.output(call(model, batch), mapping(batch))
        if not bool(metric.compared(reference, mapping(batch)).isfinite().all()):
            raise BadModel(f"expected finite outputs, got NaN or infinities for batch {index} of {name}: check inputs")
        weights.append(metric.weights(reference, mapping(batch)).numpy(force=True))
        size += reference.numel() * reference.element_size()
        if size <= KEPT:
            references.append(reference)
    whole = np.concatenate(weights)
    if not whole.sum() > 0:
        raise NoData(f"expected outputs to compare in {name}, got none but padding or zeros: check attention_mask")
    return Part(name, batches, references if size <= KEPT else None, whole)


def measured(
    model: torch.nn.Module,
    part: Part,
    metric: Metric,
    observed: Observed,
    assignment: Mapping[str, str],
    cache: Cache | None = None,
) -> MeasuredError:
    """The metric over a part with an assignment simulated, or from the cache; not finite where the model breaks."""
    distances = _by_sequence(model, part, metric, observed, assignment, cache)
    return MeasuredError.of(distances, part.weights, metric.power)


def measured_of(
    other: torch.nn.Module, part: Part, metric: Metric, model: torch.nn.Module, observed: Observed
) -> MeasuredError:
    """The metric over a part of another model of the same inputs, such as an export of ``model`` that was loaded."""
    found = []
    for index, batch in enumerate(part.batches):
        reference = _reference(model, part, metric, observed, index)
        with torch.no_grad(), evaluating(other):
            output = metric.output(call(other, batch), mapping(batch))
        found.append(torch.as_tensor(metric.compare(reference, output, mapping(batch))).numpy(force=True))
    return MeasuredError.of(np.concatenate(found), part.weights, metric.power)


def agreement(
    model: torch.nn.Module,
    part: Part,
    metric: Metric,
    observed: Observed,
    assignment: Mapping[str, str],
    cache: Cache | None = None,
) -> float | None:
    """The share of positions at which the model's most likely token or class stays the same; None where the outputs
    have none."""
    if type(metric).agreeing is Metric.agreeing:
        return None
    same = _by_sequence(model, part, metric, observed, assignment, cache, agreeing=True)
    return float(same.sum() / part.weights.sum())


def _by_sequence(
    model: torch.nn.Module,
    part: Part,
    metric: Metric,
    observed: Observed,
    assignment: Mapping[str, str],
    cache: Cache | None,
    agreeing: bool = False,
) -> np.ndarray:
    """Distances, or positions that agree, of each sequence, [N]: as the cache has them, or from a run."""
    name = f"{part.name}: agreeing" if agreeing else part.name
    if cache and (kept := cache.sequences(assignment, name)) is not None and len(kept) == len(part.weights):
        return kept
    found = []
    for index, batch in enumerate(part.batches):
        reference = _reference(model, part, metric, observed, index)
        output = simulated(model, batch, metric, observed, assignment)
        each = (metric.agreeing if agreeing else metric.compare)(reference, output, mapping(batch))
        found.append(torch.as_tensor(each).numpy(force=True))
    values = np.concatenate(found)
    if cache:
        cache.note(assignment, values, name)
    return values


def _reference(model: torch.nn.Module, part: Part, metric: Metric, observed: Observed, index: int) -> torch.Tensor:
    """What the model gives by itself for a batch of a part."""
    if part.references is not None:
        return part.references[index]
    return simulated(model, part.batches[index], metric, observed, {})
