"""What would go wrong, mostly in silence, when a serving stack loads an assignment: one line each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from assay.precision.export.plan import units_of
from assay.precision.export.targets import matches
from assay.precision.model.sites import Site
from assay.precision.schemes import SCHEMES

__all__ = ["lint", "lint_config"]


def lint(
    assignment: Mapping[str, str], sites: Mapping[str, Site], supported: Collection[str] | None = None
) -> list[str]:
    """Warnings about an assignment itself.

    Linears that are fused and disagree, or share less than their kernel assumes; weights that are tied; formats that
    the device lacks (``supported``: what it computes in, as `Scheme.compute` names it, and "microscaling" where its
    products take a scale for every 16 or 32 elements; None: not known).
    """
    found = []
    for unit, members in units_of(sites).items():
        names = {assignment.get(member) for member in members}
        if len(names) > 1:
            choices = ", ".join(f"{_last(member)} {assignment.get(member, 'as it is')}" for member in members)
            found.append(f"{unit}: serving engines run its linears as one product, which takes one scheme: {choices}")
        elif names != {None}:
            found += _shared_scales(unit, members, str(names.pop()))
    found += _tied(assignment, sites)
    if supported is not None:
        missing: dict[tuple[str, str], list[str]] = {}
        for name, scheme in assignment.items():
            lacking = _needed(scheme) - set(supported)
            if lacking:
                missing.setdefault((scheme, " and ".join(sorted(lacking))), []).append(name)
        found += [
            f"{scheme}: the device has no {lacking} products (it has {', '.join(sorted(supported))}), "
            f"so {_listed(names)} would run in another arithmetic"
            for (scheme, lacking), names in missing.items()
        ]
    return found


def lint_config(
    config: Mapping[str, Any],
    assignment: Mapping[str, str],
    sites: Mapping[str, Site],
    names: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Warnings about a compressed-tensors ``quantization_config`` that is to mean ``assignment``.

    Patterns that match what they should not (layers.1 and layers.11), linears that no pattern matches, that stand in
    two groups, or that are targeted and ignored. names: what sites are called in checkpoints, where that differs.
    """
    called = {site: (names or {}).get(site, [site]) for site in sites}
    groups: Mapping[str, Any] = config.get("config_groups") or {}
    ignored = config.get("ignore") or []
    found = []
    if list(groups) != sorted(groups):
        found.append(f"{', '.join(groups)}: groups are sorted by name when stored; number them with zeros in front")
    for name, group in groups.items():
        for target in group["targets"]:
            if target.startswith("re:") and not target.endswith("$"):
                found.append(f"{name}: {target!r} matches every name that begins so; end it with $")
            if not any(matches(target, name, _classes(sites[site])) for site in sites for name in called[site]):
                found.append(f"{name}: {target!r} matches no linear of the model")
    for site, place in sites.items():
        if place.shape:
            scheme = assignment.get(site, assignment.get(place.tied, ""))
            found += [line for name in called[site] for line in _of_linear(name, place, scheme, groups, ignored)]
    return found


def _of_linear(name: str, place: Site, given: str, groups: Mapping[str, Any], ignored: list[str]) -> list[str]:
    classes = _classes(place)
    hits = [
        (group, target) for group in groups for target in groups[group]["targets"] if matches(target, name, classes)
    ]
    skipped = any(matches(target, name, classes) for target in ignored)
    weight = SCHEMES[given].weight if given in SCHEMES else None
    quantised = weight is not None and weight.per != "element"
    if quantised and (skipped or not hits):
        why = "it is ignored" if skipped else "no group has it as a target"
        return [f"{name}: would silently stay as it is instead of {given}, since {why}"]
    if hits and not quantised and not skipped:
        return [f"{name}: {hits[0][1]!r} of {hits[0][0]} matches it, but it is to stay as it is"]
    if len({group for group, _ in hits}) > 1:
        return [f"{name}: stands in {' and '.join(dict(hits))}; engines take one of them"]
    return []


def _needed(name: str) -> set[str]:
    """What a device computes in, natively, where it runs a scheme."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        return set()
    scaled = scheme.activation is not None and scheme.activation.scale_format in ("float8_e8m0fnu", "float8_e4m3fn")
    return {scheme.compute, "microscaling"} if scaled else {scheme.compute}


def _shared_scales(unit: str, members: list[str], name: str) -> list[str]:
    """What engines take to be one value for all linears of a unit."""
    weight = SCHEMES[name].weight if name in SCHEMES else None
    if weight is None:
        return []
    if weight.scale_format == "float8_e4m3fn":
        return [f"{unit}: {name} has a scale for each of its {len(members)} weights; vLLM takes the largest for all"]
    if weight.per == "tensor":
        return [f"{unit}: {name} has a scale for each of its {len(members)} weights; vLLM rounds again to the largest"]
    return []


def _tied(assignment: Mapping[str, str], sites: Mapping[str, Site]) -> list[str]:
    return [
        f"{name}: shares its weight with {site.tied}; {assignment.get(name) or assignment.get(site.tied)} is both's"
        for name, site in sites.items()
        if site.tied and (name in assignment or site.tied in assignment)
    ]


def _classes(site: Site) -> tuple[str, ...]:
    return ("Embedding",) if site.place == "embedding" else ("Linear",)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
