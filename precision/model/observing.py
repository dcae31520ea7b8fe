"""What one forward pass over the calibration data shows: sites, their menus, what passes them, reference outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.precision.errors import BadModel, NoData, UnknownOption
from assay.precision.metrics import Metric
from assay.precision.model.menu import Fits, menu_of
from assay.precision.model.opening import opened
from assay.precision.model.running import call, mapping, settled
from assay.precision.model.sites import Collector, Seen, Site
from assay.precision.model.streaming import Weights, streamed_parameters
from assay.precision.schemes import SCHEMES

__all__ = ["Observed", "observe"]

_SAME = 1e-3
"""Relative difference of outputs that summation in another order may make."""

_KEPT = 256 << 20
"""Bytes of reference outputs that are kept rather than computed again for every measurement."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A model as the calibration data runs through it."""

    sites: tuple[Site, ...]
    """Those with a menu."""
    menus: dict[str, tuple[str, ...]]
    tied: dict[str, str]
    """Names of sites to that of the site that holds the same weight."""
    cast: tuple[str, ...]
    """Names of the sites, with a menu or not, that a model in bfloat16 rounds at."""
    sources: dict[str, str]
    """Names of sites to that of the site whose values they are given as they are; of all sites, with a menu or not."""
    seen: dict[tuple[str, str], Seen]
    weights: dict[str, Weights]
    fits: Fits
    references: list[torch.Tensor] | None
    """The outputs that are compared, one a batch; None: too large to be kept."""
    weight: float
    """What the metric's sums are divided by."""
    every: tuple[Site, ...]
    """All sites, with a menu or not."""


def observe(
    model: torch.nn.Module, batches: Sequence[Any], metric: Metric, formats: Sequence[str], done: Callable[[int], None]
) -> Observed:
    """Run the model once over the batches; ``done`` is told how many are.

    Raises BadModel for outputs that aren't finite and for a model without linears, NoData where the metric compares
    nothing, UnknownOption where no format may stand at any site.
    """
    collector = Collector(model)
    references: list[torch.Tensor] = []
    size, weight = 0, 0.0
    for index, batch in enumerate(batches):
        with torch.no_grad(), settled(model), opened(model, collector):
            outputs = call(model, batch)
        reference = metric.output(outputs, mapping(batch)).detach()
        if not index:
            _check(model, batch, metric, reference)
        weight += metric.weight(reference, mapping(batch))
        if not bool(metric.compared(reference, mapping(batch)).isfinite().all()):
            raise BadModel(f"expected finite outputs, got NaN or infinities for batch {index}: check model and inputs")
        size += reference.numel() * reference.element_size()
        if size <= _KEPT:
            references.append(reference)
        done(index + 1)
    if not weight > 0:
        raise NoData(
            f"expected outputs to compare, got none but padding or zeros ({metric.name}): check attention_mask"
        )
    if not any(site.place == "linear" for site in collector.sites.values()):
        raise BadModel("expected a model with linear layers, got one that runs none: is it the right module?")
    sites = collector.sites
    tied = {name: site.tied for name, site in sites.items() if site.tied}
    menus = {name: menu_of(site, formats) for name, site in sites.items()}
    for name, owner in tied.items():  # a table that a linear shares takes what the linear may take
        linear = [each for each in (name, owner) if sites[each].place == "linear"]
        menus[name] = menus[owner] = menus[linear[0] if linear else name]
        collector.seen.setdefault((owner, ""), collector.seen.get((name, ""), Seen()))
    menus = {name: menu for name, menu in menus.items() if menu}
    if not menus:
        raise UnknownOption(f"expected formats for sites of this model, got {', '.join(formats) or 'none'}")
    return Observed(
        tuple(sites[name] for name in menus),
        menus,
        tied,
        tuple(name for name, site in sites.items() if not site.tied and site.place in SCHEMES["bf16"].places),
        {tied.get(name, name): site.source for name, site in sites.items() if site.source},
        collector.seen,
        collector.weights,
        Fits(
            collector.seen,
            collector.weights,
            collector.together(),
            collector.fused(),
            keep=not streamed_parameters(model),
        ),
        references if size <= _KEPT else None,
        weight,
        tuple(sites.values()),
    )


def _check(model: torch.nn.Module, batch: Any, metric: Metric, reference: torch.Tensor) -> None:
    """Raise BadModel where the model by itself gives other outputs than opened."""
    with torch.no_grad(), settled(model, opened=False):
        own = metric.output(call(model, batch), mapping(batch))
    own, seen = (metric.compared(each, mapping(batch)).double() for each in (own, reference))
    off = float((seen - own).norm() / own.norm().clamp(min=1e-300))
    if off > _SAME:
        raise BadModel(
            f"expected the same outputs at every call, got other ones by {off:.1%}: "
            "take out dropout, noise and state that forward keeps, or set attn_implementation='eager'"
        )
