"""The Pareto front of two quantities: the least of one for every level of the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.precision.choice.choosing import least
from assay.precision.choice.problem import Budgets, Choice, ErrorOf, Problem, Quantity, Unit
from assay.precision.choice.program import Clock
from assay.precision.choice.refinement import Judge, refine

__all__ = ["front"]


def front(
    units: Sequence[Unit],
    *,
    minimise: tuple[Quantity, Quantity] = ("bytes", "error"),
    budgets: Budgets | None = None,
    points: int = 16,
    error_of: ErrorOf | None = None,
    calls: int = 4000,
    seconds: float = 20.0,
) -> list[Choice]:
    """Choices of which none is beaten in both quantities by another, in the order of the first; empty if none fits.

    The epsilon-constraint method: the second quantity is minimised under ``points`` evenly spaced limits on the first,
    from the least that it can have to what the least of the second takes. ``budgets`` hold for all of them; the other
    arguments and errors are as of `choose`.
    """
    problem, limits = Problem(units), (budgets or Budgets()).limits
    if not units:
        return [problem.choice(())]
    level, cost = minimise
    kept = problem.undominated(tuple(dict.fromkeys((level, cost, "error", *limits))))
    each = Clock(seconds)
    low = least(Judge(problem, limits, level, None), kept, limits, each)
    high = least(Judge(problem, limits, cost, None), kept, limits, each)
    if low is None or high is None:
        return []
    ends = getattr(problem.choice(low), level), getattr(problem.choice(high), level)
    found = []
    for limit in np.linspace(*ends, max(points, 2)):
        under = {**limits, level: min(float(limit), limits.get(level, np.inf))}
        judge = Judge(problem, under, cost, error_of)
        picks = least(judge, kept, under, Clock(max(each.left, seconds / points) / 4))
        if picks is None:
            continue
        if not judge.exact:
            picks = refine(judge, picks, calls // max(points, 2))
        if judge.key(picks)[0] == 0:
            found.append(judge.choice(picks))
    return _unbeaten(found, level, cost)


def _unbeaten(choices: Sequence[Choice], level: Quantity, cost: Quantity) -> list[Choice]:
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (getattr(choice, level), getattr(choice, cost), choice.error)):
        if not kept or getattr(choice, cost) < getattr(kept[-1], cost):
            kept.append(choice)
    return kept
