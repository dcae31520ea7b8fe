"""The audit of a model: its sites, what any assignment of formats to them will cost, and which one to take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch

from assay.precision.calibration import Calibration, Measured
from assay.precision.choice import Budgets
from assay.precision.errors import BadAssignment, BadModel, NoData, UnknownOption
from assay.precision.kept import Kept
from assay.precision.metrics import Metric, Tally, metric_named
from assay.precision.model.menu import Fits, formats_of, menu_of
from assay.precision.model.opening import opened
from assay.precision.model.products import products_of
from assay.precision.model.running import batch_size, call, mapping, prepared, settled
from assay.precision.model.sensitivity import Sensitivity, parts_of
from assay.precision.model.simulation import Simulator
from assay.precision.model.sites import Collector, Seen, Site
from assay.precision.model.streaming import streamed_parameters
from assay.precision.prediction import Key, Prediction, QuadraticForm
from assay.precision.recommendation import Assignment, Planner
from assay.precision.roofline import Cost, Shape
from assay.precision.schemes import SCHEMES, scheme_named

__all__ = ["Audit", "Progress", "audit"]

Progress = Callable[[str, int, int], None]
"""Told the stage, how many of its steps are done, and how many there are."""

_KINDS = ((1.0, False), (1.0, True), (0.3, False), (0.1, False))
"""Of the assignments that are measured to calibrate: the share of sites that they take, and whether finely."""
_KEPT = 256 << 20
"""Bytes of reference outputs that are kept rather than computed again for every measurement."""


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
    names = formats_of(formats, target)
    found = Audit(model, batches, metric_named(metric), names, target, seed, progress or _silent, kept)
    found.bits, found.shape = bits or found.bits, shape
    return found


class Audit:
    """What `audit` gives: sites, menus, predictions, measurements, recommendations."""

    def __init__(
        self,
        model: torch.nn.Module | torch.export.ExportedProgram,
        batches: Sequence[Any],
        metric: Metric,
        formats: Sequence[str],
        target: str | None,
        seed: int,
        progress: Progress,
        kept: Kept | None = None,
    ) -> None:
        self.model = prepared(model)
        self.bits = min((p.element_size() * 8 for p in _parameters(model)), default=32)
        """Of the model's own weights: what a site costs that is left as it is."""
        self.shape: Shape | None = None
        self.batches = list(batches)
        self.metric = metric
        self.target = target
        self.seconds: dict[str, float] = {}
        """Wall time of each stage."""
        self._seed = seed
        self._progress = progress
        self._kept = kept
        self._references: list[torch.Tensor] | None = None
        self._calibration: Calibration | None = None
        self._floor: float | None = None
        self.measured: list[tuple[dict[str, str], Measured]] = []
        """Assignments that were measured to calibrate the interval."""
        if not self.batches:
            raise NoData("expected calibration batches, got none: give a longer text or fewer tokens a sequence")
        for batch in self.batches:
            batch_size(batch)  # refuses what has no sequences
        self._collect(formats)
        self._differentiate()

    def menu(self, site: str) -> tuple[str, ...]:
        """The names of the schemes that may stand at a site. Raises BadAssignment for a site that there is not."""
        return self._menus[self._known(site)]

    def predict(self, assignment: Mapping[str, str]) -> Prediction:
        """The error of an assignment with its 95 % interval. No model is run, but in the first call, to calibrate."""
        raw, effective = self._raw(self.checked(assignment))
        if self._calibration is None:
            self.calibrate()
        assert self._calibration is not None
        return Prediction(*self._calibration.interval(raw, effective))

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
    ) -> Assignment:
        """The assignment to take under budgets, measured: of least error, or of fewest bytes if only the error has one.

        max_error: in the metric's unit. max_bytes: of all weights. max_kv_bytes: of the cache at the context length of
        ``shape``. max_time: seconds of a decode step on the target, max_prefill of a prefill. Where no assignment meets
        them, the closest, with ``met`` False and the budgets that bind in ``why``.
        """
        budgets = Budgets(max_error, max_bytes, max_kv_bytes, max_prefill, max_time)
        return Planner(self, self.shape, self.bits).recommend(budgets)

    def pareto(self, points: int = 16) -> list[tuple[float, float, Prediction, Assignment]]:
        """(bytes, seconds of a decode step, prediction, assignment) of which none is beaten in bytes and error."""
        return Planner(self, self.shape, self.bits).pareto(points)

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Bytes and times of an assignment on the target."""
        return Planner(self, self.shape, self.bits).cost(self.checked(assignment))

    @property
    def noise_floor(self) -> float:
        """The error with every site rounded to bfloat16: below it, what runs in 16 bits can't be told apart."""
        if self._floor is None:
            self._floor = self._simulated({str(site): "bf16" for site in self.sites if not site.tied})
        return self._floor

    def contribution(self, site: str, scheme: str) -> float:
        """The predicted error of one site alone, before calibration."""
        return self._raw(self.checked({site: scheme}))[0]

    def squares(self, assignment: Mapping[str, str]) -> float:
        """The quadratic form of an assignment: errors of choices add up in it, apart from cross terms."""
        return self.form.of(self._keys(assignment))

    def squares_for(self, error: float) -> float:
        """The quadratic form at which the calibrated prediction is ``error``."""
        if self._calibration is None:
            self.calibrate()
        assert self._calibration is not None
        return self.metric.squares(self._calibration.raw(error), self._weight)

    def _simulated(self, chosen: Mapping[str, str]) -> float:
        if self._kept and (found := self._kept.error(chosen)) is not None:
            return found
        simulator = Simulator({name: SCHEMES[scheme] for name, scheme in chosen.items()}, self.fits, self._tied)
        tally = Tally()
        for index, batch in enumerate(self.batches):
            reference = self._reference(index)
            with torch.no_grad(), settled(self.model), opened(self.model, simulator):
                outputs = call(self.model, batch)
            with torch.no_grad():
                tally.add(self.metric.compare(reference, self.metric.output(outputs, mapping(batch)), mapping(batch)))
        error = self.metric.mean(tally)
        if self._kept:
            self._kept.note(chosen, error)
        return error

    def calibrate(self, count: int = 48) -> None:
        """Measure ``count`` random assignments, from dense to sparse, and fit the interval to them."""
        began = time.monotonic()
        while len(self.measured) < count:
            share, fine = _KINDS[len(self.measured) % len(_KINDS)]
            draw = random.Random(f"{self._seed} {len(self.measured)}")
            chosen = self.random_assignment(draw, share, fine=fine)
            raw, effective = self._raw(chosen)
            self.measured.append((chosen, Measured(raw, self.measure(chosen), effective)))
            self._progress("measuring", len(self.measured), count)
        self._calibration = Calibration.fitted([pair for _, pair in self.measured], power=self.metric.power)
        self.seconds["measuring"] = self.seconds.get("measuring", 0.0) + time.monotonic() - began

    def random_assignment(self, draw: random.Random, share: float = 1.0, *, fine: bool = False) -> dict[str, str]:
        """A random scheme at every site, or at a random share of them (one at least).

        fine: of the half of each menu with the smaller errors, as what is recommended mostly has.
        """
        sites = [site for site in self.sites if not site.tied]
        some = [site for site in sites if draw.random() < share] or [draw.choice(sites)]
        return {str(site): draw.choice(self._finer[site] if fine else self._menus[site]) for site in some}

    @cached_property
    def _finer(self) -> dict[str, tuple[str, ...]]:
        found = {}
        for name, menu in self._menus.items():
            by_error = sorted(menu, key=lambda scheme: self.squares({name: scheme}))
            found[name] = tuple(by_error[: (len(by_error) + 1) // 2])
        return found

    def checked(self, assignment: Mapping[str, str]) -> dict[str, str]:
        """The assignment, its names known and allowed, that of a tied weight put at the site that holds it.

        Raises BadAssignment, UnknownScheme.
        """
        chosen: dict[str, str] = {}
        for name, scheme in assignment.items():
            site = self._known(name)
            if scheme not in self._menus[site]:
                scheme_named(scheme)
                raise BadAssignment(
                    f"expected a scheme for {site} of {', '.join(self._menus[site]) or 'none'}, got {scheme!r}"
                )
            owner = site.tied or str(site)
            if chosen.get(owner, scheme) != scheme:
                raise BadAssignment(f"expected one scheme for {site} and {owner}, which share a weight, got two")
            chosen[owner] = scheme
        return chosen

    def _known(self, name: str) -> Site:
        if name in self._by_name:
            return self._by_name[name]
        near = get_close_matches(name, self._by_name)
        hint = f"did you mean {near[0]}?" if near else "see .sites"
        raise BadAssignment(f"expected a site of this model, got {name!r}: {hint}")

    def _keys(self, chosen: Mapping[str, str]) -> list[Key]:
        return [(site, part) for site, scheme in chosen.items() for part in parts_of(SCHEMES[scheme])]

    def _raw(self, chosen: Mapping[str, str]) -> tuple[float, float]:
        """The error before calibration, and how many sites it comes from."""
        keys = self._keys(chosen)
        squares = self.form.of(keys)
        error = math.inf if math.isinf(squares) else float(self.metric.error(squares, self._weight))
        return error, self.form.effective(keys)

    def _collect(self, formats: Sequence[str]) -> None:
        """Look: sites, what passes them, and reference outputs."""
        began = time.monotonic()
        roles = {name: type(module).__name__ for name, module in self.model.named_modules()}
        collector = Collector(lambda name: "router" if _is_router(name, roles.get(name, "")) else "linear")
        kept: list[torch.Tensor] = []
        size = 0
        self._weight = 0.0
        for index, batch in enumerate(self.batches):
            with torch.no_grad(), settled(self.model), opened(self.model, collector):
                outputs = call(self.model, batch)
            reference = self.metric.output(outputs, mapping(batch)).detach()
            if not bool(reference.isfinite().all()):
                raise BadModel(
                    f"expected finite outputs, got NaN or infinities for batch {index}: check model and inputs"
                )
            self._weight += self.metric.weight(reference, mapping(batch))
            size += reference.numel() * reference.element_size()
            if size <= _KEPT:
                kept.append(reference)
            self._progress("looking", index + 1, len(self.batches))
        self._references = kept if size <= _KEPT else None
        if not any(site.place == "linear" for site in collector.sites.values()):
            raise BadModel("expected a model with linear layers, got one that runs none: is it the right module?")
        self.seen, self.weights = collector.seen, collector.weights
        units = {str(s): s.unit for s in collector.sites.values() if s.role == "linear"}
        self.fits = Fits(self.seen, units, keep=not streamed_parameters(self.model))
        menus = {str(site): menu_of(site, formats) for site in collector.sites.values()}
        self.sites = tuple(site for site in collector.sites.values() if menus[str(site)])
        if not self.sites:
            raise UnknownOption(f"expected formats for sites of this model, got {', '.join(formats) or 'none'}")
        self._by_name = {str(site): site for site in self.sites}
        self._menus = {str(site): menus[str(site)] for site in self.sites}
        self._tied = {str(site): site.tied for site in self.sites if site.tied}
        for name, owner in self._tied.items():  # a table that a linear shares takes what the linear may take
            both = [site for site in (self._by_name[name], self._by_name[owner]) if site.place == "linear"]
            self._menus[name] = self._menus[owner] = self._menus[str(both[0])] if both else self._menus[name]
            self.seen.setdefault((owner, ""), self.seen.get((name, ""), Seen()))
        self.seconds["looking"] = time.monotonic() - began

    def _differentiate(self) -> None:
        """One forward and backward pass a batch: products of every scheme at every site."""
        began = time.monotonic()
        if self._kept and (found := self._kept.products(self._menus)):
            self.form = QuadraticForm(found)
            return
        generator = torch.Generator().manual_seed(self._seed)

        def backward(visitor: Sensitivity, outputs: Any, batch: Any) -> None:
            output = self.metric.output(outputs, mapping(batch))
            cotangent = self.metric.cotangent(output.detach(), mapping(batch), generator)
            torch.autograd.grad(output, visitor.anchor, cotangent, allow_unused=True)

        products = products_of(
            self.model,
            self.batches,
            lambda size, index: Sensitivity(self._menus, self.fits, self._tied, size, self._seed + index),
            backward,
            lambda done: self._progress("predicting", done, len(self.batches)),
        )
        if self._kept:
            self._kept.keep(products)
        self.form = QuadraticForm(products)
        self.seconds["predicting"] = time.monotonic() - began

    def _reference(self, index: int) -> torch.Tensor:
        if self._references is not None:
            return self._references[index]
        with torch.no_grad(), settled(self.model):
            return self.metric.output(call(self.model, self.batches[index]), mapping(self.batches[index]))


def _parameters(model: torch.nn.Module | torch.export.ExportedProgram) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.is_floating_point()]


def _is_router(name: str, kind: str) -> bool:
    return "Router" in kind or "router" in name.rpartition(".")[2] or (name.endswith(".gate") and "Linear" not in kind)


def _silent(stage: str, done: int, count: int) -> None:
    pass
