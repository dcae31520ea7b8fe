"""The interface of the export targets, and an assignment sorted for them: linears, KV caches, unsupported sites.

Also module names as targets: exact names, or regular expressions over their numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from assay.configs import architectures
from assay.configs.architectures import fused_name
from assay.precision.errors import CannotExport
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.observation.tracer import HEAD
from assay.precision.schemes import Scheme, scheme_named
from assay.runtime.errors import listed

T = TypeVar("T")

Names = Mapping[str, Sequence[str]]
"""Checkpoint names of sites, where they differ from the sites' own names."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content that one serving stack reads."""

    content: dict[str, Any]
    held: dict[str, str]
    """The part of the assignment that it expresses; empty if the stack would do nothing."""
    notes: tuple[str, ...] = ()
    """One line for each kind of site that it can't express."""
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The tensors of each site, for stacks with their own tensor names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The model and assignment to export."""

    assignment: Mapping[str, str]
    sites: Mapping[str, Site]
    dtype: torch.dtype = torch.bfloat16
    """Dtype of sites that are not quantised."""
    names: Names = field(default_factory=dict)
    model: str = "MODEL"
    """The directory or hub name that engines load."""
    module: torch.nn.Module
    fits: QParams | None = None
    """The scales and importances that the simulation used."""


@dataclass(frozen=True, slots=True)
class Target:
    """The interface of one serving stack: its recipe, its files, and its limits. Each is one of `configurations`."""

    recipe: Callable[[Request], Recipe]
    files: Callable[[Request, Recipe], Mapping[str, str | bytes]]
    """Returns the files by name for a recipe that expresses something."""
    lacks: Callable[[Scheme], str]
    """Returns why it can't express a scheme of linears or KV caches; empty if it can."""
    fixed: Callable[[Request], Collection[str]] | None = None
    """Returns the sites that it can hold only in their original format; None: those that a checkpoint can't
    (`unstorable`)."""
    unfused: bool = False
    """It takes a format per linear even where engines fuse q, k and v."""
    tables: bool = False
    """It holds embedding tables, for an engine that loads them."""


def of_linears(reason: Callable[[Scheme], str | None], caches: Collection[str] = ()) -> Callable[[Scheme], str]:
    """Return a `Target.lacks`; ``reason`` says why a linear's scheme is unsupported, ``caches`` are supported."""

    def lacks(scheme: Scheme) -> str:
        if "kv_cache" in scheme.site_types and scheme.weight is None:
            return "" if scheme.name in caches else f"of KV caches it holds {' and '.join(caches) or 'none'}"
        if scheme.weight is None or scheme.weight.per == "element":
            return "it holds formats of weights, and inputs of linears with them"
        return reason(scheme) or ""

    return lacks


def json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROLES = {
    "convolution": "no serving stack loads a quantised convolution",
    "recurrence": "no serving stack loads a quantised recurrent layer",
}


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

    def note_caches(self, reason: str) -> None:
        """Record why all KV caches are left out."""
        for name, scheme in self.caches.items():
            self.note(name, scheme.name, reason)

    def recipe(self, content: dict[str, Any], held: Iterable[str]) -> Recipe:
        """Return the stack's content, the sites that it expresses, and the notes (schemes, first site, reason)."""
        schemes = {**self.weights, **self.caches}
        notes = (
            f"{listed(list(dict.fromkeys(left.values())), 'formats', most=3)} at {listed(list(left))}: {reason}"
            for reason, left in self.reasons.items()
        )
        return Recipe(content, {name: schemes[name].name for name in held}, tuple(notes))

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
        site, reason = sites[name], ""
        if scheme.name in _CASTS or scheme.name == "tf32":
            if _CASTS.get(scheme.name) != dtype:
                reason = f"what isn't quantised is stored and computed in {str(dtype).removeprefix('torch.')}"
        elif site.type == "kv_cache":
            # Engines with FP8 attention round queries themselves.
            plan.caches[name] = scheme_named(scheme.name.removesuffix("-q")) if scheme.queries else scheme
        elif site.type not in ("linear", "embedding") or scheme.weight is None:
            reason = "only weights, inputs of linears and the KV cache can be given a format"
        elif site.type == "embedding" and (no_table := tables(scheme, bool(site.tied) or name in owners)):
            reason = no_table
        elif name.endswith(HEAD):
            reason = "no serving stack has a name for a product with a table of embeddings"
        elif site.role in _ROLES:
            reason = _ROLES[site.role]
        elif len(site.shape) <= 2:
            plan.linears[name] = scheme
            if site.type == "embedding":
                plan.tables.add(name)
        elif experts:
            plan.experts[name] = scheme
        else:
            reason = "experts held in one parameter have no name here"
        if reason:
            plan.note(name, scheme.name, reason)
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


def targets_of(names: Iterable[str]) -> list[str]:
    """Return targets that match exactly these names.

    A target is mostly the name itself: vLLM maps names, but not patterns, if it renames modules of the checkpoint.
    Experts, of which there may be thousands, share a pattern if they differ only in their numbers. "re:" targets are
    read with `re.match`, which anchors only the start, so each ends with "$".
    """
    exact, experts = _split(names)
    return sorted([*exact, *_alike(experts)], key=lambda target: target.startswith("re:"))


def lookup_targets(names: Collection[str]) -> list[str]:
    """Return targets for the names that engines look up instead of these (`architectures.lookup_names`).

    Fused linears get patterns. Experts, whose own targets are patterns, get names, which engines map.
    """
    others, experts = _split(architectures.lookup_names(dict.fromkeys(names)))
    return [*experts, *_alike(others)]


def matches(target: str, name: str, classes: Collection[str] = ()) -> bool:
    """Return whether a compressed-tensors target matches a module: by exact name, "re:" pattern, or class."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name or target in classes


def _split(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names outside of experts, and those in experts, each once."""
    given = list(dict.fromkeys(names))
    inside = [name for name in given if architectures.in_experts(name)]
    return [name for name in given if name not in set(inside)], inside


def _alike(names: Iterable[str]) -> list[str]:
    """Return targets of names; names that differ only in numbers share one if all combinations of the numbers occur."""
    alike: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        words = tuple("#" if word.isdecimal() else word for word in name.split("."))
        alike.setdefault(words, set()).add(tuple(int(word) for word in name.split(".") if word.isdecimal()))
    return [target for words, numbers in alike.items() for target in _targets(words, numbers)]


def _targets(words: tuple[str, ...], numbers: set[tuple[int, ...]]) -> list[str]:
    """Return targets of the names given by ``words`` with ``numbers`` in place of "#"."""
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if len(numbers) == 1:
        given = (str(column[0]) for column in columns)
        return [".".join(next(given) if word == "#" else word for word in words)]
    if math.prod(map(len, columns)) == len(numbers):
        choices = (str(column[0]) if len(column) == 1 else f"({'|'.join(map(str, column))})" for column in columns)
        return ["re:" + r"\.".join(next(choices) if word == "#" else re.escape(word) for word in words) + "$"]
    # Not all combinations of numbers occur: split by the first position with several numbers.
    position = next(index for index, values in enumerate(columns) if len(values) > 1)
    return [
        target
        for value in columns[position]
        for target in _targets(words, {some for some in numbers if some[position] == value})
    ]
