"""What an audit found, as plain data: the content of audit.json, which the page and the summary show."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from assay.precision.advice import Finding
from assay.precision.amounts import in_bytes, in_error
from assay.precision.auditing import Audit
from assay.precision.export import Part
from assay.precision.model.sites import Seen, Site
from assay.precision.prediction import Prediction
from assay.precision.recommendation import Assignment
from assay.precision.report.words import Group, grouped, place_of, plain
from assay.precision.roofline import Cost
from assay.precision.schemes import SCHEMES

__all__ = ["About", "content_of", "costs", "schema_version"]

schema_version = 1
_WORST = 6
"""Sites whose channels are shown."""
_CHANNELS = 1024
"""Points of one site's channels that are kept; of more, the largest of equal runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What an audit was asked: as the user gave it, and what came of it."""

    model: str
    kind: str
    stored: str
    """Dtype of most weights."""
    text: str
    sequences: int
    tokens: int
    formats: Sequence[str]
    context: int
    fingerprint: str
    budgets: Mapping[str, float | None] = field(default_factory=dict)
    assumed: bool = False
    """Nobody gave a budget: it is half of the model's bytes."""
    fixed: Sequence[str] = ()
    """Sites that keep their format because something is exported."""

    @property
    def decodes(self) -> bool:
        """Whether the model has a KV cache and decode steps, which encoders and classifiers don't."""
        return self.kind not in ("encoder", "classifier")


def content_of(
    audit: Audit,
    chosen: Assignment,
    front: Sequence[tuple[float, float, Prediction, Assignment]],
    findings: Sequence[Finding],
    about: About,
    exports: Sequence[Part] = (),
) -> dict[str, Any]:
    """The content of audit.json: only what JSON has, by the schema audit.schema.json.

    front: as `Audit.pareto` gives it. findings: as `advise` gives them, the most important first. exports: what was
    written of ``chosen``. Numbers that aren't finite are strings, errors that nobody measured null.
    """
    sites = [_site(audit, site, chosen) for site in audit.sites]
    untouched, decodes = audit.cost({}), about.decodes
    return {
        "schema": schema_version,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("kernel-assay", "torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        "model": {
            "name": about.model,
            "kind": about.kind,
            "stored": about.stored,
            "parameters": sum(parameter.numel() for parameter in audit.model.parameters()),
        },
        "data": {"text": about.text, "sequences": about.sequences, "tokens": about.tokens},
        "settings": {
            "metric": audit.metric.name,
            "unit": audit.metric.unit,
            "target": audit.target,
            "formats": list(about.formats),
            "context": about.context,
            "budgets": {name: limit for name, limit in about.budgets.items() if limit is not None},
            "assumed": about.assumed,
            "fixed": [str(name) for name in about.fixed],
        },
        "fingerprint": about.fingerprint,
        "seconds": {stage: round(spent, 3) for stage, spent in audit.seconds.items()},
        "noise_floor": plain(audit.noise_floor),
        "device": audit.target or "h100",
        "untouched": costs(untouched, decodes),
        "recommended": _assignment(chosen, decodes) | {"met": chosen.met, "why": chosen.why},
        "exports": [_export(audit, part) for part in exports],
        "pareto": [_assignment(assignment, decodes) for _, _, _, assignment in front],
        "changes": [_change(audit, group, chosen, untouched) for group in grouped(sites) if _matters(group, sites)],
        "calibration": [_pair(audit, assignment, pair.measured) for assignment, pair in audit.measured],
        "sites": sites,
        "outliers": _outliers(audit),
        "findings": [_finding(finding) for finding in findings],
    }


def _site(audit: Audit, site: Site, chosen: Mapping[str, str]) -> dict[str, Any]:
    place = place_of(str(site))
    menu = () if site.tied else audit.menu(site)
    return {
        "name": str(site),
        "place": site.place,
        "role": site.role,
        "shape": list(site.shape),
        "unit": site.unit,
        "tied": site.tied or None,
        "layer": place.layer,
        "kind": place.kind,
        "scheme": chosen.get(site.tied or str(site)),
        "alone": {scheme: plain(audit.contribution(str(site), scheme)) for scheme in menu},
        **_spread(audit, site),
    }


def _spread(audit: Audit, site: Site) -> dict[str, Any]:
    """Largest magnitude at a site, and how often that of the median channel it is."""
    seen = _seen(audit, site)
    if seen is None or seen.largest is None:
        return {"largest": None, "outlier": None}
    return {"largest": plain(float(seen.largest.max())), "outlier": plain(_ratio(seen.largest))}


def _ratio(largest: torch.Tensor) -> float:
    middle = float(largest.median())
    return float(largest.max()) / middle if middle > 0 and len(largest) > 1 else math.nan


def _seen(audit: Audit, site: Site) -> Seen | None:
    parts = [audit.seen[name, part] for name, part in audit.seen if name == str(site)]
    return max(parts, key=lambda seen: -1.0 if seen.largest is None else float(seen.largest.max()), default=None)


