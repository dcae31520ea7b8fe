"""The card of a fingerprint: traits with their evidence, as text, JSON and HTML, and the plot of error growth."""

import json
import math
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.runtime.files import write_text_atomically
from assay.verify.errors import SettingError
from assay.verify.fingerprint.error_growth import Growth
from assay.verify.report.html import environment

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP = 560, 260, 64, 36, 12  # pixels of the plot and its margins


def plot_of(growth: Growth) -> dict[str, Any]:
    """Return the template's data for an inline SVG plot of errors over lengths (log-log) with the fitted line."""
    known = [(n, error) for n, error in zip(growth.lengths, growth.errors, strict=True) if error > 0]
    ends = [(n, growth.factor * n**growth.exponent) for n in (known[0][0], known[-1][0])]
    sizes = [math.log10(error) for _, error in known + ends]
    low, high = math.floor(min(sizes)), math.ceil(max(sizes))
    high = max(high, low + 1)
    first, last = math.log2(known[0][0]), math.log2(known[-1][0])

    def across(n: float) -> float:
        return round(_LEFT + 12 + (math.log2(n) - first) / (last - first) * (_WIDTH - _LEFT - 36), 1)

    def down(error: float) -> float:
        return round(_TOP + (high - math.log10(error)) / (high - low) * (_HEIGHT - _TOP - _FOOT), 1)

    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "floor": _HEIGHT - _FOOT,
        "points": [(across(n), down(error)) for n, error in known],
        "fit": [(across(n), down(error)) for n, error in ends],
        "columns": [(across(n), n) for n, _ in known],
        "rows": [(down(10.0**power), f"1e{power}") for power in range(low, high + 1)],
    }


UNSEEN = "not observable"


@dataclass(frozen=True)
class Trait:
    """One property of a kernel: its ``value`` (`UNSEEN` if no result shows it), and the evidence or the reason."""

    name: str
    value: str
    how: str

    @property
    def is_seen(self) -> bool:
        """Return whether some result showed the trait."""
        return self.value != UNSEEN


@dataclass(frozen=True)
class Card:
    """The numerical properties of a kernel, as far as its results show them."""

    kernel: str
    spec: str
    dtype: str
    traits: tuple[Trait, ...]
    growth: Growth | None = None

    def __getitem__(self, name: str) -> str:
        """Return the value of a trait; raise `SettingError` for an unknown name."""
        for trait in self.traits:
            if trait.name == name:
                return trait.value
        raise SettingError(f"fingerprint: no trait {name!r}; the card has {', '.join(t.name for t in self.traits)}")

    def __str__(self) -> str:
        lines = [f"{self.kernel} as {self.spec} in {self.dtype}"]
        width = max((len(trait.name) for trait in self.traits), default=0)
        for trait in self.traits:
            lines.append(f"  {trait.name:{width}}  {trait.value}")
            lines += [" " * (width + 4) + line for line in textwrap.wrap(trait.how, 112 - 2 * width)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the card as JSON; also write it to ``path`` if given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the card as one self-contained HTML page and return its path."""
        plot = plot_of(self.growth) if self.growth is not None else None
        page = environment().get_template("fingerprint.html.j2").render(card=self, plot=plot)
        return write_text_atomically(path, page)
