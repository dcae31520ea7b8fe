"""What is left when no assignment meets the budgets: the one that misses least, and the budgets that can't be met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from assay.precision.choice.choosing import least
from assay.precision.choice.problem import Budgets, Choice, ErrorOf, Problem, Quantity, Unit
from assay.precision.choice.program import Clock, nearest, solve
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

    Those that bind are an irreducible set: no assignment meets them all, but without any one of them some does (J. W.
    Chinneck, E. W. Dravnieks, *Locating minimal infeasible constraint sets*, ORSA J. Computing 3(2), 1991: the deletion
    filter), judged with errors added up. The others are met as well if that costs those that bind no more. No binding
    budgets: some assignment meets all, and the choice is the one of least error. Arguments and errors as of `choose`.
    """
    problem, limits, clock = Problem(units), budgets.limits, Clock(seconds)
    judge = Judge(problem, limits, "error", error_of)
    kept = problem.undominated(("error", *limits))
    if not units:
        return problem.choice(()), ()
    binding = tuple(limits) if not _feasible(problem, limits, clock) else ()
    for quantity in binding:
        fewer = {name: limits[name] for name in binding if name != quantity}
        if not _feasible(problem, fewer, clock):
            binding = tuple(fewer)
    picks = least(judge, kept, limits, clock) if not binding else None
    if picks is None:
        picks = nearest(problem, kept, limits, Clock(seconds))
        assert picks is not None
        share = 1 + problem.choice(picks).excess({name: limits[name] for name in limits if limits[name] > 0})
        over = problem.choice(picks)
        wider = {name: max(limit * share, 0.0 if limit else getattr(over, name)) for name, limit in limits.items()}
        for kept_limits in ({name: wider[name] if name in binding else limits[name] for name in limits}, wider):
            better = least(judge, kept, kept_limits, clock)
            if better is not None:
                picks = better
                break
    if not judge.exact:
        picks = refine(judge, picks, calls)
    return judge.choice(picks), tuple(f"max_{quantity}" for quantity in binding)


def _feasible(problem: Problem, limits: Mapping[Quantity, float], clock: Clock) -> bool:
    if not limits:
        return True
    kept = problem.undominated(tuple(limits))
    return solve(problem, kept, np.zeros(len(problem.values)), limits, clock) is not None
