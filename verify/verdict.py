"""The verdict of an examination, and its report as text and JSON."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.verify.picture import ErrorMap
from assay.verify.result import Failure
from assay.verify.sample import Sample

if TYPE_CHECKING:
    from assay.verify.power import PowerReport

OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE", "MISTRUSTED", "VACUOUS", "REFUSED")


_PLAIN = [
    "outcome",
    "kernel",
    "spec",
    "dtype",
    "contract",
    "cases",
    "phases",
    "elements",
    "unjudged",
    "unresolved",
    "seconds",
    "seed",
    "note",
    "repro",
]


@dataclass(frozen=True)
class Explanation:
    """A known fault that accounts for what was seen; ``ratio`` is how close the output comes to it."""

    name: str
    description: str
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """What an examination found.

    ``outcome``: PASS; FAIL, with a ``failure``; INCONCLUSIVE, where goldens didn't resolve; MISTRUSTED, where almost
    only zeros were compared; VACUOUS, where the check would have let anything through, or nothing was decided;
    REFUSED, where the contract says nothing about what was asked. ``cases`` were decided; ``worst`` is the largest
    |kernel - golden| / radius. ``detectable`` is the smallest relative error, common to a whole output, that the check
    would have noticed. ``note`` says why an outcome is neither PASS nor FAIL.

    ``histogram`` counts the judged elements by ratio, in the bins of `assay.verify.picture.EDGES`. Of a failure that is
    a matter of numbers, ``map`` shows where the first wrong output is wrong, before shrinking, and ``sample`` the
    numbers of the shrunk case.
    """

    outcome: str
    kernel: str
    spec: str
    dtype: str
    contract: str
    cases: int = 0
    worst: float = 0.0
    failure: Failure | None = None
    explanations: tuple[Explanation, ...] = ()
    phases: dict[str, int] = field(default_factory=dict)
    elements: int = 0
    unjudged: int = 0
    unresolved: int = 0
    histogram: tuple[int, ...] = ()
    map: ErrorMap | None = None
    sample: Sample | None = None
    detectable: float = math.inf
    seconds: float = 0.0
    seed: int = 0
    note: str = ""
    repro: str = ""

    @property
    def passed(self) -> bool:
        """Whether the outcome is PASS."""
        return self.outcome == "PASS"

    def to_json(self, path: str | Path | None = None) -> str:
        """The verdict as JSON (schema: ``docs/report-schema.md``), also written to ``path`` where given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_whole(path, text)
        return text

    def to_html(self, path: str | Path, power: PowerReport | None = None) -> Path:
        """Write the report as one HTML page, with the ``power`` of the examination where given; return its path."""
        from assay.verify.report import verdict_page

        return write_whole(path, verdict_page(self, power))

    def as_dict(self) -> dict[str, Any]:
        """Plain data: numbers that JSON lacks (NaN, infinities) are strings."""
        content = {name: getattr(self, name) for name in _PLAIN}
        content |= {"worst": plain(self.worst), "detectable": plain(self.detectable)}
        content["explanations"] = [vars(explanation) for explanation in self.explanations]
        content["failure"] = failure_dict(self.failure) if self.failure else None
        content["histogram"] = list(self.histogram)
        content["map"] = _data(self.map)
        content["sample"] = _data(self.sample)
        return content

    def __str__(self) -> str:
        return text_report(self)


def failure_dict(failure: Failure) -> dict[str, Any]:
    """A failure as plain data."""
    content = {name: plain(getattr(failure, name)) for name in ("got", "golden", "radius", "ratio")}
    content |= {name: getattr(failure, name) for name in ("kind", "message", "output", "violations", "elements")}
    return content | {"index": list(failure.index), "case": json.loads(failure.case.line())}


def _data(value: Any) -> Any:
    """Dataclasses, tuples and numbers as plain data."""
    if is_dataclass(value):
        return {part.name: _data(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, tuple):
        return [_data(part) for part in value]
    return plain(value) if isinstance(value, float) else value


def plain(value: float | None) -> float | str | None:
    """The number, or its name where JSON has none for it."""
    return value if value is None or math.isfinite(value) else str(value)


def write_whole(path: str | Path, text: str) -> Path:
    """Write a file by way of a temporary neighbour, so that it is never half-written."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        return Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def where(errors: ErrorMap) -> str:
    """Where the first output that was wrong is wrong, in words."""
    return f"first met in {errors.output}[{', '.join(map(str, errors.shape))}]: {errors.words}"


def text_report(verdict: Verdict) -> str:
    """The report that a terminal shows."""
    lines = [f"{verdict.outcome}  {verdict.kernel} as {verdict.spec} in {verdict.dtype}"]
    lines.append(f"  contract    {verdict.contract}")
    lines.append(f"  cases       {verdict.cases} decided, {verdict.elements} elements, worst ratio {verdict.worst:.3g}")
    if verdict.unjudged:
        lines.append(
            f"  not judged  {verdict.unjudged} elements (a kernel may overflow there, or the contract is open)"
        )
    if math.isfinite(verdict.detectable):
        lines.append(f"  detectable  a relative error of {verdict.detectable:.2g} in a whole output")
    if verdict.note:
        lines.append(f"  why         {verdict.note}")
    failure = verdict.failure
    if failure is not None:
        lines.append(f"  failure     {failure.kind}: {failure.message}")
        if verdict.map is not None:
            lines.append(f"  where       {where(verdict.map)}")
        lines.append(f"  case        {failure.case}")
        if failure.got is not None and failure.golden is not None:
            place = f"{failure.output}{list(failure.index)}"
            lines.append(f"  worst at    {place}: got {failure.got:.9g}, golden {failure.golden:.9g}")
            if failure.radius is not None and failure.ratio is not None:
                off = abs(failure.got - failure.golden)
                beyond = f"{failure.ratio:.4g} times the radius"
                lines.append(f"              off by {off:.3g}, allowed {failure.radius:.3g}: {beyond}")
        for explanation in verdict.explanations[:3]:
            lines.append(f"  likely      {explanation.description}")
        lines.append(f"  repeat      {verdict.repro}")
        if '"target":""' in verdict.repro:
            lines.append("              (this kernel has no importable name: add --target package.module:function)")
    return "\n".join(lines)
