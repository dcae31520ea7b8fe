"""Names and numbers for readers and for JSON: layers by scheme, ranges, values that aren't finite."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.precision.observation.sites import layer_and_kind


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one kind with one scheme, "" for none."""

    kind: str
    scheme: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    place: str

    @property
    def weighty(self) -> bool:
        """Whether they hold a weight or a cache."""
        return self.place in ("linear", "embedding", "kv_cache")

    @property
    def where(self) -> str:
        """The kind and its layers: "mlp.down_proj, layers 0-3"."""
        if not self.layers:
            return self.kind
        return f"{self.kind}, layer{'s' * (len(self.layers) > 1)} {layers_of(self.layers)}"


def grouped(sites: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Return the sites (of audit.json) grouped by kind and scheme, kinds in the model's order, without tied sites."""
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for site in sites:
        if not site["tied"]:
            kinds.setdefault(layer_and_kind(site["unit"])[1], {}).setdefault(site["scheme"] or "", []).append(site)
    results = []
    for kind, schemes in kinds.items():
        for scheme, members in schemes.items():
            layers = {layer for site in members if (layer := layer_and_kind(site["unit"])[0]) is not None}
            names = tuple(site["name"] for site in members)
            results.append(Group(kind, scheme, tuple(sorted(layers)), names, members[0]["place"]))
    return results


def layers_of(layers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 sequence, 2,000 tokens."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def plain(value: Any) -> Any:
    """Return values for JSON, numbers with six digits: non-finite ones as strings, unmeasured ones as null."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def growth_words(result: Mapping[str, Any]) -> str:
    """Return the growth of the error over long sequences, with its interval if there is one.

    Also names the sequence length that predictions are calibrated for.
    """
    rests = "measured there; the intervals of predictions are for sequences as long as those chosen on"
    if not isinstance(result["growth"], float):
        last = f"the error at position {result['steps'][-1]['end']:,}"
        return f"{last} can't be compared with that at {result['base']:,}; {rests}"
    apart = result["apart"]
    between = f" ({apart['low']:.2g} to {apart['high']:.2g})" if apart else ""
    last = result["steps"][-1]["end"]
    grown = f"the error at position {last:,} is {result['growth']:.2g} times that at {result['base']:,}{between}"
    return f"{grown}; {rests}"
