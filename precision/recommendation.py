"""Which assignment to take: chosen by prediction under budgets, the best candidates measured, the best of them kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING

import torch

from assay.precision.advice.reliability import reliability
from assay.precision.amounts import in_bytes, in_error, in_seconds
from assay.precision.choice import Budgets, Choice, Option, Quantity, Unit, choose, closest, front
from assay.precision.errors import UnknownOption
from assay.precision.explanation import ARGUMENTS, Totals, among, bound, missed, outdone, untrusted
from assay.precision.prediction import Prediction
from assay.precision.roofline import Cost, Roofline, Shape, device_named

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["Assignment", "Planner", "shape_of"]

_DEVICE = "h100"
"""Whose times are told where no target is given."""
_MEASURED = 4
"""Candidates that are measured for one recommendation."""
_OFF = 1.2
"""Ratio of measured to predicted from which on a choice's units are measured."""
_ROUNDS = 4
"""Choices that are made anew with what was learnt."""
_RUNS = 24
"""Measurements that look for the units to blame in each."""
_COSTS = tuple(field.name for field in fields(Cost))
_NEAR = 0.97
"""Share of a budget from which on it counts as used up."""


class Assignment(dict[str, str]):
    """Site names to scheme names, with what is known of them. Printed in a line; `dict(a)` shows all sites."""

    prediction: Prediction
    measured: float = math.nan
    """The error with the assignment simulated over the calibration data; NaN: not measured."""
    cost: Cost
    """Bytes of weights and KV cache; seconds of a prefill and of a decode step."""
    met: bool = True
    """Whether every budget is kept."""
    why: str = ""
    """In words: what bound the choice, or which budgets can't be met together."""

    def __str__(self) -> str:
        counted = Counter(self.values()).most_common()
        parts = [f"{len(self)} site{'s' * (len(self) != 1)}"]
        if self:
            parts[0] += ": " + ", ".join(f"{count} {scheme}" for scheme, count in counted)
        if hasattr(self, "prediction"):
            low, high = in_error(self.prediction.low), in_error(self.prediction.high)
            parts.append(f"error predicted {in_error(self.prediction.error)} ({low} to {high})")
        if not math.isnan(self.measured):
            parts.append(f"measured {in_error(self.measured)}")
        if hasattr(self, "cost"):
            parts.append(f"weights {in_bytes(self.cost.bytes)}, KV cache {in_bytes(self.cost.kv_bytes)}")
            parts.append(f"prefill {in_seconds(self.cost.prefill)}, decode step {in_seconds(self.cost.decode)}")
        return "; ".join(parts if self.met else [*parts, "budgets not met"])

    def __repr__(self) -> str:
        return f"Assignment({self})"


