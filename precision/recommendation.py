"""Which assignment to take: chosen by prediction under budgets, the best candidates measured, the best of them kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
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
        for field in fields(budgets):
            limit = getattr(budgets, field.name)
            if limit is not None and not limit > 0:
                raise UnknownOption(f"expected {field.name} above 0, got {limit:g}")
        if not budgets.limits:
            raise UnknownOption("expected a budget, got none: give max_error, max_bytes, max_kv_bytes or max_time")
        least = "bytes" if set(budgets.limits) == {"error"} else "error"
        inner = self._inner(budgets, 1.0)
        found = choose(self.units, inner, minimise=least, error_of=self._squares) if self.units else []  # type: ignore[arg-type]
        if not found:
            choice, binding = closest(self.units, inner, error_of=self._squares)
            best = self._measured(choice)
            best.met = _keeps(best, budgets)
            names = (
                f"{' and '.join(sorted(binding))} together" if len(binding) > 1 else "".join(binding) or "the budgets"
            )
            best.why = (
                _why(best, budgets, least) if best.met else f"no assignment meets {names}; this misses by the least"
            )
            return best
        share = 1.0
        while True:
            tried = [self._measured(choice) for choice in found[:_MEASURED]]
            kept = [one for one in tried if _keeps(one, budgets)]
            if kept:
                best = min(kept, key=lambda one: (one.cost.bytes if least == "bytes" else one.measured, one.measured))
                best.why = _why(best, budgets, least)
                return best
            nearest = min(tried, key=lambda one: one.measured if math.isfinite(one.measured) else math.inf)
            off = nearest.measured / budgets.max_error if budgets.max_error else math.nan
            share *= 0.9 / off if 1 < off < math.inf else 0.5
            found = []
            if budgets.max_error is not None and share > 0.05:
                found = choose(self.units, self._inner(budgets, share), minimise=least, error_of=self._squares)  # type: ignore[arg-type]
            if not found:
                nearest.met = False
                nearest.why = (
                    f"predicted to keep the budgets, but measured {nearest.measured:.3g}; no candidate did better"
                )
                return nearest

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
        sharing = [str(site) for site in self._audit.sites if site.tied in sites]
        costs = [self._roofline.cost(site, scheme) for site in [*sites, *sharing]]
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
        whole, left = self.cost({}), [unit.options[0] for unit in self.units]

        def less(limit: float | None, name: str) -> float | None:
            fixed = getattr(whole, name) - math.fsum(getattr(option, name) for option in left)
            return None if limit is None else max(limit - fixed, 0.0)

        return Budgets(
            None if budgets.max_error is None else self._audit.squares_for(budgets.max_error * share),
            less(budgets.max_bytes, "bytes"),
            less(budgets.max_kv_bytes, "kv_bytes"),
            less(budgets.max_prefill, "prefill"),
            less(budgets.max_decode, "decode"),
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


def _totals(one: Assignment) -> dict[str, float]:
    cost = one.cost
    return {
        "error": one.measured,
        "bytes": cost.bytes,
        "kv_bytes": cost.kv_bytes,
        "prefill": cost.prefill,
        "decode": cost.decode,
    }


def _keeps(one: Assignment, budgets: Budgets) -> bool:
    """Whether the totals, and the error that was measured, keep every budget. An error that is NaN keeps none."""
    totals = _totals(one)
    return math.isfinite(one.measured) and all(
        totals[name] <= limit * (1 + 1e-9) for name, limit in budgets.limits.items()
    )


def _why(best: Assignment, budgets: Budgets, least: str) -> str:
    if least == "bytes":
        return f"the fewest bytes with a measured error of at most {budgets.max_error:.3g}"
    totals = _totals(best)
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
        layers=value("num_hidden_layers", "n_layer", default=0),
        top_k=value("num_experts_per_tok", "top_k", default=1),
    )
