"""Findings of an audit, each with a remedy: their kinds and order, and the detectors that yield them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.precision.advice.routers import experts_of, flip_share, routers_of
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

_RANKS = (
    "nonfinite overflow",
    "no_gradient router_ties unseen_expert static_scale",
    "underflow outlier_channel outlier_row outlier_column massive_token granularity scales bits",
    "dead tied",
)
KINDS = {kind: rank for rank, kinds in enumerate(_RANKS) for kind in kinds.split()}
"""Kinds of findings and their rank: what breaks a model (0), what a prediction can't show (1), what costs (2), notes
(3)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about one site, with a remedy."""

    kind: str
    """Of `KINDS`."""
    site: str
    words: str
    """One sentence."""
    numbers: dict[str, Any]
    """The sentence's data by name: numbers, indices, names of schemes."""
    remedy: str
    """One sentence."""
    weight: float = 0.0
    """The predicted error at this site of the affected scheme, in the metric's unit."""

    def __str__(self) -> str:
        return f"{self.site}: {self.words} {self.remedy}"


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by rank of the kind, then by weight; equal ones keep their order."""
    return sorted(findings, key=lambda finding: (KINDS[finding.kind], -finding.weight))


def _linears(observed: Observed) -> list[Site]:
    """Return the sites of products, each weight once: a head whose weight is the embedding table counts, its table does
    not."""
    products = {str(site) for site in observed.sites if site.type == "linear"}
    return [site for site in observed.sites if site.type == "linear" and site.tied not in products]


def _owner(site: Site) -> str:
    """Return the name of the site that holds a site's scheme: the first use of the weight."""
    return site.tied or str(site)


def _rows_of(observed: Observed, site: str) -> Tensor | None:
    """Return the sample of a site's values [R, K]."""
    seen = observed.statistics.get((str(site), ""))
    return torch.cat(seen.rows) if seen is not None and seen.rows else None


def _matrices(observed: Observed, site: str) -> Mapping[int | None, Tensor]:
    """Return the weights [N, K] of a site by expert; {None: weight} without experts."""
    return observed.weights.get(str(site), {})


def _local_error(observed: Observed, site: Site, scheme: str) -> float | None:
    """Return the squared error of a linear's output over its square, on the sample of inputs; None for a scheme off the
    menu. Of experts the first that got tokens represents all."""
    rows, weights = _rows_of(observed, site), _matrices(observed, site)
    if rows is None or not weights or scheme not in observed.menu(site) or not bool(rows.isfinite().all()):
        return None
    expert, weight = next(iter(weights.items()))
    exact = groups.linear(rows, weight)
    size = float(exact.square().sum())
    stored = _product_of(observed, site, scheme, rows, weight, expert)
    return float((stored - exact).square().sum()) / size if size > 0 else None


def _product_of(
    observed: Observed, site: Site, scheme: str, rows: Tensor, weight: Tensor, expert: int | None = None
) -> Tensor:
    """Return a linear's output [R, N] for rows [R, K] of its input, or [R, G * K] of one in groups, under a scheme."""
    given = _owner(site), SCHEMES[scheme], weight, expert
    of_weight, of_input = observed.qparams.weight(*given), observed.qparams.input(*given)
    return groups.linear(
        rows if of_input is None else of_input(rows), weight if of_weight is None else of_weight(weight)
    )


def _at_stake(predictor: Predictor, site: str) -> float:
    """Return the largest finite error of an 8-bit scheme at this site, or of any scheme where the menu has none of 8
    bits."""
    menu = predictor.observed.menu(site)
    pairs = {name: (SCHEMES[name].weight, SCHEMES[name].activation) for name in menu}
    eight = [name for name, pair in pairs.items() if all(q is None or q.element.bits == 8 for q in pair)]
    costs = [predictor.site_error(site, name) for name in eight or menu]
    return max((cost for cost in costs if math.isfinite(cost)), default=0.0)


