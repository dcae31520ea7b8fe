"""A bench's record: what was timed, on what, and how accurate it was. A history is a folder of such files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.bench.timing.contest import Contest, Found
from assay.bench.timing.roofline import gap_in_words
from assay.runtime.files import write_text_atomically
from assay.runtime.structure import plain, read_record
from assay.verify.errors import BenchError

REFERENCE = "REFERENCE"


@dataclass(frozen=True)
class Line:
    """One kernel at one case. Its ``outcome`` is `REFERENCE` where it is itself what others' times are compared with.

    ``runs`` are, of each run, the median seconds of a call in each round, ``yardstick`` those of a copy right after it,
    or of the reference by turns; both are empty where no time is told, and ``why`` says why. ``seconds`` is the median
    over all, ``spread`` the distance between the quartiles. ``least`` are the seconds of the roofline, ``bound`` what
    sets them. ``worst`` is the largest error over what the contract allows, ``bits`` the accuracy, ``launch`` the
    host's seconds.
    """

    kernel: str
    op: str
    dtype: str
    case: str
    outcome: str
    why: str = ""
    runs: list[list[float]] = field(default_factory=list)
    yardstick: list[list[float]] = field(default_factory=list)
    seconds: float | None = None
    spread: float | None = None
    least: float | None = None
    bound: str = ""
    bytes: float | None = None
    products: float | None = None
    calls: int = 0
    judged: int = 0
    worst: float | None = None
    bits: float | None = None
    launch: float | None = None
    gap: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What it has in common with the line of another record that it is compared with."""
        return self.kernel, self.case

    @property
    def share(self) -> float | None:
        """Of the roofline, from 0 to 1, or more where a cache holds what it moves."""
        return self.least / self.seconds if self.least and self.seconds else None


@dataclass(frozen=True)
class Record:
    """A bench: when (``made``, ISO 8601), of which ``commit``, on which ``machine``, how, and what came of it."""

    made: str
    commit: str
    machine: str
    device: str
    clock: str
    peak: str
    command: str
    versions: Mapping[str, str]
    lines: tuple[Line, ...]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `read` takes it."""
        return {"bench": 1, **{name: plain(value) for name, value in vars(self).items()}}

    def save(self, path: Path) -> Path:
        """Write it to a file, or into a folder under a name of its own; return the file's path."""
        if path.suffix != ".json":
            stem = f"{self.made}-{self.commit or 'unnamed'}".replace(":", "").replace("+0000", "Z")
            path = path / f"{stem}.json"
            number = 2
            while path.exists():
                path = path.with_name(f"{stem}-{number}.json")
                number += 1
        return write_text_atomically(path, json.dumps(self.as_dict(), indent=1) + "\n")


def read(path: Path) -> Record:
    """The record of a file; raises `BenchError`."""
    result: Record = read_record(path, "bench", Record, BenchError)
    return result


def history(path: Path) -> list[Record]:
    """The records of a file or of a folder, the oldest first; raises `BenchError` where there are none."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"{path}: expected a record of assay bench --save, or a folder of such; it has no .json")
    return sorted(map(read, files), key=lambda record: record.made)


def lines_of(contests: Sequence[Contest], runs: Sequence[Sequence[Found]]) -> list[Line]:
    """A line for each kernel of each contest, of all runs together: wrong in one is wrong."""
    results = []
    for index, contest in enumerate(contests):
        least = runs[0][index].least
        for number, runner in enumerate(contest.runners):
            timings = [run[index].timings[number] for run in runs]
            bad = next((each for each in timings if each.why), None)
            rounds = [] if bad else [each.medians for each in timings]
            every = [value for one in rounds for value in one]
            seconds = statistics.median(every) if every else None
            launch = _known(statistics.median(each.launch for each in timings))
            results.append(
                Line(
                    kernel=runner.name,
                    op=contest.case.definition.name,
                    dtype=_dtype(contest),
                    case=str(contest.case).partition("; seed")[0],
                    outcome=bad.outcome if bad else "PASS",
                    why=bad.why if bad else "",
                    runs=rounds,
                    yardstick=[] if bad else [each.yardstick for each in timings],
                    seconds=seconds,
                    spread=_spread(every) if every else None,
                    least=least.seconds if least else None,
                    bound=least.bound if least else "",
                    bytes=least.bytes if least else None,
                    products=least.products if least else None,
                    calls=sum(each.calls for each in timings),
                    judged=sum(each.judged for each in timings),
                    worst=_known(max(each.worst for each in timings)),
                    bits=_known(min((each.bits for each in timings if not math.isnan(each.bits)), default=math.nan)),
                    launch=launch,
                    gap=gap_in_words(seconds, least, launch or 0.0) if seconds else "",
                )
            )
    return results


def _dtype(contest: Contest) -> str:
    kinds = dict.fromkeys(contest.case.dtypes.values())
    return ", ".join(kinds)


def _spread(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
