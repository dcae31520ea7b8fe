"""Errors of assignments measured: the model run with each simulated, compared sequence by sequence to its own outputs.

Formats are chosen on short sequences; the error of a KV cache or of attention's stages may grow with the number of
visible keys. `error_by_position` runs long sequences, one at a time, attention in chunks of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.precision.cache import Cache
from assay.precision.errors import BadModel, NoData
from assay.precision.metrics import Metric, at_valid
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import traced
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.sites import Observer
from assay.precision.prediction.chain import Chain, Recording, chain_of
from assay.precision.prediction.simulation import forward_passes, run_batched, simulated
from assay.precision.sampling import MeasuredError, Ratio, ratio
from assay.runtime.tensors import TensorCache


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """Batches to measure errors over, with the unchanged model's outputs."""

    name: str
    """Its name in a cache."""
    batches: Sequence[Any]
    references: TensorCache
    """The outputs to compare, one for each batch."""
    weights: np.ndarray
    """[N]: the divisor of each sequence's distance, float64."""


def evaluation_data(model: torch.nn.Module, batches: Sequence[Any], metric: Metric, name: str) -> EvaluationData:
    """Return data other than the calibration's, by one forward pass for each batch.

    Raises BadModel for outputs that aren't finite, NoData where the metric compares nothing.
    """
    references, weights = TensorCache(), []
    for index, batch in enumerate(batches):
        with torch.no_grad(), evaluating(model), traced(model, Observer(model)):
            reference = metric.output(call(model, batch), mapping(batch))
        if not bool(at_valid(reference, mapping(batch)).isfinite().all()):
            raise BadModel(f"expected finite outputs, got NaN or infinities for batch {index} of {name}: check inputs")
        weights.append(metric.weights(reference, mapping(batch)).numpy(force=True))
        references.add(reference)
    whole = np.concatenate(weights)
    if not whole.sum() > 0:
        raise NoData(f"expected outputs to compare in {name}, got none but padding or zeros: check attention_mask")
    return EvaluationData(name, batches, references, whole)


class Evaluator:
    """Measures errors over evaluation data, each once.

    cache: stores measured errors, and those of an earlier audit. recording: of the model over the batches, which have
    run within it; None: they run for it when needed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: EvaluationData,
        metric: Metric,
        observed: Observed,
        cache: Cache | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.metric = metric
        self.passes = 0.0  # Forward passes that were run, apart from what comes before and after the blocks
        self._observed = observed
        self._cache = cache
        self._recording = recording
        self._known: dict[tuple[str, frozenset[tuple[str, str]]], np.ndarray] = {}

    def error(self, assignment: Mapping[str, str]) -> MeasuredError:
        """The metric with an assignment simulated; not finite where the model breaks."""
        return MeasuredError.of(self._by_sequence([assignment])[0], self.data.weights, self.metric.power)

    def measure_all(self, assignments: Sequence[Mapping[str, str]], done: Callable[[], None] = lambda: None) -> None:
        """Measure assignments in one pass, for later calls of `error`; ``done`` is called once for each."""
        self._by_sequence(assignments, done)

    def agreement(self, assignment: Mapping[str, str]) -> float | None:
        """Return the share of positions at which the model's most likely token or class stays the same; None for
        outputs without."""
        if type(self.metric).agreeing is Metric.agreeing:
            return None
        return float(self._by_sequence([assignment], agreeing=True)[0].sum() / self.data.weights.sum())

    def error_of(self, other: torch.nn.Module) -> MeasuredError:
        """Return the metric of another model of the same inputs, such as a loaded export."""
        distances = []
        for index, batch in enumerate(self.data.batches):
            with torch.no_grad(), evaluating(other):
                output = self.metric.output(call(other, batch), mapping(batch))
            compared = self.metric.compare(self.data.references[index], output, mapping(batch))
            distances.append(torch.as_tensor(compared).numpy(force=True))
        return MeasuredError.of(np.concatenate(distances), self.data.weights, self.metric.power)

    @cached_property
    def chain(self) -> Chain | None:
        """The model as a chain of blocks over these batches; None where it isn't one."""
        if self._recording is not None:
            return self._recording.chain(self.metric)
        return chain_of(self.model, self.data.batches, self.metric)

    def _by_sequence(
        self,
        assignments: Sequence[Mapping[str, str]],
        done: Callable[[], None] = lambda: None,
        *,
        agreeing: bool = False,
    ) -> list[np.ndarray]:
        """Return the distances, or the number of agreeing positions, of each sequence, [N], from memory, cache or a
        run."""
        name = f"{self.data.name}: agreeing" if agreeing else self.data.name
        keys = [(name, frozenset(each.items())) for each in assignments]
        new: dict[tuple[str, frozenset[tuple[str, str]]], Mapping[str, str]] = {}
        for key, assignment in zip(keys, assignments, strict=True):
            kept = self._cache.sequences(assignment, name) if self._cache and key not in self._known else None
            if kept is not None and len(kept) == len(self.data.weights):
                self._known[key] = kept
            if key in self._known or key in new:
                done()
            else:
                new[key] = assignment
        metric, data, runs = self.metric, self.data, list(new.values())
        each: list[list[np.ndarray]] = [[] for _ in runs]

        def record(number: int, batch: int, output: Tensor) -> None:
            compare = metric.agreeing if agreeing else metric.compare
            values = compare(data.references[batch], output, mapping(data.batches[batch]))
            each[number].append(torch.as_tensor(values).numpy(force=True))
            if len(each[number]) == len(data.batches):
                self._known[list(new)[number]] = whole = np.concatenate(each[number])
                if self._cache:
                    self._cache.note(runs[number], whole, name)

        if runs:
            run_batched(self.chain, self.model, data.batches, metric, self._observed, runs, record, done)
            self.passes += forward_passes(self.chain, self._observed, runs)
        return [self._known[key] for key in keys]


