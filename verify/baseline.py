"""A baseline: the findings that a team knows of, each with a reason and an expiry, in a TOML file under its care.

A required check then fails for new findings alone, and for a known one from the day after its expiry on::

    [[finding]]
    target = "my.kernels:softmax"
    spec = "softmax"
    dtype = "bfloat16"       # "" or left out: in any
    aspect = "special"       # or the outcome, e.g. "inconclusive"
    cause = "nan_swallowed"  # of the report's first explanation; "" or left out: whatever the cause
    reason = "#123: NaN is masked upstream"
    expires = 2027-01-31
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from assay.runtime.errors import AssayError
from assay.runtime.files import locked, read_text, write_text_atomically
from assay.runtime.records import from_toml
from assay.verify.findings import GRAVITY, OUTCOMES, Findings

Date: TypeAlias = datetime.date

_ASPECTS = {*GRAVITY, *(outcome.lower() for outcome in OUTCOMES if outcome not in ("PASS", "WARN", "FAIL"))}
_HEAD = re.compile(r"^[ \t]*\[\[[ \t]*finding[ \t]*\]\]", re.M)


class BaselineError(AssayError, ValueError):
    """A baseline that can't be read or changed."""


@dataclass(frozen=True)
class Finding:
    """What a verdict found: a kernel's ``aspect``, with the name of its ``cause`` if one explains it."""

    target: str
    spec: str
    dtype: str
    aspect: str
    cause: str = ""

    def __str__(self) -> str:
        cause = f", {self.cause}" if self.cause else ""
        return f"{self.target} as {self.spec} in {self.dtype or 'any dtype'}: {self.aspect}{cause}"


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known finding, one table of the file; it counts until ``expires``, that day included."""

    target: str
    aspect: str
    reason: str
    expires: Date
    spec: str = ""
    dtype: str = ""
    cause: str = ""

    def matches(self, finding: Finding) -> bool:
        """Return whether it is this finding; what is empty, here or there, may be anything."""
        return (self.target, self.aspect) == (finding.target, finding.aspect) and all(
            own == other or not own or not other
            for own, other in ((self.spec, finding.spec), (self.dtype, finding.dtype), (self.cause, finding.cause))
        )

    def has_expired(self, today: Date) -> bool:
        """Return whether its last day is over."""
        return self.expires < today

    def as_finding(self) -> Finding:
        """Return the finding without reason and expiry."""
        return Finding(self.target, self.spec, self.dtype, self.aspect, self.cause)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    finding: list[Known] = []


@dataclass(frozen=True)
class Comparison:
    """The findings of a verdict beside a baseline: ``known`` ones, ``expired`` ones, and ``new`` ones."""

    known: tuple[tuple[Finding, Known], ...] = ()
    expired: tuple[tuple[Finding, Known], ...] = ()
    new: tuple[Finding, ...] = ()

    @property
    def accepts(self) -> bool:
        """Whether there are findings, and all of them are known."""
        return bool(self.known) and not self.expired and not self.new

    @property
    def words(self) -> str:
        """What is known, expired and new, in one line."""
        parts = [f"{finding.aspect} is known until {known.expires}: {known.reason}" for finding, known in self.known]
        parts += [
            f"{finding.aspect} was known until {known.expires}: {known.reason}" for finding, known in self.expired
        ]
        parts += [f"{finding.aspect}{finding.cause and f' ({finding.cause})'} is new" for finding in self.new]
        return "; ".join(parts)


def findings_of(verdict: Findings) -> list[Finding]:
    """Return what a verdict found: its broken and suspect aspects, or else an outcome without a verdict.

    An aspect that the fault of a graver one broke too isn't a finding of its own.
    """
    target = verdict.target or verdict.kernel

    def finding(aspect: str, cause: str = "") -> Finding:
        return Finding(target, verdict.spec, verdict.dtype, aspect, cause)

    own = [(name, aspect) for name, aspect in verdict.violated.items() if not aspect.note]
    findings = [finding(name, next((each.name for each in aspect.explanations), "")) for name, aspect in own]
    return findings if verdict.outcome in ("PASS", "WARN", "FAIL") else [finding(verdict.outcome.lower()), *findings]


def read_baseline(path: str | Path) -> list[Known]:
    """Return the known findings of a file, in its order. Raises `BaselineError`."""
    text = read_text(path, BaselineError, "make one with assay baseline add")
    try:
        known = msgspec.convert(from_toml(text, str(path), BaselineError), _File).finding
    except msgspec.ValidationError as error:
        expected = "expected [[finding]] tables with target, aspect, reason and expires"
        raise BaselineError(f"{path}: {error}; {expected}, and perhaps spec, dtype, cause") from None
    for entry in known:
        if entry.aspect not in _ASPECTS:
            raise BaselineError(f"{path}: aspect {entry.aspect!r}; expected one of {', '.join(sorted(_ASPECTS))}")
        if not entry.reason.strip():
            raise BaselineError(f"{path}: {entry.target}: reason is empty; say why this is left as it is")
    return known


def compared(verdict: Findings, known: Iterable[Known], today: Date) -> Comparison:
    """Compare what a verdict found with a baseline; of several entries that fit, the one that expires last counts."""
    entries = sorted(known, key=lambda entry: entry.expires, reverse=True)
    kept: list[tuple[Finding, Known]] = []
    expired: list[tuple[Finding, Known]] = []
    new: list[Finding] = []
    for finding in findings_of(verdict):
        entry = next((entry for entry in entries if entry.matches(finding)), None)
        if entry is None:
            new.append(finding)
        else:
            (expired if entry.has_expired(today) else kept).append((finding, entry))
    return Comparison(tuple(kept), tuple(expired), tuple(new))


def unseen(known: Iterable[Known], verdicts: Sequence[Findings]) -> list[Known]:
    """Return the entries about kernels that were examined, as this op and in this dtype, and didn't show them."""
    examined = [(verdict.target or verdict.kernel, verdict.spec, verdict.dtype) for verdict in verdicts]
    findings = [finding for verdict in verdicts for finding in findings_of(verdict)]
    return [
        entry
        for entry in known
        if any(
            entry.target == target and entry.spec in ("", spec) and entry.dtype in ("", dtype)
            for target, spec, dtype in examined
        )
        and not any(map(entry.matches, findings))
    ]


