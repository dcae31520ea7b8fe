"""Assignments measured: the model run as they would have it, sequence by sequence against what it gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from assay.precision.cache import Cache
from assay.precision.errors import BadModel, NoData
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.sites import Observer
from assay.precision.prediction.abreast import passes, run_abreast
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.recording import Recording, chain_of
from assay.precision.sampling import MeasuredError
from assay.runtime.tensors import TensorCache


@dataclass(frozen=True, slots=True)
class Part:
    """Batches that errors are measured over, with what the model gives for them by itself."""

    name: str
    """What a cache knows it by."""
    batches: Sequence[Any]
    references: TensorCache
    """The outputs that are compared, one a batch."""
    weights: np.ndarray
    """[N]: what each sequence's distance is divided by, float64."""


def part_of(model: torch.nn.Module, batches: Sequence[Any], metric: Metric, name: str) -> Part:
    """A part of other data than was looked at, by a forward pass a batch.

    Raises BadModel for outputs that aren't finite, NoData where the metric compares nothing.
    """
    references, weights = TensorCache(), []
    for index, batch in enumerate(batches):
        with torch.no_grad(), evaluating(model), traced(model, Observer(model)):
            reference = metric.output(call(model, batch), mapping(batch))
        if not bool(metric.compared(reference, mapping(batch)).isfinite().all()):
            raise BadModel(f"expected finite outputs, got NaN or infinities for batch {index} of {name}: check inputs")
        weights.append(metric.weights(reference, mapping(batch)).numpy(force=True))
        references.add(reference)
    whole = np.concatenate(weights)
    if not whole.sum() > 0:
        raise NoData(f"expected outputs to compare in {name}, got none but padding or zeros: check attention_mask")
    return Part(name, batches, references, whole)


class Measuring:
    """What is measured over a part; nothing is measured twice.

    cache: where what an earlier audit measured is, and this one's goes. recording: of the model over the part's
    batches, which have run within it; None: they are run for it when it is needed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        part: Part,
        metric: Metric,
        observed: Observed,
        cache: Cache | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.model = model
        self.part = part
        self.metric = metric
        self.passes = 0.0
        """Forward passes that were run, apart from what comes before and after the blocks."""
        self._observed = observed
        self._cache = cache
        self._recording = recording
        self._known: dict[tuple[str, frozenset[tuple[str, str]]], np.ndarray] = {}

    def error(self, assignment: Mapping[str, str]) -> MeasuredError:
        """The metric with an assignment simulated; not finite where the model breaks."""
        (distances,) = self._by_sequence([assignment])
        return MeasuredError.of(distances, self.part.weights, self.metric.power)

    def ahead(self, assignments: Sequence[Mapping[str, str]], done: Callable[[], None] = lambda: None) -> None:
        """Measure assignments side by side, for whoever asks for each `error` later; ``done`` is called once each."""
        self._by_sequence(assignments, done)

    def agreement(self, assignment: Mapping[str, str]) -> float | None:
        """The share of positions at which the model's most likely token or class stays the same; None where the
        outputs have none."""
        if type(self.metric).agreeing is Metric.agreeing:
            return None
        (same,) = self._by_sequence([assignment], agreeing=True)
        return float(same.sum() / self.part.weights.sum())

    def error_of(self, other: torch.nn.Module) -> MeasuredError:
        """The metric of another model of the same inputs, such as an export that was loaded."""
        found = []
        for index, batch in enumerate(self.part.batches):
            with torch.no_grad(), evaluating(other):
                output = self.metric.output(call(other, batch), mapping(batch))
            compared = self.metric.compare(self.part.references[index], output, mapping(batch))
            found.append(torch.as_tensor(compared).numpy(force=True))
        return MeasuredError.of(np.concatenate(found), self.part.weights, self.metric.power)

    @cached_property
    def chain(self) -> Chain | None:
        """The model as a chain of blocks over these batches; None where it isn't one."""
        if self._recording is not None:
            return self._recording.chain(self.metric)
        return chain_of(self.model, self.part.batches, self.metric)

    def _by_sequence(
        self,
        assignments: Sequence[Mapping[str, str]],
        done: Callable[[], None] = lambda: None,
        *,
        agreeing: bool = False,
    ) -> list[np.ndarray]:
        """Distances, or positions that agree, of each sequence, [N]: as they are known, or from a run."""
        name = f"{self.part.name}: agreeing" if agreeing else self.part.name
        keys = [(name, frozenset(each.items())) for each in assignments]
        new: dict[tuple[str, frozenset[tuple[str, str]]], Mapping[str, str]] = {}
        for key, assignment in zip(keys, assignments, strict=True):
            kept = self._cache.sequences(assignment, name) if self._cache and key not in self._known else None
            if kept is not None and len(kept) == len(self.part.weights):
                self._known[key] = kept
            if key in self._known or key in new:
                done()
            else:
                new[key] = assignment
        metric, part, runs = self.metric, self.part, list(new.values())
        each: list[list[np.ndarray]] = [[] for _ in runs]

        def found(number: int, batch: int, output: torch.Tensor) -> None:
            compare = metric.agreeing if agreeing else metric.compare
            values = compare(part.references[batch], output, mapping(part.batches[batch]))
            each[number].append(torch.as_tensor(values).numpy(force=True))
            if len(each[number]) == len(part.batches):
                self._known[list(new)[number]] = whole = np.concatenate(each[number])
                if self._cache:
                    self._cache.note(runs[number], whole, name)

        if runs:
            run_abreast(self.chain, self.model, part.batches, metric, self._observed, runs, found, done)
            self.passes += passes(self.chain, self._observed, runs)
        return [self._known[key] for key in keys]
