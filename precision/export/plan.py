"""An assignment sorted by what an export can do with it: linears to quantise, linears to leave, caches, the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.precision.errors import CannotExport
from assay.precision.model.sites import Site
from assay.precision.schemes import Scheme, scheme_named

__all__ = ["Notes", "Plan", "Recipe", "fused_name", "listed", "named", "plan_of", "units_of"]

_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one serving stack reads."""

    content: dict[str, Any]
    held: dict[str, str]
    """What of the assignment it expresses; empty: there is nothing that the stack would do."""
    notes: tuple[str, ...] = ()
    """One line for each kind of site that it can't express."""


@dataclass(slots=True)
class Notes:
    """Reasons why sites are left out, gathered so that each is one line however many sites it concerns."""

    sites: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, site: str, scheme: str, reason: str) -> None:
        self.sites.setdefault((scheme, reason), []).append(site)

    def lines(self) -> tuple[str, ...]:
        """One line a scheme and reason: the first site, how many more, why."""
        return tuple(f"{scheme} at {listed(names)}: {reason}" for (scheme, reason), names in self.sites.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment by kind of site."""

    linears: dict[str, Scheme]
    """Linears that are quantised."""
    experts: dict[str, Scheme]
    """Parameters that hold several experts and are quantised."""
    left: tuple[str, ...]
    """Linears and embeddings that keep the checkpoint's dtype."""
    caches: dict[str, Scheme]
    """KV caches that are quantised."""
    cache: str
    """The scheme of all KV caches, where they have one; else empty."""
    notes: Notes


def plan_of(
    assignment: Mapping[str, str],
    sites: Mapping[str, Site],
    dtype: torch.dtype = torch.bfloat16,
    *,
    experts: bool = False,
) -> Plan:
    """Sort an assignment of site names to scheme names; ``dtype``: of what isn't quantised.

    experts: parameters that hold several experts have a place too; otherwise they are noted.

    Raises CannotExport for a site that the model has not, UnknownScheme for a scheme that there is not.
    """
    unknown = [name for name in assignment if name not in sites]
    if unknown:
        raise CannotExport(f"expected sites of the model, got {unknown[0]!r}: take names from audit(...).sites")
    schemes = {name: scheme_named(scheme) for name, scheme in assignment.items()}
    notes = Notes()
    linears: dict[str, Scheme] = {}
    together: dict[str, Scheme] = {}
    caches: dict[str, Scheme] = {}
    for name, scheme in schemes.items():
        site = sites[name]
        if scheme.name in _CASTS or scheme.name == "tf32":
            if _CASTS.get(scheme.name) != dtype:
                kept = str(dtype).removeprefix("torch.")
                notes.add(name, scheme.name, f"what isn't quantised is stored and computed in {kept}")
        elif site.place == "kv_cache":
            caches[name] = scheme
        elif site.place not in ("linear", "embedding") or scheme.weight is None:
            notes.add(name, scheme.name, "only weights, inputs of linears and the KV cache can be given a format")
        elif site.place == "embedding":
            notes.add(name, scheme.name, "no serving stack loads a quantised table of embeddings")
        elif len(site.shape) > 2 and experts:
            together[name] = scheme
        elif len(site.shape) > 2:
            notes.add(name, scheme.name, "experts held in one parameter have no name here")
        else:
            linears[name] = scheme
    for name, site in sites.items():  # a tied weight follows the site that owns it
        if site.tied in linears and name not in assignment:
            linears[name] = linears[site.tied]
    left = tuple(name for name, site in sites.items() if site.shape and name not in linears and name not in together)
    every = {name for name, site in sites.items() if site.place == "kv_cache"}
    shared = {scheme.name for scheme in caches.values()}
    cache = shared.pop() if set(caches) == every and len(shared) == 1 else ""
    return Plan(linears, together, left, caches, cache, notes)


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def named(schemes: Mapping[str, Scheme]) -> dict[str, str]:
    """Schemes by their names, as assignments have them."""
    return {site: scheme.name for site, scheme in schemes.items()}


def units_of(names: Mapping[str, Site]) -> dict[str, list[str]]:
    """Linears that a serving engine runs as one product (q, k and v; gate and up), by the name of their unit."""
    units: dict[str, list[str]] = {}
    for name, site in names.items():
        if site.shape and site.unit and site.unit != name:
            units.setdefault(site.unit, []).append(name)
    return {unit: members for unit, members in units.items() if len(members) > 1}


def fused_name(unit: str) -> str | None:
    """The name that vLLM gives to the fused linears of a unit; None where it isn't one of its usual ones."""
    head, _, last = unit.rpartition(".")
    return f"{head}.{last}_proj" if last in ("qkv", "gate_up") else None
