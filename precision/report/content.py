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
from assay.precision.export import Part
from assay.precision.observation.sites import Site, layer_and_kind
from assay.precision.prediction.measuring import Curve
from assay.precision.prediction.quadratic_form import Prediction
from assay.precision.report import record
from assay.precision.report.summary import Group, grouped, plain
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
    untouched, shut = audit.cost({}), audit.observed.unaudited
    largest = [record.UnauditedParameter(each.name, each.parameters, each.why) for each in shut.shut[:_SHUT]]
    content = record.Content(
        schema=1,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: installed_version(name) or None for name in ("kernel-assay", "torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        model=model,
        unaudited=record.Unaudited(shut.parameters, shut.share, largest, str(shut)),
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
    outliers = []
    for ratio, name, largest in sorted(results.values(), key=lambda entry: (-entry[0], entry[1]))[:_WORST]:
        runs = largest.tensor_split(min(_CHANNELS, len(largest)))
        kept = [float(f"{float(run.max()):.4g}") for run in runs]
        outliers.append(record.Outlier(name.partition(" ")[2], ratio, len(largest), kept))
    return outliers


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
    loaded, again = None, part.loaded
    if again is not None:
        error, interval = (None, None) if again.error is None else (float(again.error), _interval(again.error))
        loaded = record.Loaded(again.reader, error, interval, float(again.simulated), again.agrees, again.words)
    return record.Export(part.format, [str(path) for path in part.paths], len(part.held), size, loaded)


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
    share = ""
    if 0 < error <= whole < math.inf:
        percent = f"{100 * error / whole:.0f} %" if error / whole >= 0.005 else "less than 1 %"
        share = f", {percent} of what all together cost"
    words = f"{group.where}: {group.scheme}; {does}, and alone costs {format_error(error)} {unit}{share}."
    return record.Change(*about, round(saved), error, words)


def _mildest(audit: Audit, group: Group) -> str:
    """Return words on the least harmful scheme that would make a kept group smaller, and its error."""
    site = audit.observed.site(group.sites[0])
    shape = site.shape[-2:] or (1, 64)
    costs = {}
    for scheme in audit.menu(group.sites[0]):
        stored = SCHEMES[scheme].activation if site.type == "kv_cache" else SCHEMES[scheme].weight
        if stored is not None and stored.bits(shape) / math.prod(shape) < audit.bits:
            costs[scheme] = audit.predict(dict.fromkeys(group.sites, scheme)).error
    if not costs:
        return ", for there is no smaller scheme"
    least = min(costs, key=lambda scheme: costs[scheme])
    return f"; the mildest smaller scheme, {least}, would alone cost {format_error(costs[least])} {audit.metric.unit}"