def _remedied(
    observed: Observed, site: Site, base: str, others: tuple[str, ...], advice: str, otherwise: str
) -> tuple[str, dict[str, Any]]:
    """Return a remedy, with local errors under the affected scheme and the best of others; ``otherwise`` where none of
    them halves the squared error, or the menu lacks them."""
    before = _local_error(observed, site, base)
    errors = {name: error for name in others if (error := _local_error(observed, site, name)) is not None}
    if before is None or not errors:
        return otherwise, {}
    best = min(errors, key=errors.__getitem__)
    numbers = {"suffers": base, "better": best, "error": before, "error_with_better": errors[best]}
    if errors[best] * 2 > before:
        return otherwise, numbers
    times = before / max(errors[best], 1e-30)
    return f"{advice}: {best} makes {times:.0f} times less squared error than {base}.", numbers


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
        weights = [float(w.abs().max()) for w in _matrices(observed, site).values() if w.numel()]
        # What passes a table are indices.
        passed = None if site.type == "embedding" else observed.largest(site)
        of_values = 0.0 if passed is None else float(passed.max())
        overflowing = [
            (scheme, tensor, largest, quantizer.element)
            for scheme in observed.menu(site)
            for tensor, quantizer, largest in (
                ("input" if weights else "values", SCHEMES[scheme].activation, of_values),
                ("weight", SCHEMES[scheme].weight, max(weights, default=0.0)),
            )
            if quantizer is not None and _is_beyond(largest, quantizer)
        ]
        if not overflowing:
            continue
        costs = {name: predictor.site_error(str(site), name) for name in observed.menu(site)}
        fit = [name for name in costs.keys() - {scheme for scheme, *_ in overflowing} if math.isfinite(costs[name])]
        mildest = min(sorted(fit), key=costs.__getitem__, default="")
        for scheme, tensor, largest, element in overflowing:
            yield Finding(
                "overflow",
                str(site),
                f"The {tensor} reaches {largest:.3g}, and {element.name} ends at {element.largest:.6g}: {scheme} makes "
                "infinities here.",
                {"scheme": scheme, "largest": largest, "limit": element.largest, "tensor": tensor},
                f"Take {mildest} here, or leave it as it is." if mildest else "Leave it as it is.",
                math.inf,
            )


def _is_beyond(largest: float, quantizer: Quantizer) -> bool:
    element = quantizer.element
    if quantizer.per != "element" or element.kind != "float" or not math.isfinite(largest):
        return False
    # Nearest rounding gives the largest value up to half of its last place beyond.
    return largest >= element.largest + math.ldexp(1.0, element.max_exponent - element.precision)


_OVERRUN = 2.0  # Ratio of the two largest batches' magnitudes from which a static scale depends on one of them