BASE = 128
"""The position to compare the last one with, for sequences longer than twice that."""
_FIRST = 8  # The last position of the first step of a curve


@dataclass(frozen=True, slots=True)
class Curve:
    """Errors over steps of half octaves of positions."""

    ends: tuple[int, ...]
    """The last position of each step, counted from 1; a step begins after the end of the one before."""
    errors: tuple[MeasuredError, ...]
    """Of the positions of each step, in the metric's unit, with what each sequence adds."""

    @property
    def base(self) -> int:
        """The end of the step to compare the last one with: 128, or a quarter of a shorter length."""
        wanted = BASE if self.ends[-1] >= 2 * BASE else self.ends[-1] / 4
        return min(self.ends, key=lambda end: abs(math.log(end / wanted)))

    @property
    def growth(self) -> Ratio:
        """The error at the last step over that at `base`, with its 95 % interval, paired by sequences."""
        return ratio(self.errors[-1], self.errors[self.ends.index(self.base)])


def error_by_position(
    model: torch.nn.Module, batches: Sequence[Any], metric: Metric, observed: Observed, assignment: Mapping[str, str]
) -> Curve:
    """Return the error of an assignment over positions, of batches whose sequences all have the same length.

    Two forward passes for each batch. Raises NoData where there are none or lengths differ, WrongShape for outputs
    without positions.
    """
    if not batches:
        raise NoData("expected long sequences for errors over positions, got none: give a longer text")
    values = []
    for batch in batches:
        reference = simulated(model, batch, metric, observed, {})
        output = simulated(model, batch, metric, observed, assignment)
        values.append([each.numpy(force=True) for each in metric.by_position(reference, output, mapping(batch))])
        del reference, output
    lengths = sorted({distances.shape[1] for distances, _ in values})
    if len(lengths) != 1:
        raise NoData(f"expected sequences of one length for errors over positions, got lengths {lengths}")
    ends = steps(lengths[0])
    of = np.searchsorted(ends, np.arange(1, ends[-1] + 1))
    distances, weights = (np.concatenate(each) for each in zip(*values, strict=True))
    in_steps = ((distances[:, of == step].sum(1), weights[:, of == step].sum(1)) for step in range(len(ends)))
    return Curve(ends, tuple(MeasuredError.of(*each, metric.power) for each in in_steps))


def steps(length: int) -> tuple[int, ...]:
    """Return the last positions of half octaves, through 128, up to a length; none within a fifth of it."""
    ends = [round(BASE * 2 ** (half / 2)) for half in range(-8, 2 * max(length, 2).bit_length())]
    return (*(end for end in ends if end >= _FIRST and end * 1.2 <= length), length)
