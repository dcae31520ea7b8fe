"""The verdict on a solution: a `Verdict` with sizes, cheats and speed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from assay.judge.speed import Speed
from assay.judge.tampering import CHEATS, Cheat
from assay.runtime.output import visible
from assay.runtime.records import plain
from assay.verify.findings import Count
from assay.verify.report.text import text_report
from assay.verify.verdict import Verdict


@dataclass(frozen=True)
class Workload:
    """The result at one of the sizes that a problem states, with the fields of a FlashInfer Bench trace.

    ``worst`` is the largest |solution - golden| / radius, ``radius`` the largest tolerance, ``relative`` and
    ``absolute`` the largest errors from the golden, ``bits`` the accuracy (`assay.bench.timing.timed.bits_of`), all of
    the first of the ``judged`` calls. ``speed`` is None if it wasn't timed at these ``sizes``.
    """

    uuid: str
    status: str
    sizes: str = ""
    message: str = ""
    worst: float = 0.0
    radius: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    bits: float = math.nan
    judged: Count = 0
    repro: str = ""
    speed: Speed | None = None


@dataclass(frozen=True)
class SolutionVerdict(Verdict):
    """A `Verdict` on a solution of a problem, both named by their paths.

    ``format`` is the problem's format, ``cheats`` the detected cheats (`assay.judge.tampering.CHEATS`), ``sizes`` the
    sizes at which it was judged, ``not_judged`` the stated sizes at which it was not, with the reason. ``workloads``
    are the results at each stated size, with its speed if it was timed; ``speed`` is the first of these, or that at
    other sizes, or None. ``sandbox``: what the solution ran in, "not sandboxed: ..." with the reason otherwise.
    """

    problem: str = ""
    solution: str = ""
    format: str = ""
    cheats: tuple[Cheat, ...] = ()
    sizes: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    speed: Speed | None = None
    workloads: tuple[Workload, ...] = ()
    retries: Count = 0
    sandbox: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as `Verdict.as_dict`, with each cheat's description and the speed factor."""
        result = super().as_dict()
        result["cheats"] = [{**plain(cheat), "description": CHEATS[cheat.name]} for cheat in self.cheats]
        result["speed"] = _speed(self.speed)
        for workload, entry in zip(self.workloads, result["workloads"], strict=True):
            entry["speed"] = _speed(workload.speed)
        return result

    def to_line(self) -> str:
        """Return the verdict as one line of JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"), allow_nan=False)

    def __str__(self) -> str:
        lines = [text_report(self)]
        lines += [f"  cheat       {cheat}" for cheat in self.cheats]
        lines += [f"  sizes       {words}" for words in self.sizes]
        lines += [f"  not judged  {words}" for words in self.not_judged]
        if self.speed is not None:
            lines.append(f"  speed       {self.speed}")
        if self.sandbox:
            lines.append(f"  sandbox     {self.sandbox}")
        return visible("\n".join(lines))


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    return {**plain(speed), "factor": plain(speed.factor)} if speed is not None else None
