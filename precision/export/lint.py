"""Warnings about errors, mostly silent ones, when a serving stack loads an assignment: one line each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.configs.architectures import fused_name, lookup_names
from assay.precision.export.plan import matches, units_of
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES, scheme_named
from assay.precision.targets import target_named
from assay.runtime.errors import listed


def lint(
    assignment: Mapping[str, str], sites: Mapping[str, Site], target: str | None = None, *, fuses: bool = True
) -> list[str]:
    """Return warnings about an assignment itself.

    They concern fused linears with different schemes (if ``fuses``), tied weights, and schemes that ``target`` (an
    engine, a device or both, as in `audit`) lacks. Raises UnknownDevice, UnknownScheme.
    """
    results = []
    aimed = target_named(target)
    fused = units_of(sites) if fuses and (aimed.engine is None or aimed.engine.fused) else {}
    for unit, members in fused.items():
        names = {assignment.get(member) for member in members}
        if len(names) > 1:
            choices = ", ".join(f"{name.rpartition('.')[2]} {assignment.get(name, 'as it is')}" for name in members)
            results.append(f"{unit}: serving engines run its linears as one product, which takes one scheme: {choices}")
    results += [
        f"{name}: shares its weight with {site.tied}; {assignment.get(name) or assignment.get(site.tied)} is both's"
        for name, site in sites.items()
        if site.tied and (name in assignment or site.tied in assignment)
    ]
    fallen: dict[str, list[str]] = {}
    for name, scheme in assignment.items():
        if note := aimed.lacks(scheme_named(scheme)):
            fallen.setdefault(note, []).append(name)
    results += [f"{note}, at {listed(names)}: not what was simulated" for note, names in fallen.items()]
    return results


def lint_config(
    config: Mapping[str, Any],
    assignment: Mapping[str, str],
    sites: Mapping[str, Site],
    names: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Return warnings about a compressed-tensors ``quantization_config`` that should express ``assignment``.

    They concern patterns that match too much (layers.1 also matching layers.11), linears that no pattern matches,
    linears in two groups, and linears that are both targeted and ignored. names: checkpoint names of sites, where they
    differ.
    """
    called = {site: (names or {}).get(site, [site]) for site in sites}
    classes = {name: ("Embedding",) if site.type == "embedding" else ("Linear",) for name, site in sites.items()}
    others = lookup_names({name for several in called.values() for name in several})
    groups: Mapping[str, Any] = config.get("config_groups") or {}
    ignored = config.get("ignore") or []
    results = []
    if list(groups) != sorted(groups):
        results.append(f"{', '.join(groups)}: groups are sorted by name when stored; number them with zeros in front")
    for name, group in groups.items():
        for target in group["targets"]:
            if target.startswith("re:") and not target.endswith("$"):
                results.append(f"{name}: {target!r} matches every name that begins so; end it with $")
            own = (matches(target, name, classes[site]) for site in sites for name in called[site])
            if not any(own) and not any(matches(target, name) for name in others):
                results.append(f"{name}: {target!r} matches no linear of the model")
    for site, index in sites.items():
        if index.shape:
            scheme = assignment.get(site, assignment.get(index.tied, ""))
            results += [
                line for name in called[site] if (line := _of_linear(name, classes[site], scheme, groups, ignored))
            ]
    return results


def lint_scales(tensors: Mapping[str, torch.Tensor], sites: Mapping[str, Site]) -> list[str]:
    """Return warnings about fused linears whose per-tensor scales differ in a checkpoint: engines use one scale."""
    results = []
    for unit, members in units_of(sites).items():
        if fused_name(unit) is None:
            continue
        for key, does in (("weight_global_scale", "takes the largest for all"), ("weight_scale", "rounds all to one")):
            scales = [tensors[f"{name}.{key}"].float() for name in members if f"{name}.{key}" in tensors]
            if all(scale.numel() == 1 for scale in scales) and len({float(scale) for scale in scales}) > 1:
                results.append(f"{unit}: its {len(scales)} weights have a {key} each, of which vLLM {does}")
    return results


def _of_linear(name: str, classes: Sequence[str], given: str, groups: Mapping[str, Any], ignored: Sequence[str]) -> str:
    hits = [
        (group, target) for group in groups for target in groups[group]["targets"] if matches(target, name, classes)
    ]
    skipped = any(matches(target, name, classes) for target in ignored)
    weight = SCHEMES[given].weight if given in SCHEMES else None
    quantised = weight is not None and weight.per != "element"
    if quantised and (skipped or not hits):
        why = "it is ignored" if skipped else "no group has it as a target"
        return f"{name}: would silently stay as it is instead of {given}, since {why}"
    if hits and not quantised and not skipped:
        return f"{name}: {hits[0][1]!r} of {hits[0][0]} matches it, but it is to stay as it is"
    if len({group for group, _ in hits}) > 1:
        return f"{name}: stands in {' and '.join(dict(hits))}; engines take one of them"
    return ""
