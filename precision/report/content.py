"""The content of audit.json as plain data, made from an audit; the page and the summary render it."""

import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

from assay.precision.advice import Finding
from assay.precision.auditing import Audit
from assay.precision.baseline import Baseline
from assay.precision.choice.recommendation import Assignment
from assay.precision.choice.roofline import Cost
from assay.precision.export import Part, Reloaded
from assay.precision.observation.sites import Site, layer_and_kind
from assay.precision.prediction.measuring import Curve
from assay.precision.prediction.quadratic_form import Prediction
from assay.precision.report import record
from assay.precision.report.words import Group, grouped, plain
from assay.precision.sampling import MeasuredError
from assay.precision.schemes import SCHEMES
from assay.precision.units import format_bytes, format_error
from assay.runtime.results import installed_version

_WORST = 6
"""Sites whose channels are recorded."""
_SHUT = 16
"""Parameters outside of all sites that are named."""
_CHANNELS = 1024
"""Values kept of one site's channels; with more channels, the largest of equal runs."""


def content_of(
    audit: Audit,
    chosen: Assignment,
    front: Sequence[tuple[float, float, Prediction, Assignment]],
    findings: Sequence[Finding],
    exports: Sequence[Part] = (),
    *,
    baselines: Sequence[Baseline] = (),
    positions: Curve | None = None,
    model: record.Model,
    data: record.Data,
    held_out: record.Data | None = None,
    settings: record.Settings,
    fingerprint: str,
    command: str = "",
) -> dict[str, Any]:
    """Return the content of audit.json, a `record.Content`, as plain JSON data that follows audit.schema.json.

    front: from `Audit.pareto`. findings: from `advise`, the most important first. exports: the written formats of
    ``chosen``. baselines: simple assignments to compare with. positions: the error of ``chosen`` over positions.
    Numbers that aren't finite become strings, errors that were not measured null.
    """
    sites = [_site(audit, site, chosen) for site in audit.sites]
    groups = [group for group in grouped(msgspec.to_builtins(sites)) if group.scheme or group.weighty]
    untouched = audit.cost({})
    content = record.Content(
        schema=1,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: installed_version(name) or None for name in ("kernel-assay", "torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        model=model,
        unaudited=_unaudited(audit),
        data=data,
        held_out=held_out,
        settings=settings,
        fingerprint=fingerprint,
        command=command,
        seconds={stage: round(spent, 3) for stage, spent in audit.seconds.items()},
        noise_floor=float(audit.noise_floor),
        device=audit.roofline.device.name if audit.roofline.device else None,
        untouched=record.Costs(**_costs(untouched, model.decodes)),
        recommended=record.Recommended(
            **assigned(chosen, model.decodes), met=chosen.met, why=chosen.why, agreement=audit.agreement(chosen)
        ),
        baselines=[_baseline(each, model.decodes) for each in baselines],
        positions=None if positions is None else _positions(positions),
        coverage=_coverage(audit, front),
        exports=[_export(audit, part) for part in exports],
        pareto=[record.Assigned(**assigned(assignment, model.decodes)) for *_, assignment in front],
        changes=[_change(audit, group, chosen, untouched) for group in groups],
        calibration=[
            record.Pair(_reported(audit.predict(assignment)), float(pair.measured), len(assignment))
            for assignment, pair in audit.measured
        ],
        sites=sites,
        outliers=_outliers(audit),
        findings=msgspec.convert(findings, list[record.Finding], from_attributes=True),
    )
    # Budgets keep all digits, since other numbers are compared with them.
    return {**plain(msgspec.to_builtins(content)), "settings": msgspec.to_builtins(settings)}


def _unaudited(audit: Audit) -> record.Unaudited:
    result = audit.observed.unaudited
    largest = [record.UnauditedParameter(each.name, each.parameters, each.why) for each in result.shut[:_SHUT]]
    return record.Unaudited(result.parameters, result.share, largest, str(result))


def _site(audit: Audit, site: Site, chosen: Mapping[str, str]) -> record.Site:
    layer, kind = layer_and_kind(str(site))
    menu = () if site.tied else audit.menu(site)
    largest = audit.observed.largest(site)
    return record.Site(
        name=str(site),
        place=site.type,
        role=site.role,
        shape=list(site.shape),
        unit=site.unit,
        tied=site.tied or None,
        layer=layer,
        kind=kind,
        scheme=chosen.get(site.tied or str(site)),
        alone={scheme: audit.contribution(str(site), scheme) for scheme in menu},
        largest=None if largest is None else float(largest.max()),
        outlier=None if largest is None else _ratio(largest),
    )


def _ratio(largest: torch.Tensor) -> float:
    middle = float(largest.median())
    return float(largest.max()) / middle if middle > 0 and len(largest) > 1 else math.nan


def _outliers(audit: Audit) -> list[record.Outlier]:
    """Return the sites with the largest ratio of largest to median channel; one per shared input."""
    results: dict[tuple[float, int], tuple[float, str, torch.Tensor]] = {}
    for site in audit.sites:
        largest = audit.observed.largest(site)
        if largest is None or not math.isfinite(ratio := _ratio(largest)):
            continue
        key = (float(largest.double().sum()), len(largest))
        if key not in results or (site.type == "linear" and not results[key][1].startswith("linear ")):
            results[key] = (ratio, f"{site.type} {site}", largest)
    worst = sorted(results.values(), key=lambda entry: (-entry[0], entry[1]))[:_WORST]
    return [
        record.Outlier(
            site=name.partition(" ")[2],
            outlier=ratio,
            channels=len(largest),
            largest=[float(f"{value:.4g}") for value in _thinned(largest).tolist()],
        )
        for ratio, name, largest in worst
    ]


def _thinned(largest: torch.Tensor) -> torch.Tensor:
    if len(largest) <= _CHANNELS:
        return largest
    return torch.stack([run.max() for run in largest.tensor_split(_CHANNELS)])


def _costs(cost: Cost, decodes: bool) -> dict[str, Any]:
    """Return whole bytes and seconds; null for a cost that the model doesn't have, and for times without a device."""
    return {
        "bytes": round(cost.bytes),
        "kv_bytes": round(cost.kv_bytes) if decodes else None,
        "prefill": None if math.isnan(cost.prefill) else cost.prefill,
        "decode": cost.decode if decodes and not math.isnan(cost.decode) else None,
    }


def assigned(assignment: Assignment, decodes: bool) -> dict[str, Any]:
    """Return the fields of a `record.Assigned`; ``decodes``: the model has a KV cache and decode steps."""
    return {
        "assignment": dict(assignment),
        "prediction": _reported(assignment.prediction),
        "measured": float(assignment.measured),
        "interval": _interval(assignment.measured),
        **_costs(assignment.cost, decodes),
    }


def _reported(prediction: Prediction) -> record.Prediction:
    return record.Prediction(prediction.error, prediction.low, prediction.high, prediction.level)


def _interval(measured: float) -> record.Interval | None:
    if not isinstance(measured, MeasuredError) or not math.isfinite(measured):
        return None
    return record.Interval(measured.low, measured.high)


def _baseline(result: Baseline, decodes: bool) -> record.Baseline:
    apart = record.Interval(result.difference.low, result.difference.high)
    return record.Baseline(
        name=result.name,
        assignment=dict(result.assignment),
        measured=float(result.measured),
        interval=_interval(result.measured),
        difference=result.difference.error,
        apart=apart if math.isfinite(result.difference.error) else None,
        instead=result.instead,
        words=result.words,
        **_costs(result.cost, decodes),
    )


def _positions(result: Curve) -> record.Positions:
    growth = result.growth
    known = math.isfinite(growth.ratio) and math.isfinite(growth.high)
    return record.Positions(
        steps=[
            record.Step(end, float(error), _interval(error))
            for end, error in zip(result.ends, result.errors, strict=True)
        ],
        base=result.base,
        growth=growth.ratio,
        apart=record.Interval(growth.low, growth.high) if known else None,
    )


def _coverage(audit: Audit, front: Sequence[tuple[float, float, Prediction, Assignment]]) -> record.Coverage:
    """Return the coverage of the front's measured assignments to which no interval was fitted."""
    fitted = [assignment for assignment, _ in audit.measured]
    fresh = [one for *_, one in front if one and dict(one) not in fitted and not math.isnan(one.measured)]
    return record.Coverage(sum(one.prediction.low <= one.measured <= one.prediction.high for one in fresh), len(fresh))


def _export(audit: Audit, part: Part) -> record.Export:
    """Return a part of an export; without weights of its own, its bytes are those of the sites that it expresses."""
    size = round(audit.cost(part.held).bytes) if part.bytes is None else part.bytes
    return record.Export(part.format, [str(path) for path in part.paths], len(part.held), size, _loaded(part.loaded))


def _loaded(again: Reloaded | None) -> record.Loaded | None:
    if again is None:
        return None
    error = None if again.error is None else float(again.error)
    interval = None if again.error is None else _interval(again.error)
    return record.Loaded(again.reader, error, interval, float(again.simulated), again.agrees, again.words)


def _change(audit: Audit, group: Group, chosen: Mapping[str, str], untouched: Cost) -> record.Change:
    """Return a group's scheme, the bytes that it saves, its error, and the reason in words."""
    about = (group.kind, list(group.layers), group.scheme or None, list(group.sites))
    if not group.scheme:
        return record.Change(*about, 0, 0.0, f"{group.where}: stays as it is{_mildest(audit, group)}.")
    alone = dict.fromkeys(group.sites, group.scheme)
    cost, error, whole = audit.cost(alone), audit.predict(alone).error, audit.predict(chosen).error
    saved = untouched.bytes - cost.bytes + untouched.kv_bytes - cost.kv_bytes
    if saved > 0:
        does = f"saves {format_bytes(saved)}"
    else:
        does = f"takes {format_bytes(-saved)} more" if saved < 0 else "saves no bytes"
    unit = audit.metric.unit
    share = f", {_percent(error / whole)} of what all together cost" if 0 < error <= whole < math.inf else ""
    words = f"{group.where}: {group.scheme}; {does}, and alone costs {format_error(error)} {unit}{share}."
    return record.Change(*about, round(saved), error, words)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "less than 1 %"


def _mildest(audit: Audit, group: Group) -> str:
    """Return words on the least harmful scheme that would make a kept group smaller, and its error."""
    own = audit.bits
    smaller = [scheme for scheme in audit.menu(group.sites[0]) if _width(scheme, audit, group.sites[0]) < own]
    if not smaller:
        return ", for there is no smaller scheme"
    costs = {scheme: audit.predict(dict.fromkeys(group.sites, scheme)).error for scheme in smaller}
    least = min(costs, key=lambda scheme: costs[scheme])
    return f"; the mildest smaller scheme, {least}, would alone cost {format_error(costs[least])} {audit.metric.unit}"


def _width(scheme: str, audit: Audit, name: str) -> float:
    """Return the bits per value of a scheme, scales included; infinite if it stores no values."""
    site = audit.observed.site(name)
    stored = SCHEMES[scheme].activation if site.type == "kv_cache" else SCHEMES[scheme].weight
    shape = site.shape[-2:] or (1, 64)
    return math.inf if stored is None else stored.bits(shape) / math.prod(shape)
