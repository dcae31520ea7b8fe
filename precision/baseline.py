"""Simple alternatives measured over the same sequences as the recommendation: one scheme everywhere, the first and last
layers unquantised, the model served in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from assay.precision.auditing import Audit
from assay.precision.choice.recommendation import Assignment
from assay.precision.choice.roofline import Cost
from assay.precision.errors import BadAssignment
from assay.precision.observation.sites import layer_and_kind
from assay.precision.sampling import Difference, MeasuredError, difference
from assay.precision.schemes import SCHEMES
from assay.precision.units import format_bytes, format_error

_AS_GOOD = 0.05
"""An alternative is as good if its error is larger than the recommended assignment's by at most this share."""
UNQUANTISED = "bfloat16, as served unquantised"


@dataclass(frozen=True, slots=True)
class Baseline:
    """A simple assignment to compare the recommended one with."""

    name: str
    assignment: Mapping[str, str]
    cost: Cost
    measured: MeasuredError
    difference: Difference
    """Its error minus that of the recommended assignment, paired by sequence."""
    instead: bool
    """It is as good at no more bytes, so it should be preferred."""
    words: str


def baselines(
    audit: Audit, chosen: Assignment, *, fixed: Collection[str] = (), max_error: float = math.inf, caches: bool = True
) -> list[Baseline]:
    """Return the baselines, each measured as ``chosen`` was, sorted by bytes; the model in bfloat16 comes last.

    Every scheme of the menus that stores weights or KV caches is assigned to all linears that it fits except routers;
    to the same without the first and the last layer and the linears outside of the layers; and to the embedding tables
    too. fixed: names of sites that keep their own format. max_error: a budget that a baseline must meet to be as good.
    caches: the model is served with KV caches, as decoders are. Raises BadAssignment where ``chosen`` was not measured.
    """
    reference = chosen.measured
    if not isinstance(reference, MeasuredError):
        raise BadAssignment("expected an assignment that was measured, as `recommend` gives it: set its `measured`")
    results: list[Baseline] = []
    recipes = [(name, assignment) for name, assignment in _recipes(audit, fixed, caches) if assignment]
    audit.measure_together([assignment for _, assignment in recipes])
    for name, assignment in recipes:
        if any(each.assignment == assignment for each in results):
            continue
        cost, measured = audit.cost(assignment), audit.measure(assignment)
        gap, same = difference(measured, reference), assignment == dict(chosen)
        room = max(_AS_GOOD * reference, float(audit.noise_floor))
        small = cost.bytes <= chosen.cost.bytes * (1 + 1e-9) and cost.kv_bytes <= chosen.cost.kv_bytes * (1 + 1e-9)
        good = gap.sign <= 0 and gap.error <= room and measured <= max(max_error, reference)
        words = "what is recommended" if same else _words(gap, cost, chosen.cost)
        results.append(Baseline(name, assignment, cost, measured, gap, small and good and not same, words))
    gap, whole = difference(audit.noise_floor, reference), audit.cost({})
    return [
        *sorted(results, key=lambda each: (each.cost.bytes, each.cost.kv_bytes)),
        Baseline(UNQUANTISED, {}, whole, audit.noise_floor, gap, False, _words(gap, whole, chosen.cost)),
    ]


def _recipes(audit: Audit, fixed: Collection[str], caches: bool) -> Iterator[tuple[str, dict[str, str]]]:
    sites = [site for site in audit.sites if not site.tied and str(site) not in fixed and site.role != "router"]
    layers = [layer for site in sites if (layer := layer_and_kind(str(site))[0]) is not None]
    ends = {None, min(layers, default=None), max(layers, default=None)}
    for scheme in sorted({scheme for site in sites for scheme in audit.menu(site)}):
        fit = [site for site in sites if scheme in audit.menu(site)]
        kept = [str(site) for site in fit if site.type == "kv_cache" and caches]
        if SCHEMES[scheme].weight is None:
            if kept:
                yield f"{scheme} at every KV cache", dict.fromkeys(kept, scheme)
            continue
        linears = [str(site) for site in fit if site.type == "linear"]
        inner = [name for name in linears if layer_and_kind(name)[0] not in ends]
        every = sum(site.type == "linear" for site in sites)
        name = scheme if len(linears) == every else f"{scheme} (fits {len(linears)} of {every})"
        yield f"{name} at every linear", dict.fromkeys(linears, scheme)
        yield f"{name}, first and last layers kept", dict.fromkeys(inner, scheme)
        tables = [str(site) for site in fit if site.type == "embedding"]
        if tables:
            yield f"{name} at every linear and embedding", dict.fromkeys([*linears, *tables], scheme)


def _words(gap: Difference, cost: Cost, chosen: Cost) -> str:
    if math.isnan(gap.error):
        error = "both break the model"
    elif math.isinf(gap.error):
        error = "breaks the model" if gap.error > 0 else "what is recommended breaks the model"
    elif gap.sign == 0:
        error = "its error can't be told apart"
    else:
        low, high = sorted((abs(gap.low), abs(gap.high)))
        error = f"its error is {'larger' if gap.sign > 0 else 'smaller'} by {format_error(low)} to {format_error(high)}"
    more = cost.bytes + cost.kv_bytes - chosen.bytes - chosen.kv_bytes
    size = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'}" if abs(more) >= 1 else "as many bytes"
    return f"{error}, {size}"
