"""The audit of a model: its sites, what any assignment of formats to them will cost, and which one to take."""

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from assay.formats.errors import UnknownOption
from assay.precision.advice import Finding, findings, reasons
from assay.precision.advice.passes import Routing, random_control, routing_of
from assay.precision.cache import Cache
from assay.precision.choice.assignment import Assignment
from assay.precision.choice.explanation import untrusted
from assay.precision.choice.problem import Quantity
from assay.precision.choice.recommendation import Recommender
from assay.precision.choice.roofline import Cost, Roofline, Shape, device_named
from assay.precision.metrics import metric_named
from assay.precision.observation.observing import observe
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import in_float32, normalised
from assay.precision.observation.sites import Site
from assay.precision.prediction.calibration import UNCALIBRATED, Calibration
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.products import differentiate
from assay.precision.prediction.quadratic_form import Prediction, QuadraticForm
from assay.precision.prediction.simulation import error_of
from assay.precision.prediction.trials import (
    KINDS,
    Alone,
    Trial,
    checked_alone,
    random_assignment,
    tried,
    without_gradient,
)
from assay.precision.targets import DEFAULT_DEVICE, formats_of, target_named
from assay.runtime.errors import names_checked

_CHOSEN = 16
"""Points of the front of bytes and error that are measured to calibrate."""

Progress = Callable[[str, int, int], None]
"""Told the stage, how many of its steps are done, and how many there are."""


