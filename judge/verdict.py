"""The verdict on a solution: that of an examination, with sizes, cheats by name, and speed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from assay.judge.speed import Speed
from assay.judge.tampering import CHEATS, Cheat
from assay.runtime.records import plain
from assay.verify.findings import Count
from assay.verify.report.text import text_report
from assay.verify.verdict import Verdict


@dataclass(frozen=True)
class Workload:
    """What was found at one of the sizes that a problem states: as a trace of FlashInfer Bench says it.

    ``worst`` is the largest |solution - golden| / radius there, the errors are those from the golden, ``bits`` the
    accuracy (`assay.bench.timing.timed.bits_of`), of the first of the ``judged`` calls. ``speed`` is None where it
    wasn't timed at these ``sizes``.
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
    """A `Verdict` on a solution of a problem, both by their paths.

    ``format`` is the problem's; ``cheats`` are what the solution was seen to do instead of computing, by the names of
    `assay.judge.tampering.CHEATS`; ``sizes`` says at which sizes it was judged, ``not_judged`` at which of the
    given ones not, and why; ``workloads`` are the given sizes, one by one, with the speed at each that was timed;
    ``speed`` is the first of these, or that at other sizes, None where it wasn't timed. ``unresolved`` and all else is
    as in any verdict.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `Verdict.as_dict` gives it, with each cheat's description and the factor of speed."""
        result = super().as_dict()
        result["cheats"] = [{**plain(cheat), "description": CHEATS[cheat.name]} for cheat in self.cheats]
        result["speed"] = _speed(self.speed)
        for workload, entry in zip(self.workloads, result["workloads"], strict=True):
            entry["speed"] = _speed(workload.speed)
        return result

    def to_line(self) -> str:
        """The verdict as one line of JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"), allow_nan=False)

    def __str__(self) -> str:
        lines = [text_report(self)]
        lines += [f"  cheat       {cheat}" for cheat in self.cheats]
        lines += [f"  sizes       {words}" for words in self.sizes]
        lines += [f"  not judged  {words}" for words in self.not_judged]
        if self.speed is not None:
            lines.append(f"  speed       {self.speed}")
        return "\n".join(lines)


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    return {**plain(speed), "factor": plain(speed.factor)} if speed is not None else None
