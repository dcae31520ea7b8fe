"""Sorts an assignment for an export: linears to quantise, linears to leave, KV caches, unsupported sites."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from assay.configs.architectures import fused_name
from assay.precision.errors import CannotExport
from assay.precision.export.target import Recipe
from assay.precision.observation.sites import Site
from assay.precision.observation.tracer import HEAD
from assay.precision.schemes import Scheme, scheme_named
from assay.runtime.errors import listed

T = TypeVar("T")

_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment by kind of site, and the reasons why sites are left out."""

    linears: dict[str, Scheme] = field(default_factory=dict)
    """Quantised linears and embedding tables."""
    tables: set[str] = field(default_factory=set)
    """The embedding tables in ``linears``."""
    experts: dict[str, Scheme] = field(default_factory=dict)
    """Quantised parameters that hold several experts."""
    caches: dict[str, Scheme] = field(default_factory=dict)
    """Quantised KV caches."""
    left: tuple[str, ...] = ()
    """Linears and embeddings that keep the checkpoint's dtype."""
    cache: str = ""
    """The scheme of all KV caches; empty if they differ or have none."""
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    """The schemes of sites by reason; each reason becomes one line, for any number of sites and schemes."""

    @property
    def weights(self) -> dict[str, Scheme]:
        """Return linears and experts."""
        return {**self.linears, **self.experts}

    def note(self, site: str, scheme: str, reason: str) -> None:
        """Record why a site is left out."""
        self.reasons.setdefault(reason, {})[site] = scheme

    def recipe(self, content: dict[str, Any], held: Iterable[str]) -> Recipe:
        """Return the stack's content, the sites that it expresses, and the notes (schemes, first site, reason)."""
        schemes = {**self.weights, **self.caches}
        return Recipe(content, {name: schemes[name].name for name in held}, tuple(self._notes()))

    def _notes(self) -> Iterable[str]:
        for reason, left in self.reasons.items():
            schemes = listed(list(dict.fromkeys(left.values())), "formats", most=3)
            yield f"{schemes} at {listed(list(left))}: {reason}"

    def expressed(self, entry_of: Callable[[Scheme], tuple[T | None, str]]) -> dict[str, T]:
        """Return the stack's entry for each linear; ``entry_of`` returns an entry, or None and a reason to note."""
        results = {}
        for name, scheme in self.linears.items():
            entry, reason = entry_of(scheme)
            if entry is None:
                self.note(name, scheme.name, reason)
            else:
                results[name] = entry
        return results

    def fused(self, sites: Mapping[str, Site], entries: Mapping[str, T], what: str) -> dict[str, tuple[T | None, ...]]:
        """Return the distinct entries of each unit that vLLM fuses, by its fused name; note units with several."""
        results: dict[str, tuple[T | None, ...]] = {}
        for unit, members in units_of(sites).items():
            if name := fused_name(unit):
                several = [entries.get(member) for member in members]
                results[name] = tuple(each for index, each in enumerate(several) if each not in several[:index])
                if len(results[name]) > 1:
                    words = f"vLLM runs {len(members)} linears as {name}, which has no {what}: they differ"
                    self.note(unit, "mixed", words)
        return results

    def fp8_caches(self, otherwise: str) -> dict[str, Scheme]:
        """Return all KV caches if they are e4m3, the only supported format; else note ``otherwise`` as the reason."""
        if self.cache == "kv-fp8":
            return self.caches
        for name, scheme in self.caches.items():
            one = "one scheme holds for the caches of all layers"
            self.note(name, scheme.name, one if scheme.name == "kv-fp8" else otherwise)
        return {}


def no_tables(scheme: Scheme, tied: bool) -> str:
    """Return why a stack rejects every quantised embedding table, also one ``tied`` to another site's weight."""
    return "no serving stack loads a quantised table of embeddings from it"


def plan_of(
    assignment: Mapping[str, str],
    sites: Mapping[str, Site],
    dtype: torch.dtype = torch.bfloat16,
    *,
    experts: bool = False,
    tables: Callable[[Scheme, bool], str] = no_tables,
) -> Plan:
    """Sort an assignment of site names to scheme names; ``dtype``: of sites that are not quantised.

    experts: the stack supports parameters that hold several experts; otherwise they are noted. tables: returns why an
    embedding table can't have a scheme, as `no_tables`; empty if it can.

    Raises CannotExport for a site that the model lacks, UnknownScheme for an unknown scheme.
    """
    unknown = [name for name in assignment if name not in sites]
    if unknown:
        raise CannotExport(f"expected sites of the model, got {unknown[0]!r}: take names from audit(...).sites")
    schemes = {name: scheme_named(scheme) for name, scheme in assignment.items()}
    plan = Plan()
    owners = {site.tied for site in sites.values()}
    for name, scheme in schemes.items():
        site = sites[name]
        if scheme.name in _CASTS or scheme.name == "tf32":
            if _CASTS.get(scheme.name) != dtype:
                kept = str(dtype).removeprefix("torch.")
                plan.note(name, scheme.name, f"what isn't quantised is stored and computed in {kept}")
        elif site.type == "kv_cache":
            # Engines with FP8 attention round queries themselves.
            plan.caches[name] = scheme_named(scheme.name.removesuffix("-q")) if scheme.queries else scheme
        elif site.type not in ("linear", "embedding") or scheme.weight is None:
            plan.note(name, scheme.name, "only weights, inputs of linears and the KV cache can be given a format")
        elif site.type == "embedding" and (reason := tables(scheme, bool(site.tied) or name in owners)):
            plan.note(name, scheme.name, reason)
        elif name.endswith(HEAD):
            plan.note(name, scheme.name, "no serving stack has a name for a product with a table of embeddings")
        elif site.role == "convolution":
            plan.note(name, scheme.name, "no serving stack loads a quantised convolution")
        elif site.role == "recurrence":
            plan.note(name, scheme.name, "no serving stack loads a quantised recurrent layer")
        elif len(site.shape) > 2 and experts:
            plan.experts[name] = scheme
        elif len(site.shape) > 2:
            plan.note(name, scheme.name, "experts held in one parameter have no name here")
        else:
            plan.linears[name] = scheme
            if site.type == "embedding":
                plan.tables.add(name)
    for name, site in sites.items():  # a tied weight follows the site that owns it
        if site.tied in plan.linears and name not in assignment and not name.endswith(HEAD):
            plan.linears[name] = plan.linears[site.tied]
    left = tuple(
        name for name, site in sites.items() if site.shape and name not in plan.weights and not name.endswith(HEAD)
    )
    every = {name for name, site in sites.items() if site.type == "kv_cache"}
    shared = {scheme.name for scheme in plan.caches.values()}
    return replace(plan, left=left, cache=shared.pop() if set(plan.caches) == every and len(shared) == 1 else "")


def units_of(names: Mapping[str, Site]) -> dict[str, list[str]]:
    """Return the linears that a serving engine fuses (q, k and v; gate and up), by the name of their unit."""
    units: dict[str, list[str]] = {}
    for name, site in names.items():
        if site.shape and site.unit and site.unit != name:
            units.setdefault(site.unit, []).append(name)
    return {unit: members for unit, members in units.items() if len(members) > 1}