class Audit:
    """The audit of a model over calibration data: sites, menus, predictions, measurements, recommendations.

    One forward pass looks, one forward and backward pass predicts. model: a module or an exported program; it is left
    as it was. Weights of 16 bits are computed with in float32.
    batches: dicts of keyword arguments, tuples, or tensors; the first dimension of a batch holds its sequences. An
    ``attention_mask`` [B, T] takes padding out of the metric.
    metric: "kl", nats per position at the logits; "relative", of last_hidden_state, logits or a tensor; or a loss,
    called with outputs and batch, that gives a number for each sequence [B].
    formats: names of schemes; None: all but those that are looked at on request only. target: an engine of
    configs/engines.toml, a device of configs/devices.toml or ``engine@device``, which bound the menus; times are the
    device's. bits: of the model's own weights, where they are not those it is given with. shape: what is served, for
    times and the bytes of the KV cache. kept: where what an earlier audit computed is, and this one's goes.
    Raises BadModel, NoData, UnknownScheme, UnknownOption, UnknownDevice.
    """

    @names_checked("audit", "setting", UnknownOption)
    def __init__(
        self,
        model: torch.nn.Module | torch.export.ExportedProgram,
        batches: Sequence[Any],
        metric: str | Callable[[Any, Any], torch.Tensor] = "kl",
        formats: Collection[str] | None = None,
        target: str | None = None,
        *,
        seed: int = 0,
        bits: int | None = None,
        shape: Shape | None = None,
        progress: Progress | None = None,
        kept: Cache | None = None,
    ) -> None:
        self.metric = metric_named(metric)
        schemes = formats_of(formats, target)
        self.model = in_float32(model)
        self.bits = bits or min((p.element_size() * 8 for p in model.parameters() if p.is_floating_point()), default=32)
        """Of the model's own weights: what a site costs that is left as it is."""
        self.shape = shape
        self.batches = normalised(batches)
        self.target = target
        self.seconds: dict[str, float] = {}
        """Wall time of each stage."""
        self.measured: list[Trial] = []
        """Random assignments that were measured to calibrate the interval."""
        self.chosen: list[Trial] = []
        """And those of the front of bytes and error."""
        self.alone: list[Alone] = []
        """Site, scheme, predicted and measured error of what was measured alone, since its prediction was doubtful."""
        self._seed = seed
        self._progress = progress or (lambda stage, done, count: None)
        self._cache = kept
        with self._timed("looking"):
            self.observed = observe(self.model, self.batches, self.metric, schemes, self._steps("looking"))
        with self._timed("predicting"):
            self.predictor = Predictor(self.observed, self.metric, self._differentiated())
            """What is predicted from; another one each time that something is learnt."""
        self.observed = self.observed.without_gradient(without_gradient(self.predictor, self._simulated))
        self.predictor = replace(self.predictor, observed=self.observed)
        self.roofline = Roofline(
            target_named(target).device or device_named(DEFAULT_DEVICE),
            self.observed.every,
            shape or Shape.of(self.model),
            self.bits,
            sum(parameter.numel() for parameter in self.model.parameters()),
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        """What can be given a format."""
        return self.observed.sites

    @property
    def every(self) -> tuple[Site, ...]:
        """Sites with a menu or without, which what the model costs as it is comes from."""
        return self.observed.every

    @property
    def cut(self) -> tuple[Site, ...]:
        """Sites whose formats change the output though no gradient leads back to them: they keep their own."""
        return self.observed.no_gradient

    @property
    def fits(self) -> QParams:
        """The quantisation parameters that schemes were simulated with, for exports."""
        return self.observed.qparams

    def menu(self, site: str) -> tuple[str, ...]:
        """The names of the schemes that may stand at a site. Raises BadAssignment for a site that there is not."""
        return self.observed.menu(site)

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """The error of an assignment with its 95 % interval. No model is run, but in the first call, to calibrate."""
        return self._calibrated().predict(self.checked(assignment))

    def measure(self, assignment: Mapping[str, str]) -> float:
        """The error with that assignment simulated, over all calibration data; not finite where the model breaks."""
        return self._simulated(self.checked(assignment))

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
        """The assignment to take under budgets, measured: of least error, or of fewest bytes if only the error has one.

        max_error: in the metric's unit. max_bytes: of all weights. max_kv_bytes: of the cache at the context length of
        ``shape``. max_time: seconds of a decode step on the target, max_prefill of a prefill. fixed: sites that keep
        their own format. Where no assignment meets them, the closest, with ``met`` False and the budgets that bind in
        ``why``. Raises UnknownOption, BadAssignment.
        """
        budgets: dict[Quantity, float | None] = {"error": max_error, "bytes": max_bytes, "kv_bytes": max_kv_bytes}
        budgets |= {"prefill": max_prefill, "decode": max_time}
        kept = {self.observed.owner(self.observed.site(site)) for site in fixed}
        recommender = Recommender(self._calibrated(), self.measure, self.roofline, kept)
        found = recommender.recommend(budgets)
        self.predictor = recommender.predictor
        found.why += untrusted(reliability(self, found))
        return found

    def pareto(self, points: int = 16) -> list[tuple[float, float, Prediction, Assignment]]:
        """(bytes, seconds of a decode step, prediction, assignment) of which none is beaten in bytes and error."""
        recommender = Recommender(self._calibrated(), self.measure, self.roofline)
        found = [recommender.told(assignment) for assignment in recommender.front(points)]
        return [(each.cost.bytes, each.cost.decode, each.prediction, each) for each in found]

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Bytes and times of an assignment on the target."""
        return self.roofline.total(self.checked(assignment))

    @cached_property
    def noise_floor(self) -> float:
        """The error with every site rounded to bfloat16: below it, what runs in 16 bits can't be told apart."""
        return self._simulated(dict.fromkeys(self.observed.cast, "bf16"))

    def contribution(self, site: str, scheme: str) -> float:
        """The predicted error of one site alone, before calibration."""
        return self.predictor.uncalibrated(self.checked({site: scheme}))[0]

    def calibrate(self, count: int = 48) -> None:
        """Measure ``count`` / 2 schemes alone, of which the prediction is least sure, 16 assignments that are the best
        by it, and ``count`` random ones, from dense to sparse: the interval is fitted to both kinds."""
        total, done = count // 2 + _CHOSEN + count, 0

        def step() -> None:
            nonlocal done
            done += 1
            self._progress("measuring", min(done, total - 1), total)

        with self._timed("measuring"):
            if not self.measured:
                self.predictor, self.alone = checked_alone(self.predictor, self.measure, count // 2, step)
                front = Recommender(self.predictor, self.measure, self.roofline).front(_CHOSEN)
                self.chosen = tried(self.predictor, self.measure, filter(None, front), step)
            places = range(len(self.measured), count)
            kinds = ((random.Random(f"{self._seed} {place}"), *KINDS[place % len(KINDS)]) for place in places)
            drawn = (random_assignment(self.predictor, draw, share, fine=fine) for draw, share, fine in kinds)
            self.measured += tried(self.predictor, self.measure, drawn, step)
        self._progress("measuring", total, total)
        pairs = ([pair for _, pair in trials] for trials in (self.measured, self.chosen))
        self.predictor = replace(self.predictor, calibration=Calibration.fitted(*pairs, power=self.metric.power))

    def random_assignment(self, draw: random.Random, share: float = 1.0, *, fine: bool = False) -> dict[str, str]:
        """A random scheme at every site, or at a random share of them (one at least); 0: one wherever it may stand.

        fine: of the half of each menu with the smaller errors, as what is recommended mostly has.
        """
        return random_assignment(self.predictor, draw, share, fine=fine)

    def checked(self, assignment: Mapping[str, str]) -> dict[str, str]:
        """The assignment, its names known and allowed, that of a tied weight put at the site that holds it.

        Raises BadAssignment, UnknownScheme.
        """
        return self.observed.checked(assignment)

    @cached_property
    def routing(self) -> Routing | None:
        """How far assignments move the margins of routers; None without them. Runs one backward pass where there are
        routers."""
        with self._timed("routers"):
            return routing_of(self.model, self.batches, self.observed)

    def _calibrated(self) -> Predictor:
        if self.predictor.calibration is UNCALIBRATED:
            self.calibrate()
        return self.predictor

    def _simulated(self, assignment: Mapping[str, str]) -> float:
        if self._cache and (found := self._cache.error(assignment)) is not None:
            return found
        error = error_of(self.model, self.batches, self.metric, self.observed, assignment)
        if self._cache:
            self._cache.note(assignment, error)
        return error

    def _differentiated(self) -> QuadraticForm:
        """The form, from one forward and backward pass a batch, or from the cache."""
        if self._cache and (kept := self._cache.products(self.observed.menus)):
            return QuadraticForm(kept)
        done = self._steps("predicting")
        products = differentiate(self.model, self.batches, self.metric, self.observed, seed=self._seed, done=done)
        if self._cache:
            self._cache.keep(products)
        return QuadraticForm(products)

    def _steps(self, stage: str) -> Callable[[int], None]:
        return lambda done: self._progress(stage, done, len(self.batches))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began


audit = Audit
"""As a function, which it is called as."""


def advise(audit: Audit) -> list[Finding]:
    """All findings of an audit: what breaks first, then what a prediction can't see, what costs most, and notes.

    No assignment is run; one more backward pass over the calibration data gives the random control.
    """
    predictor = audit.predictor
    return findings(predictor, lambda menus: random_control(audit.model, audit.batches, predictor, menus))


def reliability(audit: Audit, assignment: Mapping[str, str]) -> list[str]:
    """Reasons to measure this assignment rather than to trust its prediction, a sentence each; none: trust it.

    Runs one backward pass over the calibration data the first time it is asked about a model with routers, and, like
    `predict`, the calibration where there is none yet. Raises BadAssignment, UnknownScheme.
    """
    chosen = audit.checked(assignment)
    audit.predict(chosen)  # which calibrates
    return reasons(audit.predictor, chosen, [pair.measured for _, pair in audit.measured], audit.routing)
