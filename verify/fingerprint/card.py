"""The card that a fingerprint is: traits with what showed them, as text, JSON and HTML."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.verify.errors import SettingError
from assay.verify.statistics.growth import Growth
from assay.verify.verdict import write_whole

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
            lines += textwrap.wrap(
                trait.how, 116 - width, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 4)
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        content: dict[str, Any] = {"kernel": self.kernel, "spec": self.spec, "dtype": self.dtype}
        content["traits"] = [asdict(trait) for trait in self.traits]
        content["growth"] = asdict(self.growth) if self.growth is not None else None
        return content

    def to_json(self, path: str | Path | None = None) -> str:
        """The card as JSON, also written to ``path`` where given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_whole(path, text)
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the card as one HTML page, which needs nothing from a network, and return its path."""
        from assay.verify.fingerprint.page import card_page

        return write_whole(path, card_page(self))