def _outliers(audit: Audit) -> list[dict[str, Any]]:
    """Channels of the sites whose largest is furthest from their median; of what several linears read, the first."""
    found: dict[tuple[float, int], tuple[float, str, torch.Tensor]] = {}
    for site in audit.sites:
        seen = _seen(audit, site)
        if seen is None or seen.largest is None or not math.isfinite(ratio := _ratio(seen.largest)):
            continue
        key = (float(seen.largest.double().sum()), len(seen.largest))
        if key not in found or (site.place == "linear" and not found[key][1].startswith("linear ")):
            found[key] = (ratio, f"{site.place} {site}", seen.largest)
    worst = sorted(found.values(), key=lambda entry: (-entry[0], entry[1]))[:_WORST]
    return [
        {
            "site": name.partition(" ")[2],
            "outlier": plain(ratio),
            "channels": len(largest),
            "largest": [float(f"{value:.4g}") for value in _thinned(largest).tolist()],
        }
        for ratio, name, largest in worst
    ]


def _thinned(largest: torch.Tensor) -> torch.Tensor:
    if len(largest) <= _CHANNELS:
        return largest
    return torch.stack([run.max() for run in largest.tensor_split(_CHANNELS)])


def costs(cost: Cost, decodes: bool) -> dict[str, Any]:
    """Whole bytes and seconds; null for the KV cache and the decode step of a model that has none."""
    return {
        "bytes": round(cost.bytes),
        "kv_bytes": round(cost.kv_bytes) if decodes else None,
        "prefill": plain(cost.prefill),
        "decode": plain(cost.decode) if decodes else None,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {name: plain(getattr(prediction, name)) for name in ("error", "low", "high")}


def _assignment(assignment: Assignment, decodes: bool) -> dict[str, Any]:
    return {
        "assignment": dict(assignment),
        "prediction": _prediction(assignment.prediction),
        "measured": plain(assignment.measured),
        **costs(assignment.cost, decodes),
    }


def _export(audit: Audit, part: Part) -> dict[str, Any]:
    """A part of an export, with the bytes of what it expresses where it holds no weights itself."""
    size = round(audit.cost(part.held).bytes) if part.bytes is None else part.bytes
    paths = [str(path) for path in part.paths]
    return {"format": part.format, "paths": paths, "sites": len(part.held), "bytes": size}


def _pair(audit: Audit, assignment: Mapping[str, str], measured: float) -> dict[str, Any]:
    return {"prediction": _prediction(audit.predict(assignment)), "measured": plain(measured), "sites": len(assignment)}


def _matters(group: Group, sites: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group changes something, or keeps a weight or a cache that it might have changed."""
    places = {site["name"]: site["place"] for site in sites}
    return bool(group.scheme) or places[group.sites[0]] in ("linear", "embedding", "kv_cache")


def _change(audit: Audit, group: Group, chosen: Mapping[str, str], untouched: Cost) -> dict[str, Any]:
    """What a group takes, what that saves, what it costs, and why in words."""
    about = {
        "kind": group.kind,
        "layers": list(group.layers),
        "scheme": group.scheme or None,
        "sites": list(group.sites),
    }
    if not group.scheme:
        return about | {"saved": 0, "error": 0.0, "words": f"{group.where}: stays as it is{_mildest(audit, group)}."}
    alone = dict.fromkeys(group.sites, group.scheme)
    cost, error, whole = audit.cost(alone), audit.predict(alone).error, audit.predict(chosen).error
    saved = untouched.bytes - cost.bytes + untouched.kv_bytes - cost.kv_bytes
    if saved > 0:
        does = f"saves {in_bytes(saved)}"
    else:
        does = f"takes {in_bytes(-saved)} more" if saved < 0 else "saves no bytes"
    share = f", {_percent(error / whole)} of what all together cost" if 0 < error <= whole < math.inf else ""
    words = f"{group.where}: {group.scheme}; {does}, and alone costs {in_error(error)}{share}."
    return about | {"saved": round(saved), "error": plain(error), "words": words}


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "less than 1%"


def _mildest(audit: Audit, group: Group) -> str:
    """What the least harmful scheme that makes a kept group smaller would cost."""
    own = audit.bits
    smaller = [scheme for scheme in audit.menu(group.sites[0]) if _width(scheme, audit, group.sites[0]) < own]
    if not smaller:
        return ", for there is no smaller scheme"
    costs = {scheme: audit.predict(dict.fromkeys(group.sites, scheme)).error for scheme in smaller}
    least = min(costs, key=lambda scheme: costs[scheme])
    return f"; the mildest smaller scheme, {least}, would alone cost {in_error(costs[least])}"


def _width(scheme: str, audit: Audit, name: str) -> float:
    """Bits that a scheme stores a value in, scales included; infinite where it stores none."""
    site = next(site for site in audit.sites if site == name)
    stored = SCHEMES[scheme].activation if site.place == "kv_cache" else SCHEMES[scheme].weight
    shape = site.shape[-2:] or (1, 64)
    return math.inf if stored is None else stored.bits(shape) / math.prod(shape)


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "site": finding.site,
        "words": finding.words,
        "numbers": {key: _value(value) for key, value in finding.numbers.items()},
        "remedy": finding.remedy,
    }


def _value(value: Any) -> Any:
    """A number, name or sequence of them as JSON has it."""
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    return plain(value) if isinstance(value, float) else value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
