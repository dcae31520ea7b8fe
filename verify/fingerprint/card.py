"""The card that a fingerprint is: traits with what showed them, as text, JSON and HTML."""

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.runtime.files import write_text_atomically
from assay.verify.errors import SettingError
from assay.verify.fingerprint.error_growth import Growth
from assay.verify.fingerprint.growth_plot import plot_of
from assay.verify.report.html import environment

UNSEEN = "not observable"


@dataclass(frozen=True)
class Trait:
    """One property of a kernel: its ``value`` (`UNSEEN` where no result shows it), and how it was seen, or why not."""

    name: str
    value: str
    how: str

    @property
    def is_seen(self) -> bool:
        """Whether some result showed it."""
        return self.value != UNSEEN


@dataclass(frozen=True)
class Card:
    """What a kernel does inside, as far as its results show it."""

    kernel: str
    spec: str
    dtype: str
    traits: tuple[Trait, ...]
    growth: Growth | None = None

    def __getitem__(self, name: str) -> str:
        """The value of a trait; `SettingError` for a name that the card has not."""
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
        """Plain data."""
        return asdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The card as JSON, also written to ``path`` where given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the card as one HTML page, which needs nothing from a network, and return its path."""
        plot = plot_of(self.growth) if self.growth is not None else None
        page = environment().get_template("fingerprint.html.j2").render(card=self, plot=plot)
        return write_text_atomically(path, page)