class Planner:
    """Units, costs and errors of an audit's choices; what `Audit.recommend` and `Audit.pareto` do.

    ``shape``: what is served; None: one prompt of 2048 tokens and a context of 4096, heads and layers as the model's
    configuration has them. ``bits``: of the model's own weights. ``fixed``: names of sites that keep their own format.
    """

    def __init__(self, audit: Audit, shape: Shape | None, bits: int, fixed: Collection[str] = ()) -> None:
        self._audit = audit
        self._fixed = frozenset(fixed)
        self._roofline = Roofline(
            device_named(audit.target or _DEVICE), audit.every, shape or shape_of(audit.model), bits
        )
        held = sum(site.parameters for site in audit.every if not site.tied)
        self._other = max((sum(p.numel() for p in audit.model.parameters()) - held) * bits / 8, 0.0)
        """Bytes of what no site holds, norms' weights and biases."""
        self._sites: dict[str, list[str]] = {}
        """Of each unit."""
        for site in audit.sites:
            if not site.tied:
                self._sites.setdefault(site.unit, []).append(str(site))
        self._renew()

    def _renew(self) -> None:
        """Options with errors as the audit's form has them now."""
        self.units = self._units()
        self._all = (*self.units, self._rest())

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Of the whole model."""
        return self._roofline.total(assignment) + Cost(bytes=self._other)

    def recommend(self, budgets: Budgets) -> Assignment:
        """The assignment of least error within the budgets; of fewest bytes where only the error has one.

        A budget of the error is one of the measured error: where the prediction was off, the choice is made again. So
        it is where the best choice measures worse than predicted, with the measured errors of the units to blame.
        """
        limits = _checked(budgets)
        minimise: Quantity = "bytes" if set(limits) == {"error"} else "error"
        found = self._choices(budgets, 1.0, minimise)
        if not found:
            return self._closest(budgets)
        before: list[Choice] = []
        while len(before) < _ROUNDS and self._learn(found[0].schemes):
            before.append(found[0])
            found = self._choices(budgets, 1.0, minimise) or found
        share, found = 1.0, [*found[:_MEASURED], *before]
        while True:
            tried = [self._measured(choice) for choice in found]
            kept = [one for one in tried if not _over(_totals(one.measured, one.cost), limits)]
            if kept:
                best = min(
                    kept, key=lambda one: (one.cost.bytes if minimise == "bytes" else one.measured, one.measured)
                )
                return self._explained(best, self._bound(best, limits, minimise))
            nearest = min(tried, key=lambda one: one.measured if math.isfinite(one.measured) else math.inf)
            off = nearest.measured / budgets.max_error if budgets.max_error else math.nan
            share *= 0.9 / off if 1 < off < math.inf else 0.5
            found = []
            if budgets.max_error is not None and share > 0.05:
                found = self._choices(budgets, share, minimise)[:_MEASURED]
            if not found:
                nearest.met = False
                return self._explained(
                    nearest, outdone(_totals(nearest.measured, nearest.cost), limits, self._audit.metric.unit)
                )

    def pareto(self, points: int) -> list[tuple[float, float, Prediction, Assignment]]:
        """(bytes, seconds of a decode step, prediction, assignment), by bytes: none beaten in bytes and error."""
        told = [self._told(choice) for choice in self._front(points)]
        return [(one.cost.bytes, one.cost.decode, one.prediction, one) for one in told]

    def optimal(self, points: int) -> list[dict[str, str]]:
        """The assignments of `pareto`, without predictions."""
        return [self._assignment(choice.schemes) for choice in self._front(points)]

    def _front(self, points: int) -> list[Choice]:
        return front(self._all, minimise=("bytes", "error"), points=points, error_of=self._squares)

    def _units(self) -> list[Unit]:
        """What takes one scheme together, with the schemes that all of its sites may have."""
        units = []
        for name, sites in self._sites.items():
            if not self._fixed.isdisjoint(sites):
                continue
            shared = [
                scheme for scheme in self._audit.menu(sites[0]) if all(scheme in self._audit.menu(s) for s in sites)
            ]
            left, *others = (self._option(sites, scheme) for scheme in ["", *shared])
            whole = [one for one in others if math.isfinite(one.error)]  # the others break the model
            gains = [one for one in whole if any(getattr(one, what) < getattr(left, what) for what in _COSTS)]
            if gains:  # elsewhere another format would cost accuracy and win nothing that is counted
                units.append(Unit(name, tuple(sites), (left, *gains)))
        return units

    def _rest(self) -> Unit:
        """What the units leave out, as one without a choice: so budgets and their excess are of the whole model."""
        whole = self.cost({})
        left = {
            what: max(math.fsum([getattr(whole, what), *(-getattr(unit.options[0], what) for unit in self.units)]), 0.0)
            for what in _COSTS
        }
        return Unit("", (), (Option("", 0.0, **left),))

    def _option(self, sites: Sequence[str], scheme: str) -> Option:
        sharing = [str(site) for site in self._audit.sites if site.tied in sites]
        cost = sum((self._roofline.cost(site, scheme) for site in [*sites, *sharing]), Cost())
        return Option(scheme, self._audit.squares(dict.fromkeys(sites, scheme)) if scheme else 0.0, **asdict(cost))

    def _squares(self, schemes: Mapping[str, str]) -> float:
        return self._audit.squares(self._assignment(schemes))

    def _learn(self, schemes: Mapping[str, str]) -> bool:
        """Where a choice measures worse than predicted, the units to blame, found by halving; whether there are any.

        Of many options the choice takes those whose errors are predicted too small, if there are such: their measured
        errors take the place of these in the audit's form.
        """
        taken = {unit: scheme for unit, scheme in schemes.items() if scheme}
        whole, parts, runs, found = self._squares(taken), [taken], 0, False
        if not taken or self._measured_squares(taken) <= _OFF * whole:
            return False
        while parts and runs < _RUNS:
            names = list(part := parts.pop(0))
            for some in (names[: len(names) // 2], names[len(names) // 2 :]):
                half = {name: part[name] for name in some}
                runs += 1
                if not half or self._measured_squares(half) - self._squares(half) <= (_OFF - 1) / 2 * whole:
                    continue
                if len(half) > 1:
                    parts.append(half)
                else:
                    assignment, before = self._assignment(half), self._squares(half)
                    self._audit.correct(assignment, self._audit.measure(assignment))
                    found = found or self._squares(half) != before
        self._renew()
        return found

    def _measured_squares(self, schemes: Mapping[str, str]) -> float:
        error = self._audit.measure(self._assignment(schemes))
        return self._audit.squares_for(error) if 0 < error < math.inf else 0.0 if error == 0 else math.inf

    def _assignment(self, schemes: Mapping[str, str]) -> dict[str, str]:
        return {site: scheme for unit, scheme in schemes.items() if scheme for site in self._sites[unit]}

    def _choices(self, budgets: Budgets, share: float, minimise: Quantity) -> list[Choice]:
        return choose(self._all, self._squared(budgets, share), minimise=minimise, error_of=self._squares)

    def _closest(self, budgets: Budgets) -> Assignment:
        """Where no assignment is predicted to keep the budgets. An amplitude's excess is that of its square."""
        choice, names = closest(self._all, self._squared(budgets), error_of=self._squares)
        best, limits = self._measured(choice), budgets.limits
        totals = _totals(best.measured, best.cost)
        over = _over(totals, limits)
        best.met = not over
        if best.met:
            return self._explained(best, self._bound(best, limits, "error"))
        binding: list[Quantity] = [name for name in limits if f"max_{name}" in names] or over
        alone = [name for name in binding if self._least(name) > limits[name]]
        together = [name for name in binding if name not in alone]
        sets = [*([name] for name in alone), *([together] if together else [])]
        shown = [name for name in limits if name in binding or name in over]
        unit = self._audit.metric.unit
        return self._explained(best, missed(sets, shown, totals, limits, unit, self._formats))

    def _least(self, quantity: Quantity) -> float:
        """The least total that any assignment has."""
        return math.fsum(min(getattr(option, quantity) for option in unit.options) for unit in self._all)

    @property
    def _formats(self) -> int:
        """How many schemes the audit looked at."""
        return len({scheme for site in self._audit.sites for scheme in self._audit.menu(site)})

    def _squared(self, budgets: Budgets, share: float = 1.0) -> Budgets:
        """Budgets of what units add up to: a share of the error's, as a sum of squares."""
        if budgets.max_error is None:
            return budgets
        return replace(budgets, max_error=self._audit.squares_for(budgets.max_error * share))

    def _told(self, choice: Choice) -> Assignment:
        found = Assignment(self._assignment(choice.schemes))
        found.prediction, found.cost = self._audit.predict(found), self.cost(found)
        return found

    def _measured(self, choice: Choice) -> Assignment:
        found = self._told(choice)
        found.measured = self._audit.measure(found)
        return found

    def _bound(self, best: Assignment, limits: Totals, minimise: Quantity) -> str:
        """What bound a choice that keeps the budgets: of those that the model as it is does not, what is used up."""
        totals, metric = _totals(best.measured, best.cost), self._audit.metric.unit
        if minimise == "bytes":
            if best.cost.bytes > self._least("bytes") * (1 + 1e-9):
                return bound(["error"], totals, limits, metric)
            return f"no budget binds: the fewest bytes that there are {among(self._formats)}"
        whole = _totals(0.0, self.cost({}))
        used = {name: totals[name] / limit for name, limit in limits.items() if whole[name] > limit}
        if not used:
            return "no budget binds: the model as it is keeps them"
        near = [name for name in used if used[name] >= min(_NEAR, max(used.values()))]
        return bound(near, totals, limits, metric)

    def _explained(self, one: Assignment, why: str) -> Assignment:
        one.why = why + untrusted(reliability(self._audit, one))
        return one


