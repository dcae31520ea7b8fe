"""Channels, rows and tokens that are far larger than the rest, and take the resolution of what shares a scale."""

from collections.abc import Iterator
from typing import Any

import torch

from assay.precision.advice.finding import Finding
from assay.precision.advice.local import at_stake, linears, matrices, remedied
from assay.precision.observation.observing import Observed
from assay.precision.prediction.predictor import Predictor

_FAR = 20.0
"""Multiples of the median from which on a channel, row or token is an outlier."""
_FEW = 0.05
"""Share of channels or rows up to which they are outliers; of more, it is the others that are small."""
_NAMED = 8
"""Outliers that a sentence names."""
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
"""Of outliers there: the scheme that suffers, others, the advice where one of them helps, and where none does."""


def channels(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Outlier channels of inputs, once for linears that share an input, and of the keys of a cache."""
    told: set[tuple[str, int]] = set()
    for site in observed.sites:
        part = "keys" if site.place == "kv_cache" else ""
        seen = observed.statistics.get((str(site), part))
        if site.place not in ("linear", "kv_cache") or seen is None or seen.largest is None:
            continue
        found = _far(seen.largest)
        given = observed.sources.get(observed.owner(site)) or site.unit
        if found is None or (given, found[0][0]) in told:
            continue
        told.add((given, found[0][0]))
        places, ratio = found
        remedy, numbers = ("Leave this cache as it is, or give its keys scales per channel.", dict[str, Any]())
        if site.place == "linear":
            remedy, numbers = remedied(observed, site, *_REMEDIES["input"])
        yield Finding(
            "outlier_channel",
            str(site),
            f"{_listed(places, 'channel', seen.largest.numel())} in the {part or 'input'} {_reach(places)} {ratio:.0f} "
            "times the median channel's largest magnitude.",
            {"channels": places, "ratio": ratio, **numbers},
            remedy,
            at_stake(predictor, site),
        )


def rows_and_columns(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Outlier rows (output channels) and columns (input channels) of weights; of experts, the worst one's."""
    for site in linears(observed):
        for what, axis in (("row", -1), ("column", 0)):
            sizes = {expert: w.abs().amax(axis) for expert, w in matrices(observed, site).items()}
            found = [(far, expert) for expert, size in sizes.items() if (far := _far(size)) is not None]
            if not found:
                continue
            (places, ratio), expert = max(found, key=lambda pair: pair[0][1])
            remedy, numbers = remedied(observed, site, *_REMEDIES[what])
            of = "" if expert is None else f" of expert {expert}"
            yield Finding(
                f"outlier_{what}",
                str(site),
                f"{_listed(places, what, sizes[expert].numel())} in the weight{of} {_reach(places)} {ratio:.0f} times "
                f"the median {what}'s largest magnitude.",
                {f"{what}s": places, "ratio": ratio, **({} if expert is None else {"expert": expert}), **numbers},
                remedy,
                at_stake(predictor, site),
            )


def tokens(predictor: Predictor, observed: Observed) -> Iterator[Finding]:
    """Positions whose residual is far larger than that of the others, as attention sinks have it: where they begin."""
    first: Finding | None = None
    layers = 0
    for site in observed.sites:
        seen = observed.statistics.get((str(site), ""))
        if site.role != "residual" or seen is None or not seen.peaks:
            continue
        median = float(torch.cat([peaks.flatten() for peaks in seen.peaks]).median())
        longest = max(peaks.shape[1] for peaks in seen.peaks)
        largest = torch.stack([torch.nn.functional.pad(p.amax(0), (0, longest - p.shape[1])) for p in seen.peaks])
        sizes = largest.amax(0) / max(median, 1e-30)
        ratio, position = float(sizes.max()), int(sizes.argmax())
        if not ratio >= _FAR:
            continue
        layers += 1
        sequences = sum(int((p[:, position] > _FAR * median).sum()) for p in seen.peaks if p.shape[1] > position)
        first = first or Finding(
            "massive_token",
            str(site),
            f"The residual at position {position} reaches {ratio:.0f} times the median token's largest magnitude, in "
            f"{sequences} of {sum(p.shape[0] for p in seen.peaks)} sequences.",
            {"position": position, "ratio": ratio, "sequences": sequences},
            "Give activations scales per token, not one for the tensor, and leave the residual stream as it is.",
            at_stake(predictor, site),
        )
    if first is not None:
        first.numbers["layers"] = layers
        yield first


def _far(sizes: torch.Tensor) -> tuple[list[int], float] | None:
    """Places of the outliers, largest first, and how many times the median the largest is."""
    median = float(sizes.median())
    if not median > 0 or not bool(sizes.isfinite().all()):
        return None
    places = (sizes > _FAR * median).nonzero().flatten()
    if not 0 < len(places) <= max(_FEW * len(sizes), 1):
        return None
    places = places[sizes[places].argsort(descending=True)]
    return places.tolist(), float(sizes.max()) / median


def _listed(places: list[int], what: str, count: int) -> str:
    if len(places) == 1:
        return f"{what.capitalize()} {places[0]} of {count}"
    shown = ", ".join(map(str, places[:_NAMED])) + (", ..." if len(places) > _NAMED else "")
    return f"{what.capitalize()}s {shown} ({len(places)} of {count})"


def _reach(places: list[int]) -> str:
    return "reaches" if len(places) == 1 else "reach up to"
