"""Speed of the solution, the reference and the compiled reference, each in a process of its own.

All are timed alternately with the same data; medians and spreads are of single calls. The judging process also
measures each series of calls, by a clock that no solution can reach. The overhead of a series (placing numbers, copying
results) is the same in the reference's process, whose clock can be trusted; time that the solution's clock leaves out
beyond that overhead is added to its calls. If a process uses more CPU time than wall time, it ran more threads than the
reference, and its CPU time counts.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from assay.judge.solution.solution_process import Called, SolutionProcess
from assay.judge.tampering import Cheat, detected_cheats

_ROUNDS = 3  # in which the sides alternate, so that a busy spell of the machine slows all alike
_MOST_CALLS = 200  # of a series: each keeps a copy of its results
_LATENCY = 0.003  # seconds that a request and its answer, and the checks after a series, may take
_PARALLEL = 1.3  # CPU seconds per second that one thread and the clocks' resolution can't explain
_SHORTEST = 2e-6  # seconds of the shortest call, with the watching around it
_IDLE = 0.05  # of the time between its series in which a solution may work: it is asked nothing
_LEAST_IDLE = 0.02  # CPU seconds of it, more than the clocks' resolution
_LEAST = 1e-4  # CPU seconds below which threads are not estimated


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call: the median and the distance between the quartiles of ``calls`` calls."""

    median: float
    spread: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Time:
        """Return the time of calls that took these seconds."""
        ordered = sorted(seconds)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return Time(1e3 * statistics.median(ordered), 1e3 * (high - low), len(ordered))

    def __str__(self) -> str:
        return f"{self.median:.4g} ms (±{self.spread / 2:.2g}, {self.calls} calls)"


