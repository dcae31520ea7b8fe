"""Names and numbers as readers and JSON take them: which layers take what, what isn't finite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Group", "Place", "counted", "grouped", "layers_of", "place_of", "plain"]

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:[.:]|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a site or a unit stands: the number of its layer, None outside of the stack, and what it is there."""

    layer: int | None
    kind: str


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one kind that take one scheme, "" for none."""

    kind: str
    scheme: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]

    @property
    def where(self) -> str:
        """The kind and its layers: "mlp.down_proj, layers 0-3"."""
        if not self.layers:
            return self.kind
        return f"{self.kind}, layer{'s' * (len(self.layers) > 1)} {layers_of(self.layers)}"


def place_of(name: str) -> Place:
    """The place that a name says: "model.layers.3.mlp.up_proj" is "mlp.up_proj" of layer 3."""
    found = _LAYER.search(name)
    if found is None:
        return Place(None, name)
    return Place(int(found[1]), name[found.end() :] or name[: found.start()] or "layer")


def grouped(sites: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Sites (of audit.json) by kind and scheme, kinds in the order of the model; tied ones are left out."""
    kinds: dict[str, dict[str, dict[str, int | None]]] = {}
    for site in sites:
        if not site["tied"]:
            place = place_of(site["unit"])
            kinds.setdefault(place.kind, {}).setdefault(site["scheme"] or "", {})[site["name"]] = place.layer
    return [
        Group(kind, scheme, tuple(sorted({layer for layer in members.values() if layer is not None})), tuple(members))
        for kind, schemes in kinds.items()
        for scheme, members in schemes.items()
    ]


def layers_of(layers: Sequence[int]) -> str:
    """Sorted numbers as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(count: int, noun: str) -> str:
    """A number of things: 1 sequence, 2,000 tokens."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def plain(value: float) -> float | str | None:
    """A number as JSON has it, to six digits: what isn't finite is its name, and what wasn't measured is null."""
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