def add(path: Path, findings: Iterable[Finding], reason: str, expires: Date) -> list[Known]:
    """Append findings that the file hasn't got; return what it has more. Raises `BaselineError` and `OSError`.

    An entry of the same finding that has another reason or expiry is replaced. The rest of the file stays as it is.
    """
    added = [
        Known(one.target, one.aspect, reason, expires, one.spec, one.dtype, one.cause)
        for one in dict.fromkeys(findings)
    ]
    if not added:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with locked(path):
        old = {entry.as_finding(): entry for entry in read_baseline(path)}
        changed = [entry for entry in added if old.get(entry.as_finding()) != entry]
        text = _without(path, {entry.as_finding() for entry in changed})
        blocks = [_as_toml(entry) for entry in changed]
        write_text_atomically(path, "\n".join([*([text.rstrip("\n") + "\n"] if text.strip() else []), *blocks]))
    return changed


def remove(path: Path, entries: Iterable[Known]) -> None:
    """Remove entries from a file; what else is in it stays, comments too. Raises `BaselineError` and `OSError`."""
    with locked(path):
        write_text_atomically(path, _without(path, {entry.as_finding() for entry in entries}))


def _without(path: Path, gone: set[Finding]) -> str:
    """Return the file's text without the tables of these findings."""
    text, known = path.read_text(encoding="utf-8"), read_baseline(path)
    starts = [match.start() for match in _HEAD.finditer(text)]
    if len(starts) != len(known):  # a text of several lines has such a head, or the list is written inline
        raise BaselineError(f"{path}: expected each finding as a table of its own, under a line [[finding]]")
    parts = zip(known, starts, [*starts, len(text)][1:], strict=True)
    kept = "".join(text[start:end] for entry, start, end in parts if entry.as_finding() not in gone)
    return (text[: starts[0]] if starts else text) + kept


def _as_toml(entry: Known) -> str:
    """Return a table; JSON's strings are TOML's, but for DEL, which TOML wants escaped."""
    values = {name: getattr(entry, name) for name in ("target", "spec", "dtype", "aspect", "cause", "reason")}
    written = [(name, json.dumps(value, ensure_ascii=False)) for name, value in values.items()]
    lines = [f"{name} = {text}" for name, text in written if text != '""' or name in ("target", "aspect", "reason")]
    return "\n".join(["[[finding]]", *lines, f"expires = {entry.expires.isoformat()}", ""]).replace("\x7f", "\\u007f")


def verdict_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield verdicts' JSON files: those named, and of folders all that are named so. Raises `BaselineError`."""
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.glob("*.json") if not file.name.endswith(".power.json"))
            if not files:
                raise BaselineError(f"{path}: no reports; expected a folder of pytest --assay-report or verify --out")
            yield from files
        else:
            yield path