@dataclass(frozen=True)
class Speed:
    """Times of the solution, the reference, and the compiled reference, at ``sizes`` on ``device``.

    ``interpreted``: Triton's kernels were interpreted, so that the times tell nothing.
    """

    sizes: str
    device: str
    solution: Time
    reference: Time | None = None
    compiled: Time | None = None
    note: str = ""
    interpreted: bool = False

    @property
    def factor(self) -> float | None:
        """Return the speed relative to the reference; None if the times tell nothing."""
        if self.interpreted:
            return None
        return self.reference.median / self.solution.median if self.reference and self.solution.median else None

    def __str__(self) -> str:
        if self.interpreted:
            return f"unknown: Triton's kernels were interpreted on the CPU, whose times tell nothing ({self.solution})"
        words = [f"{self.solution} at {self.sizes} on {self.device}"]
        if self.reference is not None:
            words.append(f"reference {self.reference}, {self.factor:.3g} times as fast")
        if self.compiled is not None:
            words.append(f"compiled {self.compiled}")
        return "; ".join([*words, *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Series:
    """A series of calls in one request: their number, wall seconds, CPU seconds, and the process's own seconds."""

    count: int
    passed: float
    busy: float
    reported: float

    @property
    def overhead(self) -> float:
        """Return the seconds per call that the process's clock leaves out."""
        return (self.passed - self.reported) / self.count


@dataclass
class Stopwatch:
    """One side of a timing: its process, the stored arguments' names with their seeds, and the seconds of its calls.

    ``rolled`` and ``scaled``: indices of the tensors that are rolled, and multiplied by factors of so many ``bits``,
    from call to call, by ``changes`` in the last series. ``renew``: stores other arguments and returns their seeds,
    before each series, where none can be changed. ``idle``: CPU and wall seconds between its series, in which the
    others run.
    """

    process: SolutionProcess
    names: Sequence[str]
    seeds: Sequence[int]
    rolled: Sequence[int]
    scaled: Sequence[int] = ()
    bits: int = 12
    renew: Callable[[], Sequence[int]] | None = None
    seconds: list[float] = field(default_factory=list)
    cheats: list[Cheat] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    changes: list[tuple[int, float]] = field(default_factory=list)
    idle: list[tuple[float, float]] = field(default_factory=list)
    _ended: tuple[float, float] | None = None

    def run(self, count: int) -> Series:
        """Make ``count`` calls. Raises `SolutionError`."""
        if self._ended is not None:
            used, ended = self._ended
            self.idle.append((self.process.processor_seconds - used, time.perf_counter() - ended))
        if self.renew is not None:
            self.seeds = self.renew()
        self.changes = [
            (secrets.randbelow(2**31) if self.rolled else 0, _factor(self.bits) if self.scaled else 1.0)
            for _ in range(count)
        ]
        used, began = self.process.processor_seconds, time.perf_counter()
        reported, seen = self.process.time(self.names, self.seeds, self.rolled, self.scaled, self.changes)
        passed = time.perf_counter() - began
        self._ended = self.process.processor_seconds, time.perf_counter()
        used = self._ended[0] - used
        right = [value for value in reported if 0.0 <= value <= passed]
        if len(right) < len(reported):
            self.cheats.append(Cheat("patched-timer", f"its clock tells {min(reported):.3g} s of a call"))
        self.seconds += right or [passed / count]
        self.cheats += [cheat for cheat in detected_cheats(seen, set()) if cheat.name != "output-is-input"]
        self.series.append(Series(count, passed, used, sum(right)))
        return self.series[-1]

    def sampled(self, count: int) -> list[tuple[int, tuple[int, float], Called]]:
        """Return the results of random calls of the last series: seed of the arguments, change, and results."""
        numbers = sorted({secrets.randbelow(len(self.changes)) for _ in range(count)})
        result = self.process.fetch(numbers)
        return [
            (self.seeds[number % len(self.names)], self.changes[number], called)
            for number, called in zip(numbers, result, strict=True)
        ]


def _factor(bits: int) -> float:
    """Return a random factor from 0.5 to 1. Its product with a number is rounded once, in whichever way it is made."""
    half = 1 << bits - 1
    return (half + secrets.randbelow(half)) / (2 * half)


def alternate(sides: Sequence[Stopwatch], seconds: float, most: int) -> None:
    """Time all sides alternately, each for about ``seconds``, in series of at most ``most`` calls.

    Raises `SolutionError`.
    """
    counts = [_calls_within(side, seconds / _ROUNDS, min(_MOST_CALLS, most)) for side in sides]
    for _ in range(_ROUNDS):
        for side, count in zip(sides, counts, strict=True):
            side.run(count)


def _calls_within(side: Stopwatch, seconds: float, most: int) -> int:
    """Return how many calls take about ``seconds`` with the overhead of a series, from ever longer series."""
    side.run(1)  # may compile
    count = 2
    while (passed := side.run(count).passed) < seconds / 2 and count < most:
        count = min(4 * count, most)
    side.seconds.clear()
    side.series.clear()
    return max(2, min(most, int(count * seconds / passed)))


def hidden(own: Stopwatch, reference: Stopwatch | None) -> float:
    """Return the seconds per call that the solution's clock hides; 0 if there is no evidence for any.

    Evidence: more than the reference's overhead, and more than the reported time of a call.
    """
    usual = max(one.overhead for one in reference.series) if reference is not None else 0.0
    left_out = (
        min(one.overhead - _LATENCY / one.count for one in own.series) - usual
    )  # the least: a busy machine delays some series
    reported = max(one.reported / one.count for one in own.series)
    return max(left_out, _SHORTEST) if reported < _SHORTEST or left_out > max(reported, usual / 4) else 0.0


def compared(own: Stopwatch, reference: Stopwatch | None, *, on_cpu: bool) -> list[str]:
    """Correct the solution's seconds by the judging process's measurements; return notes.

    A clock that hides time is recorded as a cheat.
    """
    if left_out := hidden(own, reference):
        reported = max(one.reported / one.count for one in own.series)
        own.seconds[:] = [value + left_out for value in own.seconds]
        calls, passed = sum(one.count for one in own.series), sum(one.passed for one in own.series)
        words = f"{calls} calls took {passed:.3g} s, and {reported * calls:.3g} s by its own clock"
        own.cheats.append(Cheat("patched-timer", words))
    worked, waited = (sum(part) for part in zip((0.0, 0.0), *own.idle, strict=True))
    if worked > max(_IDLE * waited, _LEAST_IDLE):
        words = f"its processes worked {worked:.2g} s of the {waited:.2g} s between its timed calls"
        own.cheats.append(Cheat("background-work", words))
    passed, busy = sum(one.passed for one in own.series), sum(one.busy for one in own.series)
    if not on_cpu or not busy > max(_PARALLEL * passed, _LEAST):
        return []
    threads = busy / passed
    own.seconds[:] = [value * threads for value in own.seconds]
    return [f"the solution had {threads:.2g} threads at work, the reference one: its time is the processor's"]
