"""Detectors of findings: overflow, underflow, static scales, outliers, what better scales can gain, sites without
effect."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.formats.format import Format
from assay.precision.advice.finding import Finding, at_stake, linears, matrices, ordered, owner, remedied, rows_of
from assay.precision.advice.routers import near_ties, unseen_experts
from assay.precision.observation import groups
from assay.precision.observation.observing import Observed
from assay.precision.observation.sites import Site
from assay.precision.prediction.backward import differentiate
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.perturbations import perturbations_of
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.quadratic_form import QuadraticForm
from assay.precision.schemes import SCHEMES, FakeQuantizer, Quantizer
from assay.precision.schemes.quantizer import grouped

_OVERRUN = 2.0  # Ratio of the two largest batches' magnitudes from which a static scale depends on one of them


def nonfinite(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield NaN and infinities in the model's own values. Masked scores are minus infinity and no fault."""
    for (name, part), seen in observed.statistics.items():
        if seen.nonfinite and not name.endswith(":scores"):
            yield Finding(
                "nonfinite",
                name,
                f"{seen.nonfinite} of the values{_of(part)} are NaN or infinite before anything is quantised.",
                {"count": seen.nonfinite, "rows": seen.valid_rows},
                "Mend the model first: no scale can be taken from such values.",
                math.inf,
            )