def _checked(budgets: Budgets) -> dict[Quantity, float]:
    """The limits that there are. Raises UnknownOption for one that is not above 0, and where there are none."""
    for name, argument in ARGUMENTS.items():
        limit = getattr(budgets, f"max_{name}")
        if limit is not None and not limit > 0:
            raise UnknownOption(f"expected {argument} above 0, got {limit:g}")
    if not budgets.limits:
        raise UnknownOption(f"expected a finite budget, got none: give {', '.join(ARGUMENTS.values())}, or several")
    return budgets.limits


def _totals(error: float, cost: Cost) -> dict[Quantity, float]:
    return {name: error if name == "error" else getattr(cost, name) for name in ARGUMENTS}


def _over(totals: Totals, limits: Totals) -> list[Quantity]:
    """Budgets that totals, with the error that was measured, don't keep; all where the model breaks."""
    if not math.isfinite(totals["error"]):
        return list(limits)
    return [name for name, limit in limits.items() if totals[name] > limit * (1 + 1e-9)]


def shape_of(model: torch.nn.Module) -> Shape:
    """One prompt of 2048 tokens, a context of 4096, and heads and layers as the model's configuration has them.

    One head of 64 where there is no configuration.
    """
    config = getattr(model, "config", None)

    def value(*names: str, default: int) -> int:
        for name in names:
            found = getattr(config, name, None)
            if isinstance(found, int) and found > 0:
                return found
        return default

    heads = value("num_attention_heads", "n_head", default=1)
    return Shape(
        batch=1,
        prompt=2048,
        context=4096,
        heads=heads,
        kv_heads=value("num_key_value_heads", default=heads),
        head_dim=value("head_dim", default=max(value("hidden_size", "n_embd", default=64) // heads, 1)),
        layers=value("num_hidden_layers", "n_layer", default=0),
        top_k=value("num_experts_per_tok", "top_k", default=1),
    )
