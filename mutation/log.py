"""The log of an audit: results by line of code, merged over processes, as plain data for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from assay.mutation.locations import Location
from assay.mutation.words import PRECISION, SIZE, STRUCTURE
from assay.runtime.records import plain

FIRST = 4  # comparisons of a line are replayed; then the 8th, 16th, 32nd, ..., and the first of each test
EACH = 64  # comparisons of a line are replayed at most: a helper may compare 100,000 times
SECONDS = 2.0  # of CPU time for the replays of a line
_LISTS = ("silent", "bare", "errors", "missing")


@dataclass
class Site:
    """A line of code that compares, with the results of its replays."""

    file: str
    line: int
    text: str
    call: str
    runs: int = 0
    replays: int = 0
    seconds: float = 0.0
    passed: Counter[str] = field(default_factory=Counter)
    """By corruption, how many replays let it through,"""
    tried: Counter[str] = field(default_factory=Counter)
    """and in how many it changed anything."""
    gains: list[float] | None = None
    """The smallest common relative error noticed: in the best replay, and in the worst."""
    flags: Counter[str] = field(default_factory=Counter)
    """Remarks, and on how many of the comparisons that were examined."""
    unused: str | None = None
    """Why the answer of the comparison can't matter, where it can't."""
    tests: Counter[str] = field(default_factory=Counter)
    examined: int = 0

    def wants(self, test: str) -> bool:
        """Return whether the next comparison of this line should be replayed."""
        runs = self.runs + 1
        due = runs <= FIRST or runs & (runs - 1) == 0 or test not in self.tests
        return due and self.examined < EACH and self.seconds < SECONDS

    def never_noticed(self, names: Iterable[str]) -> list[str]:
        """Return the corruptions that every replay let through."""
        return [name for name in names if 0 < self.tried[name] == self.passed[name]]

    def sometimes_noticed(self, names: Iterable[str]) -> list[str]:
        """Return the corruptions that some replays let through and others did not."""
        return [name for name in names if 0 < self.passed[name] < self.tried[name]]

    @property
    def grade(self) -> str:
        """Return "unused", "blind", "coarse", "strict", or "unjudged" if nothing could be replayed."""
        if self.unused:
            return "unused"
        if not self.replays:
            return "unjudged"
        if self.never_noticed(STRUCTURE):
            return "blind"
        return "coarse" if self.never_noticed(SIZE) else "strict"

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return the sort key; the worst lines come first."""
        best = self.gains[0] if self.gains else 0.0
        return (
            not self.unused,
            -len(self.never_noticed(STRUCTURE)),
            -len(self.never_noticed(SIZE)),
            -len(self.sometimes_noticed(STRUCTURE)),
            -best,
            -len(self.never_noticed(PRECISION)),
            -self.runs,
            self.file,
            self.line,
        )

    def add(self, passed: dict[str, bool], gain: float | None) -> None:
        """Add the result of a replay."""
        self.replays += 1
        self.tried.update(passed.keys())
        self.passed.update(name for name, through in passed.items() if through)
        if gain is not None:
            self._widen(gain, gain)

    def _widen(self, best: float, worst: float) -> None:
        known = self.gains or (math.inf, 0.0)
        self.gains = [min(known[0], best), max(known[1], worst)]

    def merge(self, other: Site) -> None:
        """Add the results of another process for the same line."""
        for name in ("runs", "replays", "seconds", "examined"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("passed", "tried", "flags", "tests"):
            getattr(self, name).update(getattr(other, name))
        self.unused = self.unused or other.unused
        if other.gains:
            self._widen(*other.gains)


@dataclass
class AuditLog:
    """The results of one run."""

    sites: dict[tuple[str, int, str], Site] = field(default_factory=dict)
    tests: int = 0
    """Tests that passed,"""
    silent: list[str] = field(default_factory=list)
    """those among them that made no comparison that the audit sees,"""
    bare: list[str] = field(default_factory=list)
    """and those among these that hold no assertion of another kind either."""
    errors: list[str] = field(default_factory=list)
    """Errors of the audit itself."""
    missing: list[str] = field(default_factory=list)
    """Functions that were named to the audit, and never imported."""

    def site(self, index: Location, call: str) -> Site:
        """Return the record of a line, new if there is none."""
        key = (index.file, index.line, call)
        if key not in self.sites:
            self.sites[key] = Site(index.file, index.line, index.text, call)
        return self.sites[key]

    @property
    def ranked(self) -> list[Site]:
        """Return all lines, the worst first."""
        return sorted(self.sites.values(), key=lambda site: site.rank)

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for JSON and for the channel of an xdist worker."""
        sites = [plain(site) | {"grade": site.grade} for site in self.ranked]
        return {name: getattr(self, name) for name in ("tests", *_LISTS)} | {"sites": sites}

    def merge(self, data: dict[str, Any]) -> None:
        """Add `as_data` of another process."""
        self.tests += data["tests"]
        for name in _LISTS:
            getattr(self, name).extend(data[name])
        for item in data["sites"]:
            site = msgspec.convert(item, Site, strict=False, dec_hook=lambda kind, counts: kind(counts))
            known = self.sites.setdefault((site.file, site.line, site.call), site)
            if known is not site:
                known.merge(site)
