"""The verdict of an examination: its findings, and its report as text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from assay.runtime.files import write_text_atomically
from assay.runtime.records import plain
from assay.verify.cases.case import Case
from assay.verify.findings import Findings
from assay.verify.report.text import text_report

if TYPE_CHECKING:
    from assay.verify.power_report import PowerReport

_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True)
class Verdict(Findings):
    __doc__ = Findings.__doc__

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the verdict as JSON (schema: ``docs/report-schema.md``), and write it to ``path`` if given."""
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def to_html(self, path: str | Path, power: PowerReport | None = None) -> Path:
        """Write the report as one HTML page, with the ``power`` of the examination if given; return its path."""
        from assay.verify.report.html import verdict_page  # jinja2

        return write_text_atomically(path, verdict_page(self, power))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: the fields, the ``coverage``, the gravest ``failure`` and its ``repro`` line.

        Numbers that JSON lacks (NaN, infinities) are strings.
        """
        derived = {"coverage": float(self.coverage), "failure": self.failure, "repro": self.repro}
        return plain({**vars(self), **derived})

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Verdict:
        """Return the verdict of an `as_dict`, or of its JSON.

        Raises `msgspec.ValidationError`, `KeyError` or `ReproError` if it isn't one.
        """
        fields = {name: value for name, value in content.items() if name not in ("coverage", "failure", "repro")}
        fields["aspects"] = {name: _with_case(aspect) for name, aspect in content["aspects"].items()}
        return msgspec.convert(fields, Verdict, strict=False)

    def __str__(self) -> str:
        return text_report(self)


def _with_case(aspect: Mapping[str, Any]) -> dict[str, Any]:
    failure = aspect["failure"]
    return {**aspect, "failure": failure and {**failure, "case": Case.from_dict(failure["case"])}}


def joint_outcome(verdicts: Mapping[_Name, Verdict]) -> tuple[str, tuple[_Name, ...]]:
    """Return the joint outcome of several, and the names of the failing ones.

    It is FAIL if one is, else the first other than PASS and WARN, else WARN if one is.
    """
    failed = tuple(name for name, verdict in verdicts.items() if not verdict.passed)
    outcomes: list[str] = [verdict.outcome for verdict in verdicts.values()]
    first: list[str] = [outcome for outcome in outcomes if outcome not in ("WARN", "PASS")]
    return next((each for each in ("FAIL", *first, "WARN") if each in outcomes), "PASS"), failed