def overflows(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield values beyond the largest of a format that the menu offers without a scale."""
    for site in observed.sites:
        overflowing = list(_beyond(observed, site))
        if not overflowing:
            continue
        costs = {name: predictor.site_error(str(site), name) for name in observed.menu(site)}
        fit = [name for name in costs.keys() - {scheme for scheme, *_ in overflowing} if math.isfinite(costs[name])]
        mildest = min(sorted(fit), key=costs.__getitem__, default="")
        for scheme, tensor, largest, quantizer in overflowing:
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
    """Yield schemes with no code for a tensor's largest value: scheme, tensor, its largest magnitude, quantizer."""
    weights = [float(w.abs().max()) for w in matrices(observed, site).values() if w.numel()]
    # What passes a table are indices.
    passed = None if site.type == "embedding" else observed.largest(site)
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
    """Yield static scales that one batch alone determines: without it, its values would have been clipped."""
    for site in observed.sites:
        if site.type == "embedding":
            continue
        for (name, part), seen in observed.statistics.items():
            if name != str(site):
                continue
            schemes = {name: SCHEMES[name] for name in observed.menu(site)}
            used = {name: each.queries if part == "queries" else each.activation for name, each in schemes.items()}
            static = [name for name, q in used.items() if q is not None and not q.dynamic and q.per != "element"]
            if not static or len(seen.sequence_maxima) < 3 or seen.experts:
                continue
            second, first = torch.stack([each.amax() for each in seen.sequence_maxima]).sort().values[-2:].tolist()
            if math.isfinite(first) and first > _OVERRUN * second > 0:
                yield Finding(
                    "static_scale",
                    name,
                    f"One batch of {len(seen.sequence_maxima)} reaches {first / second:.1f} times the largest "
                    f"magnitude of all others{_of(part)}, so other data may exceed a static scale as far.",
                    {"largest": first, "others": second, "ratio": first / second, "schemes": static},
                    f"Calibrate on more text, or take dynamic scales instead of {' and '.join(static)}.",
                    max(predictor.site_error(name, scheme) for scheme in static),
                )


def underflows(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield schemes whose error comes mostly from values that are flushed to zero rather than rounded."""
    for site in linears(observed):
        rows, weights = rows_of(observed, site), matrices(observed, site)
        if rows is None or not weights:
            continue
        expert, weight = next(iter(weights.items()))
        several, columns = groups.count(rows, weight), weight.shape[-1]
        energies = {
            "input": torch.unflatten(weight.square(), 0, (several, -1)).sum(1).flatten(),
            "weight": groups.mean(rows.square().mean(0), columns),
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
                predictor.site_error(str(site), scheme),
            )


def _flushed(stored: FakeQuantizer, x: Tensor, energy: Tensor) -> tuple[float, float, float]:
    """Return the share of values that become zero, their share of the squared error of the output, and the largest
    range in binades."""
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


_FAR = 20.0  # Multiples of the median from which a channel, row or token is an outlier
_FEW = 0.05  # Share of channels or rows up to which they are outliers; of more, it is the others that are small
_NAMED = 8  # Outliers named in a sentence
_REMEDIES = {
    "input": (
        "w8a8",
        ("w8a8-smooth", "w8a8-hadamard"),
        "Balance the channels before storing",
        "Prefer schemes here that leave the input as it is, or give groups of its channels scales.",
    ),
    "row": (
        "fp8-tensor",
        ("fp8",),
        "Take a scale a row",
        "Keep a scale a row: one for the whole weight would spend its codes on that row.",
    ),
    "column": (
        "w8a16",
        ("w4a16-g128-awq", "w4a16-g32", "mxfp8"),
        "Take scales of groups along the row",
        "Prefer schemes with small groups along the row here.",
    ),
}
"""For each kind of outlier: the affected scheme, alternatives, the advice where one of them helps, and where none
does."""


def outlier_channels(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield outlier channels of inputs, once for linears that share an input, and of the keys of a cache."""
    reported: set[tuple[str, int]] = set()
    for site in observed.sites:
        part = "keys" if site.type == "kv_cache" else ""
        seen = observed.statistics.get((str(site), part))
        if site.type not in ("linear", "kv_cache") or seen is None or seen.largest is None:
            continue
        outliers = _far(seen.largest)
        source = observed.sources.get(observed.weight_site(site)) or site.unit
        if outliers is None or (source, outliers[0][0]) in reported:
            continue
        reported.add((source, outliers[0][0]))
        channels, ratio = outliers
        remedy, numbers = ("Leave this cache as it is, or give its keys scales per channel.", dict[str, Any]())
        if site.type == "linear":
            remedy, numbers = remedied(observed, site, *_REMEDIES["input"])
        yield Finding(
            "outlier_channel",
            str(site),
            f"{_listed(channels, 'channel', seen.largest.numel())} in the {part or 'input'} {_reach(channels)} "
            f"{ratio:.0f} times the median channel's largest magnitude.",
            {"channels": channels, "ratio": ratio, **numbers},
            remedy,
            at_stake(predictor, site),
        )


def rows_and_columns(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield outlier rows (output channels) and columns (input channels) of weights; of experts, the worst one's."""
    for site in linears(observed):
        for what, axis in (("row", -1), ("column", 0)):
            sizes = {expert: w.abs().amax(axis) for expert, w in matrices(observed, site).items()}
            outliers = [(far, expert) for expert, size in sizes.items() if (far := _far(size)) is not None]
            if not outliers:
                continue
            (indices, ratio), expert = max(outliers, key=lambda pair: pair[0][1])
            remedy, numbers = remedied(observed, site, *_REMEDIES[what])
            of = "" if expert is None else f" of expert {expert}"
            yield Finding(
                f"outlier_{what}",
                str(site),
                f"{_listed(indices, what, sizes[expert].numel())} in the weight{of} {_reach(indices)} {ratio:.0f} "
                f"times the median {what}'s largest magnitude.",
                {f"{what}s": indices, "ratio": ratio, **({} if expert is None else {"expert": expert}), **numbers},
                remedy,
                at_stake(predictor, site),
            )


def massive_tokens(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield the first position whose residual is far larger than that of the others, such as an attention sink."""
    first: Finding | None = None
    layers = 0
    for site in observed.sites:
        seen = observed.statistics.get((str(site), ""))
        if site.role != "residual" or seen is None or not seen.row_maxima:
            continue
        median = float(torch.cat([peaks.flatten() for peaks in seen.row_maxima]).median())
        longest = max(peaks.shape[1] for peaks in seen.row_maxima)
        largest = torch.stack([torch.nn.functional.pad(p.amax(0), (0, longest - p.shape[1])) for p in seen.row_maxima])
        sizes = largest.amax(0) / max(median, 1e-30)
        ratio, position = float(sizes.max()), int(sizes.argmax())
        if not ratio >= _FAR:
            continue
        layers += 1
        sequences = sum(int((p[:, position] > _FAR * median).sum()) for p in seen.row_maxima if p.shape[1] > position)
        first = first or Finding(
            "massive_token",
            str(site),
            f"The residual at position {position} reaches {ratio:.0f} times the median token's largest magnitude, in "
            f"{sequences} of {sum(p.shape[0] for p in seen.row_maxima)} sequences.",
            {"position": position, "ratio": ratio, "sequences": sequences},
            "Give activations scales per token, not one for the tensor, and leave the residual stream as it is.",
            at_stake(predictor, site),
        )
    if first is not None:
        first.numbers["layers"] = layers
        yield first


def _far(sizes: Tensor) -> tuple[list[int], float] | None:
    """Return the indices of outliers, largest first, and the ratio of the largest to the median."""
    median = float(sizes.median())
    if not median > 0 or not bool(sizes.isfinite().all()):
        return None
    indices = (sizes > _FAR * median).nonzero().flatten()
    if not 0 < len(indices) <= max(_FEW * len(sizes), 1):
        return None
    indices = indices[sizes[indices].argsort(descending=True)]
    return indices.tolist(), float(sizes.max()) / median


def _listed(indices: list[int], what: str, count: int) -> str:
    if len(indices) == 1:
        return f"{what.capitalize()} {indices[0]} of {count}"
    shown = ", ".join(map(str, indices[:_NAMED])) + (", ..." if len(indices) > _NAMED else "")
    return f"{what.capitalize()}s {shown} ({len(indices)} of {count})"


def _reach(indices: list[int]) -> str:
    return "reaches" if len(indices) == 1 else "reach up to"


_FAMILIES = (
    ("fp8-tensor", ("fp8", "fp8-block", "mxfp8")),
    ("fp8", ("fp8-block", "mxfp8")),
    ("w8a8", ("w8a8-smooth", "w8a8-hadamard", "w8a8-asym")),
    ("w8a8-static", ("w8a8",)),
    ("w4a16-g128", ("w4a16-g128-asym", "w4a16-g128-awq", "w4a16-g64", "w4a16-g32")),
    ("mxfp4", ("nvfp4", "nvfp4-hadamard")),
    ("w-mxfp4", ("w-nvfp4",)),
)
"""A scheme, and those of equally many bits that differ in granularity or in how scales are chosen."""
_REPAIRED = 4.0  # Ratio of squared errors from which another granularity is a repair
_LIFTED = 2.0  # Ratio of a scheme's squared error to that of a random change from which its scales are the cause
_DEAD = 1e-9  # Share of the median site's error below which a site has no effect


Control = Callable[[Mapping[str, tuple[str, ...]]], QuadraticForm]
"""From names of schemes, by the sites that hold weights, to the form for random changes as large as theirs."""


def random_control(
    model: torch.nn.Module,
    batches: Sequence[Any],
    predictor: Predictor,
    menus: Mapping[str, tuple[str, ...]],
    chain: Chain | None = None,
) -> QuadraticForm:
    """Return the form for normal random changes as large as those of the schemes in ``menus``, over all calibration
    data.

    menus: by the names of the sites that hold weights. chain: as in `differentiate`.
    """
    generator = torch.Generator().manual_seed(0)

    def random_change(stored: FakeQuantizer, x: Tensor) -> Tensor:
        size = (stored(x) - x).square().mean().sqrt()
        return size * torch.randn(x.shape, generator=generator).to(x)

    observed = replace(predictor.observed, menus=menus)
    products = differentiate(model, batches, predictor.metric, observed, change=random_change, chain=chain)
    return QuadraticForm(products)


def scaling(predictor: Predictor, control: Control) -> Iterator[Finding]:
    """Yield sites where other scales of equally many bits are a repair; and for the costliest other site of each
    family, whether better scales could help, or only more bits."""
    repaired = list(_granularities(predictor))
    yield from repaired
    yield from _bits_or_scales(predictor, control, {(finding.site, finding.numbers["scheme"]) for finding in repaired})


def _granularities(predictor: Predictor) -> Iterator[Finding]:
    observed = predictor.observed
    for base, others in _FAMILIES:
        squares = {
            site: _squares_of(predictor.form, site, base) for site in linears(observed) if base in observed.menu(site)
        }
        finite = [square for square in squares.values() if math.isfinite(square)]
        mean = sum(finite) / max(len(finite), 1)
        for site, before in squares.items():
            if before < mean or before == 0:  # what costs little needs no repair
                continue
            after = {name: _squares_of(predictor.form, site, name) for name in others if name in observed.menu(site)}
            best = min(after, key=after.__getitem__, default="")
            if not best or before < _REPAIRED * after[best]:
                continue
            ratio = before / max(after[best], 1e-300)
            yield Finding(
                "granularity",
                str(site),
                f"{base} is predicted to make {min(ratio, 1e9):.3g} times the squared error of {best} here.",
                {"scheme": base, "better": best, "ratio": ratio},
                f"Of the two, take {best}.",
                predictor.site_error(site, base),
            )


def _bits_or_scales(predictor: Predictor, control: Control, repaired: set[tuple[str, str]]) -> Iterator[Finding]:
    observed = predictor.observed
    menus: dict[Site, tuple[str, ...]] = {}
    for base, _ in _FAMILIES:
        costs = {site: predictor.site_error(site, base) for site in linears(observed) if base in observed.menu(site)}
        costs = {site: cost for site, cost in costs.items() if math.isfinite(cost) and cost > 0}
        if costs and ((worst := max(costs, key=costs.__getitem__)), base) not in repaired:
            menus[worst] = (*menus.get(worst, ()), base)
    if not menus:
        return
    forms = control({owner(site): bases for site, bases in menus.items()})
    for site, bases in menus.items():
        ratios = {
            base: _squares_of(predictor.form, site, base) / random
            for base in bases
            if (random := _squares_of(forms, site, base)) > 0
        }
        for kind in ("scales", "bits"):
            said = [base for base, ratio in ratios.items() if (ratio > _LIFTED) is (kind == "scales")]
            if not said:
                continue
            base = max(said, key=lambda name: predictor.site_error(site, name))
            yield Finding(
                kind,
                str(site),
                f"{base} costs most here, {ratios[base]:.2g} times the squared error of a random change as large: "
                + _meaning(ratios[base]),
                {"scheme": base, "ratio": ratios[base]},
                f"For {base} here, try groups, smoothing or a searched clip."
                if kind == "scales"
                else f"Where others have {base}, give this one more bits.",
                predictor.site_error(site, base),
            )


def _squares_of(form: QuadraticForm, site: Site, scheme: str) -> float:
    return form.of([(owner(site), part) for part in perturbations_of(SCHEMES[scheme])])


def _meaning(ratio: float) -> str:
    if ratio > _LIFTED:
        return "it sits where it hurts, and better scales can help."
    if ratio > 1 / _LIFTED:
        return "scales can gain little."
    return "it falls where the output sees little of it, and scales can gain little."


def dead(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield linears whose change, by any scheme, doesn't reach the compared output; also weights that are all zero.

    A pooler is one where hidden states are compared: its output is used elsewhere.
    """
    sites = [site for site in linears(observed) if observed.menu(site)]
    costs = {
        str(site): np.array([_squares_of(predictor.form, site, name) for name in observed.menu(site)]) for site in sites
    }
    schemes = {str(site): observed.menu(site) for site in sites}
    medians = {
        name: float(np.median([costs[site][menu.index(name)] for site, menu in schemes.items() if name in menu]))
        for name in {name for menu in schemes.values() for name in menu}
    }
    for site in sites:
        zero = all(float(weight.abs().max()) == 0 for weight in matrices(observed, site).values())
        limits = np.array([_DEAD * medians[name] for name in observed.menu(site)])
        if not zero and not (costs[str(site)] <= limits).all():
            continue
        yield Finding(
            "dead",
            str(site),
            "Its weight is all zero."
            if zero
            else f"No scheme here changes the output that is compared (metric {predictor.metric.name}): what this "
            "linear gives doesn't reach it.",
            {"parameters": site.parameters, "zero": zero},
            "Leave the layer out, or take the fewest bits; and ask whether this checkpoint is complete."
            if zero
            else "Any scheme will do for this output; where another one is used, audit with a loss of that one.",
        )


def no_gradient(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield sites that change the output though no gradient reaches them, or only zero."""
    reached = {name for name, _ in predictor.form.keys}
    for back, reason in (
        (False, "no gradient comes back to it, since what follows detaches, picks or defines none"),
        (True, "the gradient that comes back to it is zero, since what follows rounds, compares or saturates"),
    ):
        sites = [str(site) for site in observed.no_gradient if (str(site) in reached) == back]
        if not sites:
            continue
        more = f" and of {len(sites) - 1} more site{'s' * (len(sites) > 2)}" if len(sites) > 1 else ""
        yield Finding(
            "no_gradient",
            sites[0],
            f"No error of it{more} can be predicted: {reason}.",
            {"sites": sites},
            "It keeps its own format; for another audit what lies before that step by itself, with a loss of its own.",
        )


def tied(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield weights that two sites share."""
    for site in observed.sites:
        if site.tied:
            yield Finding(
                "tied",
                str(site),
                f"It holds the weight of {site.tied}: one scheme serves both, and its bytes count once.",
                {"owner": site.tied, "parameters": site.parameters},
                f"Choose for {site.tied}; exports that can't share a quantised weight store it twice.",
                at_stake(predictor, site.tied),
            )


_DETECTORS = (
    nonfinite,
    overflows,
    no_gradient,
    near_ties,
    unseen_experts,
    static_scales,
    underflows,
    outlier_channels,
    rows_and_columns,
    massive_tokens,
    dead,
    tied,
)


def findings(predictor: Predictor, control: Control) -> list[Finding]:
    """Return all findings: what breaks the model, what a prediction can't show, what costs most, and notes. ``control``
    is called at most once, for sites whose scales may be the cause."""
    results = [finding for detector in _DETECTORS for finding in detector(predictor, predictor.observed)]
    return ordered([*results, *scaling(predictor, control)])
