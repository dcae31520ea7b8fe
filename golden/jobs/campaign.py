"""Campaigns: a TOML file that says which goldens there shall be; docs/golden-jobs.md describes its form.

A campaign is a sequence of tasks, each found by its number. Whatever is wrong with a file is told in one line that
names file, place and mend.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

from assay.golden.errors import CampaignError
from assay.golden.jobs.entry import Entry, Task
from assay.golden.jobs.reader import entries


@dataclass(frozen=True)
class Campaign:
    """A sequence of tasks, and the text that says which.

    ``origin`` tells campaigns of one name apart: a digest of where the file lies, empty for a bundled one.
    """

    name: str
    text: str = field(repr=False)
    entries: tuple[Entry, ...] = field(repr=False)
    origin: str = ""

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(entry.count for entry in self.entries))

    def entry(self, place: int) -> int:
        """Which entry the task number ``place`` belongs to."""
        return bisect_right(self._ends, place)

    def task(self, place: int) -> Task:
        """The task number ``place``."""
        if not 0 <= place < self.count:
            raise IndexError(f"campaign {self.name} has {self.count} tasks; there is no number {place}")
        number = self.entry(place)
        return self.entries[number].task(place - (self._ends[number - 1] if number else 0))

    def effort(self, place: int) -> float:
        """About how many milliseconds the task number ``place`` takes."""
        return self.entries[self.entry(place)].effort

    def whole_effort(self, places: range) -> float:
        """The same for ``places`` together."""
        total, first = 0.0, 0
        for entry, last in zip(self.entries, self._ends, strict=True):
            total += entry.effort * max(0, min(last, places.stop) - max(first, places.start))
            first = last
        return total

    def __iter__(self) -> Iterator[Task]:
        return (entry.task(place) for entry in self.entries for place in range(entry.count))


def read_campaign(path: str | Path) -> Campaign:
    """The campaign of a file, named after it. Raises `CampaignError`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CampaignError(f"{path}: can't be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise CampaignError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")
    origin = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return replace(parse_campaign(text, name or "campaign", str(path)), origin=origin)


@lru_cache(maxsize=8)
def parse_campaign(text: str, name: str, label: str = "") -> Campaign:
    """The campaign of a text; ``label`` is what errors call it. Raises `CampaignError`."""
    label = label or f"campaign {name}"
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        line = found[2] if found else len(text.splitlines()) or 1
        what = f"{found[1]} at column {found[3]}" if found else str(error)
        raise CampaignError(f"{label}:{line}: no TOML ({what}); mend what stands there") from None
    return Campaign(name, text, tuple(entries(content, label)))
