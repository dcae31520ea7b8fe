"""Values beyond a format's range, at either end, and static scales that other data would overrun."""

import math
from collections.abc import Iterator

import torch

from assay.formats.format import Format
from assay.precision.advice.finding import Finding
from assay.precision.advice.local import linears, matrices, owner, remedied, rows_of
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import groups
from assay.precision.observation.sites import Site
from assay.precision.prediction.predictor import Predictor
from assay.precision.schemes import SCHEMES, FakeQuantizer, Quantizer
from assay.precision.schemes.storage import grouped

_OVERRUN = 2.0
"""Ratio of the two largest batches' magnitudes beyond which a static scale rests on one of them."""


def nonfinite(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """NaN and infinities in the model's own values. Masked scores are minus infinity and no fault."""
    for (name, part), seen in observed.statistics.items():
        if seen.nonfinite and not name.endswith(":scores"):
            yield Finding(
                "nonfinite",
                name,
                f"{seen.nonfinite} of the values{_of(part)} are NaN or infinite before anything is quantised.",
                {"count": seen.nonfinite, "rows": seen.real},
                "Mend the model first: no scale can be taken from such values.",
                math.inf,
            )


def overflows(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Values beyond the largest of a format that the menu offers without a scale."""
    for site in observed.sites:
        found = list(_beyond(observed, site))
        if not found:
            continue
        costs = {name: predictor.alone(str(site), name) for name in observed.menu(site)}
        fit = [name for name in costs.keys() - {scheme for scheme, *_ in found} if math.isfinite(costs[name])]
        mildest = min(sorted(fit), key=costs.__getitem__, default="")
        for scheme, tensor, largest, quantizer in found:
            limit = quantizer.element.largest
            yield Finding(
                "overflow",
                str(site),
                f"The {tensor} reaches {largest:.3g}, and {quantizer.element.name} ends at {limit:.6g}: {scheme} makes "
                "infinities here.",
                {"scheme": scheme, "largest": largest, "limit": limit, "tensor": tensor},
                f"Take {mildest} here, or leave it as it is." if mildest else "Leave it as it is.",
                math.inf,
            )


def _beyond(observed: Observed, site: Site) -> Iterator[tuple[str, str, float, Quantizer]]:
    """Schemes that have no code for the largest of a tensor: scheme, tensor, its largest magnitude, quantizer."""
    weights = [float(w.abs().max()) for w in matrices(observed, site).values() if w.numel()]
    # What passes a table are indices.
    passed = None if site.place == "embedding" else observed.largest(site)
    values = 0.0 if passed is None else float(passed.max())
    for name in observed.menu(site):
        scheme = SCHEMES[name]
        pairs = (
            ("input" if weights else "values", scheme.activation, values),
            ("weight", scheme.weight, max(weights, default=0.0)),
        )
        for tensor, quantizer, largest in pairs:
            if quantizer is not None and _is_beyond(largest, quantizer):
                yield name, tensor, largest, quantizer


def _is_beyond(largest: float, quantizer: Quantizer) -> bool:
    element = quantizer.element
    if quantizer.per != "element" or element.kind != "float" or not math.isfinite(largest):
        return False
    # Nearest rounding gives the largest value up to half of its last place beyond.
    return largest >= element.largest + math.ldexp(1.0, element.max_exponent - element.precision)


def static_scales(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Static scales that one batch alone has set: without it, its values would have been clipped."""
    for site in observed.sites:
        if site.place == "embedding":
            continue
        for (name, part), seen in observed.statistics.items():
            if name != str(site):
                continue
            schemes = {name: SCHEMES[name] for name in observed.menu(site)}
            used = {name: each.queries if part == "queries" else each.activation for name, each in schemes.items()}
            static = [name for name, q in used.items() if q is not None and not q.dynamic and q.per != "element"]
            if not static or len(seen.tops) < 3 or seen.experts:
                continue
            second, first = torch.stack([each.amax() for each in seen.tops]).sort().values[-2:].tolist()
            if math.isfinite(first) and first > _OVERRUN * second > 0:
                yield Finding(
                    "static_scale",
                    name,
                    f"One batch of {len(seen.tops)} reaches {first / second:.1f} times the largest magnitude of all "
                    f"others{_of(part)}, so other data may exceed a static scale as far.",
                    {"largest": first, "others": second, "ratio": first / second, "schemes": static},
                    f"Calibrate on more text, or take dynamic scales instead of {' and '.join(static)}.",
                    max(predictor.alone(name, scheme) for scheme in static),
                )


def underflows(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Schemes whose error comes, by more than half, from values that are flushed to zero rather than rounded."""
    for site in linears(observed):
        rows, found = rows_of(observed, site), matrices(observed, site)
        if rows is None or not found:
            continue
        expert, weight = next(iter(found.items()))
        several, columns = groups.count(rows, weight), weight.shape[-1]
        energies = {
            "input": torch.unflatten(weight.square(), 0, (several, -1)).sum(1).flatten(),
            "weight": groups.folded(rows.square().mean(0), columns),
        }
        known: dict[object, tuple[float, float, float]] = {}
        worst: dict[str, tuple[float, float, float, str, Format]] = {}
        for scheme in observed.menu(site):
            for what, x in (("input", rows), ("weight", weight)):
                stored_of = observed.qparams.input if what == "input" else observed.qparams.weight
                stored = stored_of(owner(site), SCHEMES[scheme], weight, expert)
                if stored is None or stored.quantizer.element.kind != "float" or stored.quantizer.element.bits < 8:
                    continue
                key = what, stored.quantizer
                if key not in known:
                    known[key] = _flushed(stored, x, energies[what])
                if known[key][1] > 0.5 and (what not in worst or known[key][1] > worst[what][1]):
                    worst[what] = *known[key], scheme, stored.quantizer.element
        for what, (share, cost, span, scheme, element) in worst.items():
            held = math.log2(element.largest / element.smallest_subnormal)
            remedy, numbers = remedied(
                observed,
                site,
                scheme,
                ("fp8-block", "mxfp8"),
                "Take scales of groups",
                "Move the spread of the channels into the neighbouring weight, or leave this site as it is.",
            )
            yield Finding(
                "underflow",
                str(site),
                f"{share:.1%} of the {what}'s values fall below the smallest {element.name} of {scheme} and become "
                f"zero, which costs more than all its rounding: they span 2^{span:.0f}, the format 2^{held:.0f}.",
                {
                    "scheme": scheme,
                    "tensor": what,
                    "share": share,
                    "share_of_error": cost,
                    "range_bits": span,
                    "span_bits": held,
                    **numbers,
                },
                remedy,
                predictor.alone(str(site), scheme),
            )


def _flushed(stored: FakeQuantizer, x: torch.Tensor, energy: torch.Tensor) -> tuple[float, float, float]:
    """Share of values that become zero, their share of the squared error of the output, largest range in binades."""
    back = stored(x)
    gone = (back == 0) & (x != 0)
    error = (back - x).square().double() * energy.double()
    total = float(error.sum())
    if total == 0 or not math.isfinite(total):
        return 0.0, 0.0, 0.0
    laid, axes = grouped(x.abs(), stored.quantizer)
    least = torch.where(laid > 0, laid, torch.inf).amin(axes)
    ratio = (laid.amax(axes) / least).log2()
    span = float(ratio[ratio.isfinite()].max()) if bool(ratio.isfinite().any()) else 0.0
    return float(gone.double().mean()), float(error[gone].sum()) / total, span


def _of(part: str) -> str:
    return f" of the {part}" if part else ""
