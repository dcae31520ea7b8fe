"""The audit of a model: its sites, what any assignment of formats to them will cost, and which one to take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch

from assay.precision.calibration import Calibration, Measured
from assay.precision.choice import Budgets
from assay.precision.errors import BadAssignment, BadModel
from assay.precision.kept import Kept
from assay.precision.metrics import Metric, metric_named
from assay.precision.model.measuring import measured
from assay.precision.model.menu import formats_of
from assay.precision.model.observing import observe
from assay.precision.model.parts import is_repeated, parts_of
from assay.precision.model.products import products_of
from assay.precision.model.running import mapping, prepared, taken
from assay.precision.model.sensitivity import Sensitivity
from assay.precision.model.sites import Site
from assay.precision.prediction import Key, Prediction, QuadraticForm
from assay.precision.recommendation import Assignment, Planner
from assay.precision.roofline import Cost, Shape
from assay.precision.schemes import SCHEMES, scheme_named
from assay.precision.trials import KINDS, check_doubtful, random_assignment, without_gradient

__all__ = ["Audit", "Progress", "audit"]

_CHOSEN = 16
"""Points of the front of bytes and error that are measured to calibrate."""

Progress = Callable[[str, int, int], None]
"""Told the stage, how many of its steps are done, and how many there are."""


def audit(
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
    kept: Kept | None = None,
) -> Audit:
    """Audit a model over calibration data: one forward pass that looks, one forward and backward pass that predicts.

    model: a module or an exported program; it is left as it was. Weights of 16 bits are computed with in float32.
    batches: dicts of keyword arguments, tuples, or tensors; the first dimension of a batch holds its sequences. An
    ``attention_mask`` [B, T] takes padding out of the metric.
    metric: "kl", nats per position at the logits; "relative", of last_hidden_state, logits or a tensor; or a loss,
    called with outputs and batch, that gives a number for each sequence [B].
    formats: names of schemes; None: those of the interface. target: a device of configs/devices.toml, whose formats
    bound the menus. bits: of the model's own weights, where they are not those it is given with. shape: what is served,
    for times and the bytes of the KV cache. kept: where what an earlier audit computed is, and this one's goes.
    Raises BadModel, NoData, UnknownScheme, UnknownOption, UnknownDevice.
    """
    return Audit(
        model,
        batches,
        metric_named(metric),
        formats_of(formats, target),
        target,
        seed=seed,
        bits=bits,
        shape=shape,
        progress=progress or _silent,
        kept=kept,
    )


class Audit:
    """What `audit` gives: sites, menus, predictions, measurements, recommendations."""

    def __init__(
        self,
        model: torch.nn.Module | torch.export.ExportedProgram,
        batches: Iterable[Any],
        metric: Metric,
        formats: Sequence[str],
        target: str | None,
        *,
        seed: int,
        bits: int | None,
        shape: Shape | None,
        progress: Progress,
        kept: Kept | None,
    ) -> None:
        self.model = prepared(model)
        self.bits = bits or min((p.element_size() * 8 for p in model.parameters() if p.is_floating_point()), default=32)
        """Of the model's own weights: what a site costs that is left as it is."""
        self.shape = shape
        self.batches = taken(batches)
        self.metric = metric
        self.target = target
        self.seconds: dict[str, float] = {}
        """Wall time of each stage."""
        self._seed = seed
        self._progress = progress
        self._kept = kept
        self._calibration: Calibration | None = None
        self.measured: list[tuple[dict[str, str], Measured]] = []
        """Random assignments that were measured to calibrate the interval."""
        self.chosen: list[tuple[dict[str, str], Measured]] = []
        """And those of the front of bytes and error."""
        self.alone: list[tuple[str, str, float, float]] = []
        """Site, scheme, predicted and measured error of what was measured alone, since its prediction was doubtful."""
        count = len(self.batches)
        with self._timed("looking"):
            found = observe(self.model, self.batches, metric, formats, lambda done: progress("looking", done, count))
        self.sites, self.seen, self.weights, self.fits = found.sites, found.seen, found.weights, found.fits
        self._observed = found
        self.every = found.every
        """Sites with a menu or without, which what the model costs as it is comes from."""
        self._by_name = {str(site): site for site in self.sites}
        with self._timed("predicting"):
            self.form = self._differentiate()
        self.cut = without_gradient(self)
        """Sites whose formats change the output though no gradient leads back to them: they keep their own."""
        for site in self.cut:
            del self._observed.menus[site], self._by_name[site]
        self.sites = tuple(self._by_name.values())

    def menu(self, site: str) -> tuple[str, ...]:
        """The names of the schemes that may stand at a site. Raises BadAssignment for a site that there is not."""
        return self._observed.menus[self._known(site)]

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """The error of an assignment with its 95 % interval. No model is run, but in the first call, to calibrate."""
        calibration = self._calibrated()
        return Prediction(*calibration.interval(*self._raw(self.checked(assignment))))

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
        budgets = Budgets(max_error, max_bytes, max_kv_bytes, max_prefill, max_time)
        kept = {self._known(site).tied or site for site in fixed}
        self._calibrated()
        planner = Planner(self, self.shape, self.bits, kept) if kept else self._planner
        return planner.recommend(budgets)

    def pareto(self, points: int = 16) -> list[tuple[float, float, Prediction, Assignment]]:
        """(bytes, seconds of a decode step, prediction, assignment) of which none is beaten in bytes and error."""
        self._calibrated()
        return self._planner.pareto(points)

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Bytes and times of an assignment on the target."""
        return self._planner.cost(self.checked(assignment))

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self, self.shape, self.bits)

    @cached_property
    def noise_floor(self) -> float:
        """The error with every site rounded to bfloat16: below it, what runs in 16 bits can't be told apart."""
        return self._simulated(dict.fromkeys(self._observed.cast, "bf16"))

    def contribution(self, site: str, scheme: str) -> float:
        """The predicted error of one site alone, before calibration."""
        return self._raw(self.checked({site: scheme}))[0]

    def squares(self, assignment: Mapping[str, str]) -> float:
        """The quadratic form of an assignment: errors of choices add up in it, apart from cross terms."""
        return self.form.of(self.keys(assignment))

    def squares_for(self, error: float) -> float:
        """The quadratic form at which the calibrated prediction is ``error``."""
        return self.as_squares(self._calibrated().raw(error))

    def as_squares(self, error: float) -> float:
        """The quadratic form at which the error is ``error``, before calibration."""
        return self.metric.squares(error, self._observed.weight)

    def _simulated(self, chosen: Mapping[str, str]) -> float:
        if self._kept and (found := self._kept.error(chosen)) is not None:
            return found
        error = measured(self.model, self.batches, self.metric, self._observed, chosen)
        if self._kept:
            self._kept.note(chosen, error)
        return error

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
                self.alone = check_doubtful(self, count // 2, step)
                self.chosen = [self._trial(one, step) for one in self._planner.optimal(_CHOSEN) if one]
            while len(self.measured) < count:
                share, fine = KINDS[len(self.measured) % len(KINDS)]
                draw = random.Random(f"{self._seed} {len(self.measured)}")
                self.measured.append(self._trial(self.random_assignment(draw, share, fine=fine), step))
        self._progress("measuring", total, total)
        kinds = ([pair for _, pair in trials] for trials in (self.measured, self.chosen))
        self._calibration = Calibration.fitted(*kinds, power=self.metric.power)

    def correct(self, assignment: Mapping[str, str], measured: float) -> None:
        """Let the form for an assignment be the error that was measured of it."""
        squares = self.as_squares(measured) if math.isfinite(measured) else math.inf
        self.form.correct(self.keys(assignment), squares)
        self.__dict__.pop("_planner", None)  # whose options are as they were predicted

    def _trial(self, chosen: dict[str, str], done: Callable[[], None]) -> tuple[dict[str, str], Measured]:
        raw, effective = self._raw(chosen)
        error = self.measure(chosen)
        done()
        return chosen, Measured(raw, error, effective)

    def _calibrated(self) -> Calibration:
        if self._calibration is None:
            self.calibrate()
        assert self._calibration is not None
        return self._calibration

    def random_assignment(self, draw: random.Random, share: float = 1.0, *, fine: bool = False) -> dict[str, str]:
        """A random scheme at every site, or at a random share of them (one at least); 0: one wherever it may stand.

        fine: of the half of each menu with the smaller errors, as what is recommended mostly has.
        """
        return random_assignment(self, draw, share, fine=fine)

    def checked(self, assignment: Mapping[str, str]) -> dict[str, str]:
        """The assignment, its names known and allowed, that of a tied weight put at the site that holds it.

        Raises BadAssignment, UnknownScheme.
        """
        chosen: dict[str, str] = {}
        for name, scheme in assignment.items():
            site = self._known(name)
            if scheme not in self._observed.menus[site]:
                scheme_named(scheme)
                raise BadAssignment(
                    f"expected a scheme for {site} of {', '.join(self._observed.menus[site]) or 'none'}, got {scheme!r}"
                )
            owner = site.tied or str(site)
            if chosen.get(owner, scheme) != scheme:
                raise BadAssignment(f"expected one scheme for {site} and {owner}, which share a weight, got two")
            chosen[owner] = scheme
        return chosen

    def _known(self, name: str) -> Site:
        if name in self._by_name:
            return self._by_name[name]
        if name in self.cut:
            raise BadAssignment(
                f"no error of {name} can be predicted, since no gradient leads back to it: leave it out"
            )
        near = get_close_matches(name, self._by_name)
        hint = f"did you mean {near[0]}?" if near else "see .sites"
        raise BadAssignment(f"expected a site of this model, got {name!r}: {hint}")

    def keys(self, chosen: Mapping[str, str]) -> list[Key]:
        """Of the form, those of what changes: not of values that an earlier site has left as this one would."""
        schemes = {name: SCHEMES[scheme] for name, scheme in chosen.items()}
        return [
            (name, part)
            for name, scheme in schemes.items()
            for part in parts_of(scheme)
            if not (part[0] == "values" and is_repeated(name, schemes, self._observed.sources))
        ]

    def _raw(self, chosen: Mapping[str, str]) -> tuple[float, float]:
        """The error before calibration, and how many sites it comes from."""
        keys = self.keys(chosen)
        squares = self.form.of(keys)
        error = math.inf if math.isinf(squares) else float(self.metric.error(squares, self._observed.weight))
        return error, self.form.effective(keys)

    def _differentiate(self) -> QuadraticForm:
        """One forward and backward pass a batch: products of every scheme at every site."""
        menus, fits, tied = self._observed.menus, self.fits, self._observed.tied
        if self._kept and (found := self._kept.products(menus)):
            return QuadraticForm(found)
        generator = torch.Generator().manual_seed(self._seed)

        def backward(visitor: Sensitivity, outputs: Any, batch: Any) -> None:
            output = self.metric.output(outputs, mapping(batch))
            if not output.requires_grad:
                raise BadModel(
                    "expected outputs that gradients lead back from, got none: take torch.no_grad, inference_mode, "
                    "argmax and casts to integers out of forward"
                )
            cotangent = self.metric.cotangent(output.detach(), mapping(batch), generator)
            torch.autograd.grad(output, visitor.anchor, cotangent, allow_unused=True)

        products = products_of(
            self.model,
            self.batches,
            lambda size, index: Sensitivity(menus, fits, tied, size, (index, len(self.batches)), self._seed),
            backward,
            lambda done: self._progress("predicting", done, len(self.batches)),
        )
        if self._kept:
            self._kept.keep(products)
        return QuadraticForm(products)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began


def _silent(stage: str, done: int, count: int) -> None:
    pass
