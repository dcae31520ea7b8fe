"""The card of a fingerprint: traits with their evidence, as text, JSON and HTML, and the plot of error growth."""

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.charts import STYLE, Axis, Chart, Series, drawn
from assay.runtime.files import write_text_atomically
from assay.verify.errors import SettingError
from assay.verify.fingerprint.error_growth import Growth
from assay.verify.report.html import environment

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
        plot = drawn(_chart_of(self.growth), "growth") if self.growth is not None else None
        page = environment().get_template("fingerprint.html.j2").render(card=self, plot=plot, chart_style=STYLE)
        return write_text_atomically(path, page)


def _chart_of(growth: Growth) -> Chart:
    """Return the chart of errors over lengths, both logarithmic, with the fitted line."""
    known = [(n, error) for n, error in zip(growth.lengths, growth.errors, strict=True) if error > 0]
    lengths, errors = zip(*known, strict=True)
    ends = (lengths[0], lengths[-1])
    fit = [growth.factor * n**growth.exponent for n in ends]
    return Chart(
        f"relative error over {growth.symbol}",
        Axis(growth.symbol, log=True, ticks=[(n, str(n)) for n in lengths]),
        Axis("relative error", log=True),
        [
            Series("measured", lengths, errors, [f"{growth.symbol} = {n}: {error:.3g}" for n, error in known]),
            Series("fit", ends, fit, mark="", line="dotted", tone="soft"),
        ],
        height=220,
        legend=False,
    )