def static_scales(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield static scales that one batch alone determines: without it, its values would have been clipped."""
    for site in (site for site in observed.sites if site.type != "embedding"):
        schemes = {name: SCHEMES[name] for name in observed.menu(site)}
        for part, seen in ((part, seen) for (name, part), seen in observed.statistics.items() if name == str(site)):
            used = {name: each.queries if part == "queries" else each.activation for name, each in schemes.items()}
            static = [name for name, q in used.items() if q is not None and not q.dynamic and q.per != "element"]
            if not static or len(seen.sequence_maxima) < 3 or seen.experts:
                continue
            second, first = torch.stack([each.amax() for each in seen.sequence_maxima]).sort().values[-2:].tolist()
            if math.isfinite(first) and first > _OVERRUN * second > 0:
                yield Finding(
                    "static_scale",
                    str(site),
                    f"One batch of {len(seen.sequence_maxima)} reaches {first / second:.1f} times the largest "
                    f"magnitude of all others{_of(part)}, so other data may exceed a static scale as far.",
                    {"largest": first, "others": second, "ratio": first / second, "schemes": static},
                    f"Calibrate on more text, or take dynamic scales instead of {' and '.join(static)}.",
                    max(predictor.site_error(str(site), scheme) for scheme in static),
                )


def _of(part: str) -> str:
    return f" of the {part}" if part else ""


def underflows(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield schemes whose error comes mostly from values that are flushed to zero rather than rounded."""
    for site in _linears(observed):
        rows, weights = _rows_of(observed, site), _matrices(observed, site)
        if rows is None or not weights:
            continue
        expert, weight = next(iter(weights.items()))
        several, columns = groups.count(rows, weight), weight.shape[-1]
        of_input = torch.unflatten(weight.square(), 0, (several, -1)).sum(1).flatten()
        of_weight = groups.mean(rows.square().mean(0), columns)
        for what, x, energy, stored_of in (
            ("input", rows, of_input, observed.qparams.input),
            ("weight", weight, of_weight, observed.qparams.weight),
        ):
            known: dict[Quantizer, tuple[float, float, float]] = {}
            worst, scheme = (0.0, 0.5, 0.0), ""
            for name in observed.menu(site):
                stored = stored_of(_owner(site), SCHEMES[name], weight, expert)
                if stored is None or stored.quantizer.element.kind != "float" or stored.quantizer.element.bits < 8:
                    continue
                if stored.quantizer not in known:
                    known[stored.quantizer] = _flushed(stored, x, energy)
                if known[stored.quantizer][1] > worst[1]:
                    worst, scheme, element = known[stored.quantizer], name, stored.quantizer.element
            if not scheme:
                continue
            share, cost, span = worst
            held = math.log2(element.largest / element.smallest_subnormal)
            remedy, numbers = _remedied(
                observed,
                site,
                scheme,
                ("fp8-block", "mxfp8"),
                "Take scales of groups",
                "Move the spread of the channels into the neighbouring weight, or leave this site as it is.",
            )
            details = {"scheme": scheme, "tensor": what, "share": share, "share_of_error": cost}
            yield Finding(
                "underflow",
                str(site),
                f"{share:.1%} of the {what}'s values fall below the smallest {element.name} of {scheme} and become "
                f"zero, which costs more than all its rounding: they span 2^{span:.0f}, the format 2^{held:.0f}.",
                {**details, "range_bits": span, "span_bits": held, **numbers},
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


def outliers(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield outlier channels of inputs, once for linears that share an input, and of the keys of a cache; then outlier
    rows (output channels) and columns (input channels) of weights, of experts the worst one's."""
    reported: set[tuple[str, int]] = set()
    for site in observed.sites:
        part = "keys" if site.type == "kv_cache" else ""
        seen = observed.statistics.get((str(site), part))
        if site.type not in ("linear", "kv_cache") or seen is None or seen.largest is None:
            continue
        source = observed.sources.get(observed.weight_site(site)) or site.unit
        if (far := _far(seen.largest)) is None or (source, far[0][0]) in reported:
            continue
        reported.add((source, far[0][0]))
        remedy, numbers = ("Leave this cache as it is, or give its keys scales per channel.", dict[str, Any]())
        if site.type == "linear":
            remedy, numbers = _remedied(observed, site, *_REMEDIES["input"])
        yield _outlier(predictor, site, "channel", far, seen.largest.numel(), part or "input", remedy, numbers)
    for site in _linears(observed):
        for what, axis in (("row", -1), ("column", 0)):
            sizes = {expert: w.abs().amax(axis) for expert, w in _matrices(observed, site).items()}
            extremes = [(far, expert) for expert, size in sizes.items() if (far := _far(size)) is not None]
            if not extremes:
                continue
            far, expert = max(extremes, key=lambda pair: pair[0][1])
            remedy, numbers = _remedied(observed, site, *_REMEDIES[what])
            numbers = numbers if expert is None else {"expert": expert, **numbers}
            where = "weight" if expert is None else f"weight of expert {expert}"
            yield _outlier(predictor, site, what, far, sizes[expert].numel(), where, remedy, numbers)


def _outlier(
    predictor: Predictor,
    site: Site,
    what: str,
    far: tuple[list[int], float],
    count: int,
    where: str,
    remedy: str,
    numbers: dict[str, Any],
) -> Finding:
    indices, ratio = far
    words = f"{what.capitalize()} {indices[0]} of {count} in the {where} reaches"
    if len(indices) > 1:
        shown = ", ".join(map(str, indices[:_NAMED])) + (", ..." if len(indices) > _NAMED else "")
        words = f"{what.capitalize()}s {shown} ({len(indices)} of {count}) in the {where} reach up to"
    words += f" {ratio:.0f} times the median {what}'s largest magnitude."
    numbers = {f"{what}s": indices, "ratio": ratio, **numbers}
    return Finding(f"outlier_{what}", str(site), words, numbers, remedy, _at_stake(predictor, site))


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
            _at_stake(predictor, site),
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


_TIED_CHOICES = 0.02  # Share of tokens that rounding the router's own product to bfloat16 may reroute
_UNSEEN = 0.05  # Share of an even load below which an expert counts as unseen
_LEAST_TOKENS = 8  # Tokens below which an expert counts as unseen too, if an even load is more than twice that


def near_ties(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield routers whose choice is so close that rounding their own input and weight to bfloat16 changes it."""
    for router in routers_of(observed):
        rows, weights = _rows_of(observed, router.site), _matrices(observed, router.site)
        if rows is None or not weights:
            continue
        weight = weights[None]
        shares = {}
        for scheme in dict.fromkeys(("bf16", *observed.menu(router.site))):
            noise = _product_of(observed, router.site, scheme, rows, weight) - rows @ weight.mT
            # A margin is the difference of two logits; what is common to all of them changes nothing.
            deviation = math.sqrt(2) * float((noise - noise.mean(-1, keepdim=True)).square().mean().sqrt())
            shares[scheme] = flip_share(router.margins, deviation)
        if shares["bf16"] > _TIED_CHOICES:
            yield Finding(
                "router_ties",
                str(router.site),
                f"The choice of {router.top} experts is close to a tie for many tokens: rounding the router's input "
                f"and weight to bfloat16 sends {shares['bf16']:.1%} of them elsewhere.",
                {"flips": shares, "median_margin": float(router.margins.median()), "top": router.top},
                "Leave the router as it is and measure what you choose: no prediction sees a flip.",
                _at_stake(predictor, router.site),
            )


def unseen_experts(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield experts with almost no tokens: their scales are guesses, and their errors are missing from all sums."""
    for experts in experts_of(observed):
        even = sum(experts.loads) / max(len(experts.loads), 1)
        limit = max(_UNSEEN * even, _LEAST_TOKENS if even > 2 * _LEAST_TOKENS else 0)
        for expert, load in enumerate(experts.loads):
            if load < limit or not load:
                yield Finding(
                    "unseen_expert",
                    experts.name,
                    f"Expert {expert} got {load} of {sum(experts.loads)} calibration tokens, where an even load is "
                    f"{even:.0f}: its scales and errors are not known.",
                    {"expert": expert, "tokens": load, "even": even},
                    "Calibrate on text that reaches it, or keep the experts of this layer as they are.",
                    max(_at_stake(predictor, site) for site in experts.sites),
                )


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


def granularities(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield sites where other scales of equally many bits are a repair."""
    for base, others in _FAMILIES:
        squares = {
            site: _squares_of(predictor.form, site, base) for site in _linears(observed) if base in observed.menu(site)
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


def _bits_or_scales(
    predictor: Predictor, control: Callable[..., QuadraticForm], repaired: set[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield for the costliest site of each family, where not ``repaired``, whether better scales could help, or only
    more bits."""
    observed = predictor.observed
    menus: dict[Site, tuple[str, ...]] = {}
    for base, _ in _FAMILIES:
        costs = {site: predictor.site_error(site, base) for site in _linears(observed) if base in observed.menu(site)}
        costs = {site: cost for site, cost in costs.items() if math.isfinite(cost) and cost > 0}
        if costs and ((worst := max(costs, key=costs.__getitem__)), base) not in repaired:
            menus[worst] = (*menus.get(worst, ()), base)
    if not menus:
        return
    forms = control({_owner(site): bases for site, bases in menus.items()})
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
            if kind == "scales":
                meaning = "it sits where it hurts, and better scales can help."
                remedy = f"For {base} here, try groups, smoothing or a searched clip."
            else:
                hidden = not ratios[base] > 1 / _LIFTED
                meaning = f"{'it falls where the output sees little of it, and ' * hidden}scales can gain little."
                remedy = f"Where others have {base}, give this one more bits."
            words = f"{base} costs most here, {ratios[base]:.2g} times the squared error of a random change as large: "
            numbers, cost = {"scheme": base, "ratio": ratios[base]}, predictor.site_error(site, base)
            yield Finding(kind, str(site), words + meaning, numbers, remedy, cost)


def _squares_of(form: QuadraticForm, site: Site, scheme: str) -> float:
    return form.of([(_owner(site), part) for part in perturbations_of(SCHEMES[scheme])])


def dead(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Yield linears whose change, by any scheme, doesn't reach the compared output; also weights that are all zero.

    A pooler is one where hidden states are compared: its output is used elsewhere.
    """
    sites = [site for site in _linears(observed) if observed.menu(site)]
    costs = {site: {name: _squares_of(predictor.form, site, name) for name in observed.menu(site)} for site in sites}
    names = {name for menu in costs.values() for name in menu}
    medians = {name: float(np.median([menu[name] for menu in costs.values() if name in menu])) for name in names}
    for site in sites:
        zero = all(float(weight.abs().max()) == 0 for weight in _matrices(observed, site).values())
        if not zero and not all(cost <= _DEAD * medians[name] for name, cost in costs[site].items()):
            continue
        words, remedy = (
            f"No scheme here changes the output that is compared (metric {predictor.metric.name}): what this "
            "linear gives doesn't reach it.",
            "Any scheme will do for this output; where another one is used, audit with a loss of that one.",
        )
        if zero:
            words = "Its weight is all zero."
            remedy = "Leave the layer out, or take the fewest bits; and ask whether this checkpoint is complete."
        yield Finding("dead", str(site), words, {"parameters": site.parameters, "zero": zero}, remedy)


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
    for site in (site for site in observed.sites if site.tied):
        yield Finding(
            "tied",
            str(site),
            f"It holds the weight of {site.tied}: one scheme serves both, and its bytes count once.",
            {"owner": site.tied, "parameters": site.parameters},
            f"Choose for {site.tied}; exports that can't share a quantised weight store it twice.",
            _at_stake(predictor, site.tied),
        )


_DETECTORS = (
    nonfinite,
    overflows,
    no_gradient,
    near_ties,
    unseen_experts,
    static_scales,
    underflows,
    outliers,
    massive_tokens,
    dead,
    tied,
    granularities,
)


def findings(
    model: torch.nn.Module, batches: Sequence[Any], predictor: Predictor, chain: Chain | None = None
) -> list[Finding]:
    """Return all findings: what breaks the model, what no prediction shows, what costs most, and notes. A
    `random_control` runs at most once, for sites whose scales may be the cause."""
    results = [finding for detector in _DETECTORS for finding in detector(predictor, predictor.observed)]
    repaired = {(each.site, each.numbers["scheme"]) for each in results if each.kind == "granularity"}
    control = partial(random_control, model, batches, predictor, chain=chain)
    return ordered([*results, *_bits_or_scales(predictor, control, repaired)])
