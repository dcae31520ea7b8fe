"""Speed: the solution beside the reference, and beside what torch's compiler makes of that, in processes alike.

All are timed by turns, with the same data, in processes of their own; medians and spreads are of single calls. The
process that judges measures each series of calls beside it, by a clock that no solution reaches. What a series takes
beyond its calls (numbers are put in place, results copied) it takes in the reference's process as well, whose clock is
right; what the solution's leaves out beside that belongs to the calls. Where a process takes more of the processor's
time than passes, more threads were at work than the reference has, and that time counts.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from assay.judge.solution.solution_process import Called, SolutionProcess
from assay.judge.tampering import Cheat, detected_cheats

_ROUNDS = 3
_MOST_CALLS = 200
_LATENCY = 0.003  # seconds that a question and its answer may take, and what is looked for after a series
_PARALLEL = 1.3  # seconds of the processor in one that passes, beyond what one thread and a system's clocks explain
_SHORTEST = 2e-6  # seconds that a call takes at least, what is watched beside it included
_LEAST = 1e-4  # seconds of the processor below which that isn't asked


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


@dataclass(frozen=True)
class Series:
    """Calls that were asked for at once: their number, the seconds that passed, those of the processor, and those by
    the process's own clock."""

    count: int
    passed: float
    busy: float
    reported: float

    @property
    def overhead(self) -> float:
        """Seconds of each call that the process's clock leaves out."""
        return (self.passed - self.reported) / self.count


@dataclass
class Stopwatch:
    """One side: its process, the names of its data there with their seeds, which tensors may be rolled, and the
    seconds of its calls so far. ``shifts`` are those of the last series."""

    process: SolutionProcess
    names: Sequence[str]
    seeds: Sequence[int]
    rolled: Sequence[int]
    seconds: list[float] = field(default_factory=list)
    cheats: list[Cheat] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)

    def run(self, count: int) -> Series:
        """So many calls. Raises `SolutionError`."""
        self.shifts = [secrets.randbelow(2**31) if self.rolled else 0 for _ in range(count)]
        used, began = self.process.processor_seconds, time.perf_counter()
        reported, seen = self.process.time(self.names, self.seeds, self.rolled, self.shifts)
        passed = time.perf_counter() - began
        used = self.process.processor_seconds - used
        right = [value for value in reported if 0.0 <= value <= passed]
        if len(right) < len(reported):
            self.cheats.append(Cheat("patched-timer", f"its clock tells {min(reported):.3g} s of a call"))
        self.seconds += right or [passed / count]
        self.cheats += [cheat for cheat in detected_cheats(seen, set()) if cheat.name != "output-is-input"]
        self.series.append(Series(count, passed, used, sum(right)))
        return self.series[-1]

    def sampled(self, count: int) -> list[tuple[int, int, Called]]:
        """The results of some of the last calls, chosen now: which data each had, and by how much it was rolled."""
        numbers = sorted({secrets.randbelow(len(self.shifts)) for _ in range(count)})
        result = self.process.fetch(numbers)
        return [
            (number % len(self.names), self.shifts[number], called)
            for number, called in zip(numbers, result, strict=True)
        ]


def alternate(sides: Sequence[Stopwatch], seconds: float, most: int) -> None:
    """Time all sides by turns, each for about so many seconds in all and at most so many calls at once. Raises
    `SolutionError`."""
    counts = [_calls_within(side, seconds / _ROUNDS, min(_MOST_CALLS, most)) for side in sides]
    for _ in range(_ROUNDS):
        for side, count in zip(sides, counts, strict=True):
            side.run(count)


def _calls_within(side: Stopwatch, seconds: float, most: int) -> int:
    """How many calls take about so long, what a series takes beyond its calls included; tried by ever longer series."""
    side.run(1)  # may compile
    count = 2
    while (passed := side.run(count).passed) < seconds / 2 and count < most:
        count = min(4 * count, most)
    side.seconds.clear()
    side.series.clear()
    return max(2, min(most, int(count * seconds / passed)))


def hidden(own: Stopwatch, reference: Stopwatch | None) -> float:
    """Seconds of a call that the solution's clock leaves out: beside what the reference's does, and more than it tells;
    0 where it's no more than that."""
    usual = max(one.overhead for one in reference.series) if reference is not None else 0.0
    left_out = min(one.overhead - _LATENCY / one.count for one in own.series) - usual  # as a busy machine delays some
    reported = max(one.reported / one.count for one in own.series)
    return max(left_out, _SHORTEST) if reported < _SHORTEST or left_out > max(reported, usual / 4) else 0.0


def compared(own: Stopwatch, reference: Stopwatch | None, *, on_cpu: bool) -> list[str]:
    """Correct the solution's seconds by what the judging process has measured; what there is to say of it.

    A clock that hides time is a cheat.
    """
    if left_out := hidden(own, reference):
        reported = max(one.reported / one.count for one in own.series)
        own.seconds[:] = [value + left_out for value in own.seconds]
        calls, passed = sum(one.count for one in own.series), sum(one.passed for one in own.series)
        words = f"{calls} calls took {passed:.3g} s, and {reported * calls:.3g} s by its own clock"
        own.cheats.append(Cheat("patched-timer", words))
    passed, busy = sum(one.passed for one in own.series), sum(one.busy for one in own.series)
    if not on_cpu or not busy > max(_PARALLEL * passed, _LEAST):
        return []
    threads = busy / passed
    own.seconds[:] = [value * threads for value in own.seconds]
    return [f"the solution had {threads:.2g} threads at work, the reference one: its time is the processor's"]
