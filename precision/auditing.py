"""The audit of a model: its sites, the error that any assignment of formats to them makes, and which one to take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import count as counting
from typing import Any

import torch
from torch import Tensor

from assay.formats.errors import UnknownOption
from assay.precision.advice import Finding, findings, reasons
from assay.precision.advice.routers import Routing, routing_of
from assay.precision.cache import Cache
from assay.precision.choice.problem import Quantity
from assay.precision.choice.recommendation import Assignment, Judge, Recommender, untrusted
from assay.precision.choice.roofline import Cost, Roofline, Shape, stored_bits
from assay.precision.metrics import metric_named
from assay.precision.observation.observing import observe
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import in_float32, normalised
from assay.precision.observation.sites import Site
from assay.precision.prediction.backward import AGAIN, differentiate
from assay.precision.prediction.calibration import UNCALIBRATED
from assay.precision.prediction.chain import Recording
from assay.precision.prediction.measuring import Curve, EvaluationData, Evaluator, error_by_position, evaluation_data
from assay.precision.prediction.predictor import (
    Predictor,
    Trial,
    draw_assignments,
    random_assignment,
    recalibrated,
    repredicted,
    run_trials,
    sites_without_gradient,
)
from assay.precision.prediction.quadratic_form import Prediction, QuadraticForm
from assay.precision.sampling import MeasuredError, OtherSequences, relative_spread
from assay.precision.targets import formats_of, kind_of, target_named
from assay.runtime.errors import names_checked

Progress = Callable[[str, int, int], None]
"""Receives a stage, how many of its steps are done, and how many there are."""


class Audit:
    """The audit of a model over calibration data: sites, menus, predictions, measurements, recommendations.

    One forward pass observes the model, four backward passes give the products that predict.

    model: a module or an exported program; it is left unchanged. 16-bit weights are computed with in float32.
    batches: dicts of keyword arguments, tuples of positional arguments, or the only argument; sequences are along the
    first dimension of tensors. An ``attention_mask`` [B, T] takes padding out of the metric and of all fits.
    metric: "kl", nats per position at the logits; "relative", of last_hidden_state, logits or a tensor; or a loss,
    called with outputs and batch, that gives a number for each sequence [B].
    formats: names of schemes; None: all but the ones that are audited on request only.
    target: an engine of configs/engines.toml, a device of configs/devices.toml, or ``engine@device``; it bounds the
    menus, and the device gives the times.
    check: held-out batches, over which `Audit.measure` and reported errors are; fits, predictions and choices use
    ``batches`` only. None: ``batches``.
    seed: of the random cotangents and assignments. bits: of the model's stored weights, where the model is given in
    another dtype. shape: the served workload, for times and the bytes of the KV cache. cache: stores products and
    measured errors, and reuses those of an earlier audit.
    unfused: each linear may have a scheme of its own, although engines run q, k and v, and gate and up, as one product;
    None: as the target does. exact: use every row of every weight instead of sampling the large ones.

    Raises BadModel, NoData, UnknownScheme, UnknownOption, UnknownDevice.
    """

    @names_checked("audit", "setting", UnknownOption)
    def __init__(
        self,
        model: torch.nn.Module | torch.export.ExportedProgram,
        batches: Sequence[Any],
        metric: str | Callable[[Any, Any], Tensor] = "kl",
        formats: Collection[str] | None = None,
        target: str | None = None,
        *,
        check: Sequence[Any] | None = None,
        seed: int = 0,
        bits: int | None = None,
        shape: Shape | None = None,
        progress: Progress | None = None,
        cache: Cache | None = None,
        unfused: bool | None = None,
        exact: bool = False,
    ) -> None:
        self.metric = metric_named(metric)
        schemes = formats_of(formats, target)
        model = model.module(check_guards=False) if isinstance(model, torch.export.ExportedProgram) else model
        self.model = in_float32(model)
        stored = (p.element_size() * 8 for p in model.parameters() if p.is_floating_point())
        self.bits = bits or min(stored, default=32)
        """Bits of an element of the model's own weights, which unassigned sites keep."""
        self.target = target
        """The engine, the device or both that the audit is for."""
        self.batches = normalised(batches, self.model)
        self.check = None if check is None else normalised(check, self.model)
        self.seconds: dict[str, float] = {}  # Wall time of each stage
        self.measured: list[Trial] = []  # Assignments that were measured to calibrate the interval
        self._seed = seed
        self._progress = progress or (lambda stage, done, count: None)
        self._allowed_schemes: frozenset[str] | None = None
        with self._timed("looking"):
            rules = target_named(target).served(schemes, kind_of(self.model))
            rules = rules if unfused is None else replace(rules, unfused=unfused)
            recording, done = Recording(self.model, self.batches), self._steps("looking")
            self.observed = observe(self.model, self.batches, self.metric, schemes, done, rules, recording.over)
            data = EvaluationData("choice", self.batches, self.observed.references, self.observed.sequence_weights)
            common = self.metric, self.observed, cache
            self.choice_evaluator = Evaluator(self.model, data, *common, recording)
            self.report_evaluator = self.choice_evaluator
            if self.check is not None:
                data = evaluation_data(self.model, self.check, self.metric, "check")
                self.report_evaluator = Evaluator(self.model, data, *common)
        with self._timed("predicting"):
            count = len(self.report_evaluator.data.weights)
            others = OtherSequences(self.choice_evaluator.data.weights, count) if check else None
            products = cache.products(self.observed.menus) if cache else None
            if products is None:
                given, chain = (self.model, self.batches, self.metric, self.observed), self.choice_evaluator.chain
                done = self._steps("predicting")
                products = differentiate(*given, again=AGAIN, seed=seed, chain=chain, exact=exact, done=done)
                if cache:
                    cache.keep(products, self.observed.menus)
            self.predictor = Predictor(self.observed, self.metric, QuadraticForm(products), others=others)
            """Replaced whenever a measurement corrects it."""
        self.observed = self.observed.without_gradient(sites_without_gradient(self.predictor, self.trial))
        self.predictor = replace(self.predictor, observed=self.observed)
        self.roofline = Roofline(
            target_named(target).device,
            self.observed.all_sites,
            shape or Shape.of(self.model),
            self.bits,
            *stored_bits(model, self.observed.all_sites, bits, self.bits),
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that can be given a format."""
        return self.observed.sites

    @property
    def all_sites(self) -> tuple[Site, ...]:
        """All sites, with a menu or without; the cost of the unchanged model is theirs."""
        return self.observed.all_sites

    @property
    def sites_without_gradient(self) -> tuple[Site, ...]:
        """Sites whose formats change the output though no gradient reaches them: they keep their own."""
        return self.observed.no_gradient

    @property
    def fits(self) -> QParams:
        """The quantisation parameters of the simulation, for exports."""
        return self.observed.qparams

    def menu(self, site: str) -> tuple[str, ...]:
        """Return the names of the schemes that a site may have. Raises BadAssignment for an unknown site."""
        allowed = self._allowed_schemes
        return tuple(each for each in self.observed.menu(site) if allowed is None or each in allowed)

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """Return the error of an assignment with its 95 % interval. The model runs in the first call only, to
        calibrate."""
        return self._calibrated().predict(self.checked(assignment))

    def measure(self, assignment: Mapping[str, str]) -> MeasuredError:
        """Return the error with the assignment simulated, over the held-out batches where there are any: a float with
        ``low`` and ``high``, its 95 % interval over sequences; not finite where the model breaks."""
        return self.report_evaluator.error(self.checked(assignment))

    def measure_together(self, assignments: Sequence[Mapping[str, str]]) -> list[MeasuredError]:
        """Return `measure` of several assignments, which run in one batch."""
        self.report_evaluator.measure_all([self.checked(each) for each in assignments])
        return [self.measure(each) for each in assignments]

    def trial(self, assignment: Mapping[str, str]) -> MeasuredError:
        """Return the error over ``batches``, on which the audit calibrates and chooses."""
        return self.choice_evaluator.error(self.checked(assignment))

    def agreement(self, assignment: Mapping[str, str]) -> float | None:
        """Return the share of tokens (of a classifier: sequences) whose most likely value stays the same, over the data
        of `measure`; None for metrics without such outputs."""
        return self.report_evaluator.agreement(self.checked(assignment))

    def positions(self, assignment: Mapping[str, str], batches: Sequence[Any]) -> Curve:
        """Return the error over positions of long sequences. Raises BadAssignment, NoData, WrongShape."""
        given, chosen = normalised(batches, self.model), self.checked(assignment)
        return error_by_position(self.model, given, self.metric, self.observed, chosen)

    def predictor_over(self, batches: Sequence[Any], further: int = 0) -> Predictor:
        """Return a predictor of the errors over other sequences: longer ones, or other text. The calibration's
        assignments are measured over them too, and the interval is fitted to that.

        further: the interval holds for this many other sequences like them; 0: for these. Raises BadModel, NoData.
        """
        predictor, given = self._calibrated(), normalised(batches, self.model)
        routing = routing_of(self.model, given, self.observed)
        data = evaluation_data(self.model, given, self.metric, "other")
        measuring = Evaluator(self.model, data, self.metric, self.observed)
        assignments = [assignment for assignment, _ in self.measured]
        measuring.measure_all(assignments)
        known, weights = len(measuring.data.weights), self.choice_evaluator.data.weights
        others = OtherSequences(weights, further, known) if further else None
        predictor = replace(predictor, others=others, flips=None if routing is None else routing.count)
        return recalibrated(predictor, run_trials(predictor, measuring.error, assignments))

    def recommend(
        self,
        max_error: float | None = None,
        max_bytes: float | None = None,
        max_time: float | None = None,
        *,
        max_kv_bytes: float | None = None,
        max_prefill: float | None = None,
        fixed: Collection[str] = (),
    ) -> Assignment:
        """Return the assignment to use under budgets, measured: of least error, or of fewest bytes where only the error
        has a budget.

        max_error: in the metric's unit. max_bytes: of all weights. max_kv_bytes: of the cache at the context length of
        ``shape``. max_time: seconds of a decode step on the target's device, max_prefill: of a prefill. fixed: sites
        that keep their own format. Where no assignment meets the budgets: the closest, with ``met`` False and the
        binding budgets in ``why``. Raises UnknownOption, BadAssignment.
        """
        budgets: dict[Quantity, float | None] = {"error": max_error, "bytes": max_bytes, "kv_bytes": max_kv_bytes}
        budgets |= {"prefill": max_prefill, "decode": max_time}
        kept = {self.observed.weight_site(self.observed.site(site)) for site in fixed}
        if self.roofline.device is None and not max_time is max_prefill is None:
            raise UnknownOption("expected a target with a device for max_time and max_prefill, such as target='h200'")
        predictor = self._chooser()
        judge = None
        if self.check is not None:  # with the standard error of the logarithm of one error over the other
            errors = [pair.measured for _, pair in self.measured if isinstance(pair.measured, MeasuredError)]
            counts = (len(each.data.weights) for each in (self.choice_evaluator, self.report_evaluator))
            judge = Judge(self.measure, relative_spread(errors) * math.sqrt(sum(1 / count for count in counts)))
        recommender = Recommender(
            predictor,
            self.trial,
            self.roofline,
            kept,
            judge=judge,
            refitted=lambda predictor: recalibrated(predictor, self.measured),
        )
        assignment = recommender.recommend(budgets)
        if recommender.predictor is not predictor:
            self.predictor = replace(recommender.predictor, observed=self.observed)
            self.measured = repredicted(self.predictor, self.measured)
        assignment.why += ("" if assignment.met else self.observed.unaudited.clause) + untrusted(
            self.reliability(assignment)
        )
        return assignment

    def limit(self, schemes: Collection[str]) -> None:
        """Choose from these schemes only, such as an export's; others can still be predicted and
        measured."""
        self._allowed_schemes = frozenset(schemes)

    def pareto(self, points: int = 16) -> list[tuple[float, float, Prediction, Assignment]]:
        """Return (bytes, seconds of a decode step or NaN, prediction, assignment) of assignments not dominated in bytes
        and error."""
        recommender = Recommender(self._chooser(), self.trial, self.roofline)
        assignments = [recommender.evaluated(assignment) for assignment in recommender.front(points)]
        return [(each.cost.bytes, each.cost.decode, each.prediction, each) for each in assignments]

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Return bytes and, on the target's device, times of an assignment; NaN without a device."""
        return self.roofline.cost_of(self.checked(assignment))

    @cached_property
    def noise_floor(self) -> MeasuredError:
        """The error with every site rounded to bfloat16: smaller differences mean nothing for a model that runs in 16
        bits."""
        return self.report_evaluator.error(dict.fromkeys(self.observed.bf16_sites, "bf16"))

    def reliability(self, assignment: Mapping[str, str]) -> list[str]:
        """Return the reasons not to trust the prediction; see `precision.reliability`."""
        chosen, predictor = self.checked(assignment), self._calibrated()
        return reasons(predictor, chosen, [pair.measured for _, pair in self.measured], self.routing)

    def contribution(self, site: str, scheme: str) -> float:
        """Return the predicted error of one site alone, before calibration."""
        return self.predictor.uncalibrated(self.checked({site: scheme}))[0]

    def calibrate(self, count: int = 20) -> None:
        """Measure ``count`` assignments and fit the interval to them; a 95 % interval needs at least 19.

        They are drawn at random, from dense to sparse, and from the Pareto front of bytes and error. Assignments whose
        error depends on routers' flips don't count, and are replaced by as many more.
        """
        if self.routing is not None:
            self.predictor = replace(self.predictor, flips=self.routing.count)
        for _ in range(2):
            indices = range(len(self.measured), count + self.predictor.calibration.unscored)
            if not indices:
                continue
            done = partial(self._count_measured, counting(1), len(indices))
            with self._timed("measuring"):
                best = Recommender(self.predictor, self.trial, self.roofline).front
                assignments = draw_assignments(self.predictor, best, self._seed, indices)
                self.choice_evaluator.measure_all(assignments, done)
                self.measured += run_trials(self.predictor, self.trial, assignments)
            self._progress("measuring", len(indices), len(indices))
            self.predictor = recalibrated(self.predictor, self.measured)

    def _count_measured(self, done: Iterator[int], count: int) -> None:
        self._progress("measuring", min(next(done), count - 1), count)

    def random_assignment(self, draw: random.Random, share: float = 1.0, *, fine: bool = False) -> dict[str, str]:
        """Return a random scheme at every site, or at a random share of them (at least one); share 0: one scheme
        wherever possible. fine: from the half of each menu with the smaller errors, as most recommendations."""
        return random_assignment(self.predictor, draw, share, fine=fine)

    def checked(self, assignment: Mapping[str, str]) -> dict[str, str]:
        """Return the assignment with its names checked and the scheme of a tied weight moved to the site that holds it.

        Raises BadAssignment, UnknownScheme.
        """
        return self.observed.checked(assignment)

    @cached_property
    def routing(self) -> Routing | None:
        """How far assignments move the margins of routers, by one backward pass; None for a model without routers."""
        with self._timed("routers"):
            return routing_of(self.model, self.batches, self.observed)

    def _calibrated(self) -> Predictor:
        if self.predictor.calibration is UNCALIBRATED:
            self.calibrate()
        return self.predictor

    def _chooser(self) -> Predictor:
        """The predictor whose menus hold the allowed schemes only."""
        predictor, allowed = self._calibrated(), self._allowed_schemes
        return predictor if allowed is None else replace(predictor, observed=self.observed.limited(allowed))

    def _steps(self, stage: str) -> Callable[[int], None]:
        return lambda done: self._progress(stage, done, len(self.batches))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began


audit = Audit
"""The class as a function: ``audit(model, batches)`` returns an `Audit`."""


def advise(audit: Audit) -> list[Finding]:
    """Return all findings of an audit: what breaks the model, what no prediction shows, what costs most, and notes.

    No assignment is run; one more backward pass over the calibration data gives the random control.
    """
    return findings(audit.model, audit.batches, audit.predictor, audit.choice_evaluator.chain)


def reliability(audit: Audit, assignment: Mapping[str, str]) -> list[str]:
    """Return the reasons to measure this assignment rather than trust its prediction, a sentence each; empty: trust it.

    Runs one backward pass over the calibration data at the first call for a model with routers and, like `predict`,
    calibrates first if need be. Raises BadAssignment, UnknownScheme.
    """
    return audit.reliability(assignment)
