"""What is left when no assignment meets the budgets: the one that misses least, and the budgets that can't be met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from assay.precision.choice.choosing import least
from assay.precision.choice.problem import Budgets, Choice, ErrorOf, Picks, Problem, Quantity, Unit
from assay.precision.choice.program import Clock, least_sum, nearest, solve
from assay.precision.choice.refinement import Judge, refine

__all__ = ["closest"]


def closest(
    units: Sequence[Unit],
    budgets: Budgets,
    *,
    error_of: ErrorOf | None = None,
    calls: int = 4000,
    seconds: float = 20.0,
) -> tuple[Choice, tuple[str, ...]]:
    """The choice whose largest relative excess over a budget is least, and the names of the budgets that bind.

    Those that bind are each that no assignment meets by itself and, of the others, an irreducible set: no assignment
    meets them all, but without any one of them some does (J. W. Chinneck, E. W. Dravnieks, *Locating minimal infeasible
    constraint sets*, ORSA J. Computing 3(2), 1991: the deletion filter), judged with errors added up. The rest are met
    as well if that costs those that bind no more. No binding budgets: some assignment meets all. Of choices that miss
    alike, the one of least error. What misses a budget of 0 is compared with a millionth of the largest sum that there
    can be. Arguments and errors as of `choose`.
    """
    problem, limits, clock = Problem(units), budgets.limits, Clock(seconds)
    if not units:
        return problem.choice(()), ()
    alone = [name for name in limits if not _feasible(problem, {name: limits[name]}, clock)]
    together = {name: limit for name, limit in limits.items() if name not in alone}
    if _feasible(problem, together, clock):
        together = {}
    for quantity in tuple(together):
        fewer = {name: limit for name, limit in together.items() if name != quantity}
        if not _feasible(problem, fewer, clock):
            together = fewer
    binding = [name for name in limits if name in alone or name in together]
    judge = Judge(problem, problem.yardsticks(limits), "error", error_of)
    picks = _start(judge, binding, Clock(seconds))
    if not judge.exact:
        picks = refine(judge, picks, calls)
    return judge.choice(picks), tuple(f"max_{quantity}" for quantity in binding)


def _start(judge: Judge, binding: Sequence[Quantity], clock: Clock) -> Picks:
    """The closest with errors added up, the others than those that bind within their limits if that can be.

    No excess is below that of the least sums of each quantity alone. Where one assignment has it, as where one budget
    is far out of reach, that is found exactly; otherwise the excess is the integer program's.
    """
    problem, limits = judge.problem, judge.limits
    kept = problem.undominated(tuple(dict.fromkeys(("error", *limits))))

    def least_missing(share: float) -> Picks | None:
        wide = {name: limit * share for name, limit in limits.items()}
        some = least(judge, kept, {**limits, **{name: wide[name] for name in binding}}, clock)
        return some or least(judge, kept, wide, clock)

    alone = [least_sum(problem, kept, problem.column(name)) / limit for name, limit in limits.items()]
    picks = least_missing(max([1.0, *alone]))
    if picks is None:
        near = nearest(problem, kept, limits, clock)
        picks = least_missing(1 + problem.choice(near).excess(limits)) or near
    return picks


def _feasible(problem: Problem, limits: Mapping[Quantity, float], clock: Clock) -> bool:
    if not limits:
        return True
    kept = problem.undominated(tuple(limits))
    return solve(problem, kept, np.zeros(len(problem.values)), limits, clock) is not None
