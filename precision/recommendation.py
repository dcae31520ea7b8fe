"""Which assignment to take: chosen by prediction under budgets, the best candidates measured, the best of them kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from assay.precision.choice import Budgets, Choice, Option, Unit, choose, closest, front
from assay.precision.errors import UnknownOption
from assay.precision.prediction import Prediction
from assay.precision.roofline import Cost, Roofline, Shape, device_named

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

__all__ = ["Assignment", "Planner", "shape_of"]

_DEVICE = "h100"
"""Whose times are told where no target is given."""
_MEASURED = 4
"""Candidates that are measured for one recommendation."""


class Assignment(dict[str, str]):
    """Site names to scheme names, with what is known of them."""

    prediction: Prediction
    measured: float = math.nan
    """The error with the assignment simulated over the calibration data; NaN: not measured."""
    cost: Cost
    """Bytes of weights and KV cache; seconds of a prefill and of a decode step."""
    met: bool = True
    """Whether every budget is kept."""
    why: str = ""
    """In words: what bound the choice, or which budgets can't be met together."""


class Planner:
    """Units, costs and errors of an audit's choices; what `Audit.recommend` and `Audit.pareto` do.

    ``shape``: what is served; None: one prompt of 2048 tokens and a context of 4096, heads and layers as the model's
    configuration has them. ``bits``: of the model's own weights.
    """

    def __init__(self, audit: Audit, shape: Shape | None, bits: int) -> None:
        self._audit = audit
        self._roofline = Roofline(
            device_named(audit.target or _DEVICE), audit.sites, shape or shape_of(audit.model), bits
        )
        held = sum(site.parameters for site in audit.sites if not site.tied)
        self._other = (sum(p.numel() for p in audit.model.parameters()) - held) * bits / 8
        """Bytes of what no site holds, norms' weights and biases."""
        self.units = self._units()
        self._sites = {unit.name: unit.sites for unit in self.units}

    def cost(self, assignment: Mapping[str, str]) -> Cost:
        """Of the whole model."""
        return self._roofline.total(assignment) + Cost(bytes=max(self._other, 0.0))

    def recommend(self, budgets: Budgets) -> Assignment:
        """The assignment of least error within the budgets; of fewest bytes where only the error has one.

        A budget of the error is one of the measured error: where the prediction was off, the choice is made again.
        """
        if not budgets.limits:
            raise UnknownOption("expected a budget, got none: give max_error, max_bytes, max_kv_bytes or max_time")
        least = "bytes" if set(budgets.limits) == {"error"} else "error"
        inner = self._inner(budgets, 1.0)
        found = choose(self.units, inner, minimise=least, error_of=self._squares)  # type: ignore[arg-type]
        if not found:
            choice, binding = closest(self.units, inner, error_of=self._squares)
            best = self._measured(choice)
            best.met = False
            best.why = f"no assignment meets {' and '.join(sorted(binding))} together; this one misses by the least"
            return best
        share = 1.0
        for _ in range(3):
            tried = [self._measured(choice) for choice in found[:_MEASURED]]
            limit = math.inf if budgets.max_error is None else budgets.max_error
            kept = [one for one in tried if one.measured <= limit]
            if kept:
                best = min(kept, key=lambda one: (one.cost.bytes if least == "bytes" else one.measured, one.measured))
                best.why = _why(best, budgets, least)
                return best
            worst = min(tried, key=lambda one: one.measured)
            share *= 0.9 * limit / worst.measured if worst.measured > 0 else 0.5
            found = choose(self.units, self._inner(budgets, share), minimise=least, error_of=self._squares)  # type: ignore[arg-type]
            if not found:
                break
        worst.met = False
        worst.why = f"predicted to keep max_error, but measured {worst.measured:.3g}; no other candidate did better"
        return worst

    def pareto(self, points: int) -> list[tuple[float, float, Prediction, Assignment]]:
        """(bytes, seconds of a decode step, prediction, assignment), by bytes: none beaten in bytes and error."""
        choices = front(self.units, minimise=("bytes", "error"), points=points, error_of=self._squares)
        told = [self._told(choice) for choice in choices]
        return [(one.cost.bytes, one.cost.decode, one.prediction, one) for one in told]

    def _units(self) -> list[Unit]:
        """What takes one scheme together, with the schemes that all of its sites may have."""
        groups: dict[str, list[str]] = {}
        for site in self._audit.sites:
            if not site.tied:
                groups.setdefault(site.unit, []).append(str(site))
        units = []
        for name, sites in groups.items():
            shared = [
                scheme for scheme in self._audit.menu(sites[0]) if all(scheme in self._audit.menu(s) for s in sites)
            ]
            left, *others = (self._option(sites, scheme) for scheme in ["", *shared])
            gains = [
                one
                for one in others
                if any(part < whole for part, whole in zip(_costs(one), _costs(left), strict=True))
            ]
            if gains:  # elsewhere another format would cost accuracy and win nothing that is counted
                units.append(Unit(name, tuple(sites), (left, *gains)))
        return units

    def _option(self, sites: Sequence[str], scheme: str) -> Option:
        costs = [self._roofline.cost(site, scheme) for site in sites]
        error = self._audit.squares(dict.fromkeys(sites, scheme)) if scheme else 0.0
        return Option(
            scheme,
            error,
            math.fsum(cost.bytes for cost in costs),
            math.fsum(cost.kv_bytes for cost in costs),
            math.fsum(cost.prefill for cost in costs),
            math.fsum(cost.decode for cost in costs),
        )

    def _squares(self, schemes: Mapping[str, str]) -> float:
        return self._audit.squares(self._assignment(schemes))

    def _assignment(self, schemes: Mapping[str, str]) -> dict[str, str]:
        return {site: scheme for unit, scheme in schemes.items() if scheme for site in self._sites[unit]}

    def _inner(self, budgets: Budgets, share: float) -> Budgets:
        """Budgets of what units add up to: errors as sums of squares, bytes and times without what no unit holds."""
        rest = self._roofline.rest()

        def less(limit: float | None, fixed: float) -> float | None:
            return None if limit is None else max(limit - fixed, 0.0)

        return Budgets(
            None if budgets.max_error is None else self._audit.squares_for(budgets.max_error * share),
            less(budgets.max_bytes, self._other),
            less(budgets.max_kv_bytes, rest.kv_bytes),
            less(budgets.max_prefill, rest.prefill),
            less(budgets.max_decode, rest.decode),
        )

    def _told(self, choice: Choice) -> Assignment:
        found = Assignment(self._assignment(choice.schemes))
        found.prediction, found.cost = self._audit.predict(found), self.cost(found)
        return found

    def _measured(self, choice: Choice) -> Assignment:
        found = self._told(choice)
        found.measured = self._audit.measure(found)
        return found


def _costs(option: Option) -> tuple[float, ...]:
    return option.bytes, option.kv_bytes, option.prefill, option.decode


def _why(best: Assignment, budgets: Budgets, least: str) -> str:
    if least == "bytes":
        return f"the fewest bytes with a measured error of at most {budgets.max_error:.3g}"
    totals = {"error": best.measured, "bytes": best.cost.bytes, "kv_bytes": best.cost.kv_bytes}
    totals |= {"prefill": best.cost.prefill, "decode": best.cost.decode}
    near = [name for name, limit in budgets.limits.items() if totals[name] > 0.97 * limit]
    return f"bound by {' and '.join(near)}" if near else "no budget binds: the least error that the formats allow"


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
        layers=value("num_hidden_layers", "n_layer", default=1),
        top_k=value("num_experts_per_tok", "top_k", default=1),
    )
