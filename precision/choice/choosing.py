"""Choices that meet all budgets: the integer program's best and diverse others, refined under the true error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.precision.choice.problem import Budgets, Choice, ErrorOf, Picks, Problem, Quantity, Unit
from assay.precision.choice.program import Clock, Cut, Mask, narrowed, nearest, solve
from assay.precision.choice.refinement import Judge, greedy, linearised, refine

__all__ = ["choose", "least"]


def choose(
    units: Sequence[Unit],
    budgets: Budgets,
    *,
    minimise: Quantity = "error",
    error_of: ErrorOf | None = None,
    candidates: int = 8,
    distance: int | None = None,
    calls: int = 4000,
    seconds: float = 20.0,
) -> list[Choice]:
    """Choices that keep every budget, the least of ``minimise`` first, then of the error; empty if there are none.

    Errors of options are added up first; ``candidates`` solutions that differ in at least ``distance`` units (a
    twentieth of them where left out) are found so. With ``error_of``, the error of an assignment with its cross terms,
    each is then improved by exchanges of one or two options, with at most ``calls`` evaluations in all, and what comes
    out the same is listed once. ``seconds``: after which the integer programs stop with the best that they have; the
    result is the same at every run that ends before. Raises ValueError for a unit without finite options or a negative
    budget.
    """
    problem, limits = Problem(units), budgets.limits
    if not units:
        return [problem.choice(())]
    judge = Judge(problem, limits, minimise, error_of)
    kept = problem.undominated(tuple(dict.fromkeys((minimise, "error", *limits))))
    starts = _starts(judge, kept, candidates, distance or max(1, len(units) // 20), seconds)
    if not judge.exact:
        eager = greedy(judge, calls // 4) if minimise == "error" else None
        starts = list(dict.fromkeys([*starts, *([eager] if eager is not None else [])]))
        starts = [refine(judge, start, calls // 2 // len(starts)) for start in starts]
        starts.append(_relinearised(judge, min(starts, key=judge.key), calls, Clock(seconds)))
    fit = [picks for picks in dict.fromkeys(starts) if judge.key(picks)[0] == 0]
    ordered = sorted(fit, key=lambda picks: (judge.key(picks)[1:], picks))
    return [judge.choice(picks) for picks in ordered[:candidates]]


def _starts(judge: Judge, kept: Mask, candidates: int, distance: int, seconds: float) -> list[Picks]:
    """Solutions with added errors; where there are none, the nearest to one."""
    problem, limits = judge.problem, dict(judge.limits)
    found = [least(judge, kept, limits, Clock(seconds / 2))]
    for _ in range(3 if "error" in limits and not judge.exact else 0):
        # The limit on the error is one on the true error: what is added up may be so much larger or smaller.
        picks = found[-1]
        added = problem.choice(picks).error if picks is not None else 0.0
        if picks is None or not added > 0 or not judge.choice(picks).error > 0:
            break
        limits["error"] = judge.limits["error"] * added / judge.choice(picks).error
        found.append(least(judge, kept, limits, Clock(seconds / 8)))
    starts = list(dict.fromkeys(picks for picks in found if picks is not None))
    if not starts:
        return [nearest(problem, kept, problem.yardsticks(judge.limits), Clock(seconds / 4))]
    near = narrowed(problem, kept, problem.column(judge.minimise), limits)
    while near is not None and len(starts) < candidates:
        cuts = [Cut(picks, distance) for picks in starts]
        picks = least(judge, near, limits, Clock(seconds / 2 / candidates), cuts)
        if picks is None:
            break
        starts.append(picks)
    return starts


def _relinearised(judge: Judge, picks: Picks, calls: int, clock: Clock) -> Picks:
    """Integer programs with the true change of each single exchange, within fewer and fewer units of the best."""
    size = len(judge.problem.units)
    picks = refine(judge, picks, calls - judge.calls)
    reach = size // 2
    while reach > 2 and clock.left and judge.calls + len(judge.problem.values) < calls:
        problem = linearised(judge, picks)
        kept = problem.undominated(tuple(dict.fromkeys((judge.minimise, "error", *judge.limits))))
        kept[problem.rows(picks)] = True
        found = least(judge, kept, judge.limits, clock, [Cut(picks, 1, reach)], problem)
        better = refine(judge, found, calls - judge.calls) if found is not None else picks
        if judge.key(better) < judge.key(picks):
            picks = better
        else:
            reach //= 2
    return picks


def least(
    judge: Judge,
    kept: Mask,
    limits: Mapping[Quantity, float],
    clock: Clock,
    cuts: Sequence[Cut] = (),
    problem: Problem | None = None,
) -> Picks | None:
    """The least of what is minimised within the limits, and of these the least error; errors added up."""
    problem = problem or judge.problem
    picks = solve(problem, kept, problem.column(judge.minimise), limits, clock, cuts)
    if picks is None or judge.minimise == "error":
        return picks
    reached: float = getattr(problem.choice(picks), judge.minimise)
    ties = {**limits, judge.minimise: min(reached, limits.get(judge.minimise, reached))}
    return solve(problem, kept, problem.column("error"), ties, clock, cuts) or picks
