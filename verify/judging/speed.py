"""Speed: the solution beside the reference, and beside what torch's compiler makes of that, in processes alike.

All are timed by turns, with the same data, in processes of their own; medians and spreads are of single calls. The
process that judges measures the whole beside it, so that a clock which a solution has replaced shows.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from assay.verify.judging.conduct import Cheat, noticed
from assay.verify.judging.solution_process import Called, SolutionProcess

_ROUNDS = 3
_MOST_CALLS = 200
_UNTOLD = 0.5  # of the time that passed, a process must account for at least so much
_LATENCY = 0.02  # seconds that questions and answers may take


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call: median, and the quartiles' distance, of so many calls."""

    median: float
    spread: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Time:
        """The time of calls that took so many seconds each."""
        ordered = sorted(seconds)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return Time(1e3 * statistics.median(ordered), 1e3 * (high - low), len(ordered))

    def __str__(self) -> str:
        return f"{self.median:.4g} ms (±{self.spread / 2:.2g}, {self.calls} calls)"


@dataclass(frozen=True)
class Speed:
    """Times of the solution, the reference, and the compiled reference, at ``sizes`` on ``device``."""

    sizes: str
    device: str
    solution: Time
    reference: Time | None = None
    compiled: Time | None = None
    note: str = ""

    @property
    def factor(self) -> float | None:
        """How many times as fast as the reference."""
        return self.reference.median / self.solution.median if self.reference and self.solution.median else None

    def __str__(self) -> str:
        words = [f"{self.solution} at {self.sizes} on {self.device}"]
        if self.reference is not None:
            words.append(f"reference {self.reference}, {self.factor:.3g} times as fast")
        if self.compiled is not None:
            words.append(f"compiled {self.compiled}")
        return "; ".join([*words, *([self.note] if self.note else [])])


@dataclass
class Stopwatch:
    """One side: its process, the names of its data there, and the seconds of its calls so far.

    ``last`` calls were the last ones that were asked for, and took ``each`` so many seconds. ``told`` is, of each
    series of calls, the time that passed, that by the process's own clock, and their number.
    """

    process: SolutionProcess
    names: Sequence[str]
    seconds: list[float] = field(default_factory=list)
    cheats: list[Cheat] = field(default_factory=list)
    last: int = 0
    each: float = 0.0
    told: list[tuple[float, float, int]] = field(default_factory=list)

    def run(self, count: int) -> None:
        """So many calls. Raises `SolutionError`."""
        began = time.perf_counter()
        told, seen = self.process.time(self.names, count)
        passed = time.perf_counter() - began
        self.seconds += told
        self.last, self.each = count, max(passed, sum(told)) / count
        self.cheats += [cheat for cheat in noticed(seen, set()) if cheat.name != "output-is-input"]
        self.told.append((passed, sum(told), count))

    @property
    def untold(self) -> list[Cheat]:
        """Whether the process's clock leaves out most of the time: of every series, as a busy machine delays some."""
        if not self.told or any(told > _UNTOLD * passed or passed - told < _LATENCY for passed, told, _ in self.told):
            return []
        passed, told, count = self.told[-1]
        return [Cheat("patched-timer", f"{count} calls took {passed:.3g} s, and {told:.3g} s by its own clock")]

    def picked(self, count: int) -> list[tuple[int, Called]]:
        """The results of some of the last calls, chosen now, and which data each had."""
        numbers = sorted({secrets.randbelow(self.last) for _ in range(count)})
        found = self.process.fetch(numbers)
        return [(number % len(self.names), called) for number, called in zip(numbers, found, strict=True)]


def by_turns(sides: Sequence[Stopwatch], seconds: float) -> None:
    """Time all sides by turns, each for about so many seconds in all. Raises `SolutionError`."""
    counts = []
    for side in sides:
        side.run(2)  # the first may compile
        counts.append(max(2, min(_MOST_CALLS, int(seconds / _ROUNDS / max(side.each, 1e-5)))))
        side.seconds.clear()
    for _ in range(_ROUNDS):
        for side, count in zip(sides, counts, strict=True):
            side.run(count)
