"""The gate: decides whether a kernel has become slower, from the scatter of runs of one version.

A run is a process of its own; its value is the median over rounds of log(time of a call / time of a copy right after
it), so that a slowdown of the whole machine cancels. Two records of n and m runs are compared by the shift between
them. The n m ordered differences of their values bound it without an assumed error distribution (Hodges and Lehmann,
*Estimates of location based on rank tests*, Annals of Mathematical Statistics 34, 1963): the interval from the k-th
smallest to the k-th largest contains the shift with probability 1 - 2 P(U < k), where U is the Mann-Whitney statistic.
With 7 runs each the full range excludes a shift of zero once in 1,716 comparisons. Differences between days or builds
are in no single record, so the largest difference of two records of one version in the history is added.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from assay.bench.timing.contest import REFERENCE, Line, Record

_CHANCE = 0.001  # of a false alarm per comparison; fewer runs than this takes give a higher one
_MOST_CHANCE = 0.01  # of a false alarm, above which nothing is decided: 5 runs each have 0.008
_LEAST = 0.01  # a change below 1 % counts as none


@dataclass(frozen=True)
class Change:
    """A kernel at a case, before and after: ``answer`` is "faster", "slower", "same" or "undecided".

    ``change`` is the relative one of its time, between ``low`` and ``high`` (0.03: 3 % slower); ``noise`` the
    largest difference of records of one version; ``why`` says what an undecided one needs, or which side has no time.
    """

    kernel: str
    case: str
    answer: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    noise: float = 0.0
    why: str = ""


def compared(before: Record, after: Record, past: Sequence[Record] = (), *, resolution: float = 0.03) -> list[Change]:
    """Compare every kernel that both records have; "same": a change of ``resolution`` or more is excluded.

    ``past`` are further records of the same machine, whose differences within a commit are the noise.
    """
    old = {line.key: line for line in before.lines}
    results = []
    for line in after.lines:
        if line.key in old and line.outcome != REFERENCE:
            noise = max((abs(shift) for shift in _shifts(line.key, past)), default=0.0)
            results.append(_compared(old[line.key], line, noise, resolution))
    return results


def _compared(old: Line, new: Line, noise: float, resolution: float) -> Change:
    for line, when in ((old, "before"), (new, "now")):
        if not line.runs:
            return Change(new.kernel, new.case, "undecided", why=f"no time {when}: {line.outcome}, {line.why}")
    a, b = values(old), values(new)
    kth = rank(len(a), len(b), _CHANCE)
    differences = sorted(y - x for x in a for y in b)
    low, high = differences[kth - 1], differences[-kth]
    middle, floor = statistics.median(differences), max(_LEAST, noise)
    certain = 2 * tail(len(a), len(b), kth) <= _MOST_CHANCE
    answer, why = "undecided", ""
    if certain and low > floor:
        answer = "slower"
    elif certain and high < -floor:
        answer = "faster"
    elif certain and -resolution < low and high < resolution:
        answer = "same"
    elif not certain:
        why = f"{len(a)} and {len(b)} runs are too few; 5 each are needed, 7 are better (--runs)"
    else:
        why = f"between {_percent(low)} and {_percent(high)}; more or quieter runs would tell"
    return Change(
        new.kernel, new.case, answer, math.expm1(middle), math.expm1(low), math.expm1(high), math.expm1(floor), why
    )


def values(line: Line) -> list[float]:
    """Return for each run the median over its rounds of log(time / baseline)."""
    return [
        statistics.median(math.log(time / copy) for time, copy in zip(times, copies, strict=True))
        for times, copies in zip(line.runs, line.yardstick, strict=True)
    ]


def _shifts(key: tuple[str, str], past: Iterable[Record]) -> Iterator[float]:
    """Yield the shift between any two records of one commit and the same sources."""
    middles: dict[tuple[str, str], list[float]] = {}
    for record in past:
        for line in record.lines:
            if line.key == key and line.runs and record.commit and not record.commit.endswith("+"):
                middles.setdefault((record.commit, record.key), []).append(statistics.median(values(line)))
    for same in middles.values():
        yield from (b - a for a, b in combinations(same, 2))


def rank(n: int, m: int, chance: float) -> int:
    """Return the largest k, at least 1, with 2 P(U < k) <= ``chance``: the rank of the differences that bound it."""
    kth = 1
    while 2 * tail(n, m, kth + 1) <= chance:
        kth += 1
    return kth


def tail(n: int, m: int, k: int) -> float:
    """Return P(U < k) for n and m values of one continuous distribution."""
    return sum(_arrangements(n, m, u) for u in range(k)) / math.comb(n + m, n)


@cache
def _arrangements(n: int, m: int, u: int) -> int:
    """Return the number of orders of n and m values with u inversions."""
    if u < 0:
        return 0
    if n == 0 or m == 0:
        return int(u == 0)
    return _arrangements(n - 1, m, u - m) + _arrangements(n, m - 1, u)


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.2g} %"
