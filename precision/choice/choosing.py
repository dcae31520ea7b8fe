"""Choices that meet all budgets: the integer program's best and diverse others, refined under the true error; and the
Pareto front of two quantities: the least of one for every level of the other; and, where no choice meets the budgets,
the one that misses least, with the budgets that can't be met."""

from collections.abc import Sequence

import numpy as np

from assay.precision.choice.problem import Choice, ErrorOf, Group, Problem, Quantity, Solution, Totals
from assay.precision.choice.program import Difference, Mask, least_sum, narrowed, nearest, solve
from assay.precision.choice.refinement import Objective, greedy, refine
from assay.runtime.deadline import Deadline

_CALLS = 4000
"""How often the true error is asked for."""
_SECONDS = 20.0
"""What the integer programs of one choice may take."""


def choose(
    groups: Sequence[Group],
    limits: Totals,
    *,
    minimise: Quantity = "error",
    error_of: ErrorOf | None = None,
    candidates: int = 8,
    distance: int | None = None,
    seconds: float = _SECONDS,
) -> list[Choice]:
    """Choices that keep all limits, the least of ``minimise`` first, then of the error; empty if there are none.

    Errors of options are added up first; ``candidates`` solutions that differ in at least ``distance`` groups (a
    twentieth of them where left out) are found so. With ``error_of``, the error of an assignment with its cross terms,
    each, and a greedy one, is improved by exchanges with half of the `_CALLS`, the best with the rest, and what comes
    out the same is listed once. ``seconds``: after which the integer programs stop with the best that they have;
    the result is the same at every run that ends before. Raises ValueError for a group without finite options.
    """
    problem = Problem(groups)
    if not groups:
        return [problem.choice(())]
    objective = Objective(problem, limits, minimise, error_of)
    kept = problem.undominated(tuple(dict.fromkeys((minimise, "error", *limits))))
    starts = _starts(objective, kept, candidates, distance or max(1, len(groups) // 20), seconds)
    if not objective.exact:
        eager = [greedy(objective, _CALLS // 4)] if minimise == "error" else []
        starts = [refine(objective, start, _CALLS // 2 // len(starts)) for start in dict.fromkeys([*starts, *eager])]
        starts.append(refine(objective, min(starts, key=objective.key), _CALLS - objective.calls))
    fit = [picks for picks in dict.fromkeys(starts) if objective.key(picks)[0] == 0]
    ordered = sorted(fit, key=lambda picks: (objective.key(picks)[1:], picks))
    return [objective.choice(picks) for picks in ordered[:candidates]]


def _starts(objective: Objective, kept: Mask, candidates: int, distance: int, seconds: float) -> list[Solution]:
    """Solutions with added errors; where there are none, the nearest to one."""
    problem, limits = objective.problem, dict(objective.limits)
    found = [_least(objective, kept, limits, Deadline(seconds / 2))]
    for _ in range(3 if "error" in limits and not objective.exact else 0):
        # The limit on the error is one on the true error: what is added up may be so much larger or smaller.
        picks = found[-1]
        added = problem.choice(picks).error if picks is not None else 0.0
        if picks is None or not added > 0 or not objective.choice(picks).error > 0:
            break
        limits["error"] = objective.limits["error"] * added / objective.choice(picks).error
        found.append(_least(objective, kept, limits, Deadline(seconds / 8)))
    starts = list(dict.fromkeys(picks for picks in found if picks is not None))
    if not starts:
        return [nearest(problem, kept, problem.yardsticks(objective.limits), Deadline(seconds / 4))]
    few, _ = narrowed(problem, kept, problem.column(objective.minimise), limits)
    while len(starts) < candidates:
        differences = [Difference(picks, distance) for picks in starts]
        picks = _least(objective, few, limits, Deadline(seconds / 2 / candidates), differences)
        if picks is None:
            break
        starts.append(picks)
    return starts


def _least(
    objective: Objective,
    kept: Mask,
    limits: Totals,
    deadline: Deadline,
    differences: Sequence[Difference] = (),
) -> Solution | None:
    """The least of what is minimised within the limits, and of these the least error; errors added up."""
    problem = objective.problem
    picks = solve(problem, kept, problem.column(objective.minimise), limits, deadline, differences)
    if picks is None or objective.minimise == "error":
        return picks
    reached: float = getattr(problem.choice(picks), objective.minimise)
    ties = {**limits, objective.minimise: min(reached, limits.get(objective.minimise, reached))}
    return solve(problem, kept, problem.column("error"), ties, deadline, differences) or picks


def front(
    groups: Sequence[Group],
    *,
    minimise: tuple[Quantity, Quantity] = ("bytes", "error"),
    points: int = 16,
    error_of: ErrorOf | None = None,
) -> list[Choice]:
    """Choices of which none is beaten in both quantities by another, in the order of the first.

    The epsilon-constraint method: the second quantity is minimised under ``points`` evenly spaced limits on the first,
    from the least that it can have to what the least of the second takes. The other arguments and errors are as of
    `choose`.
    """
    problem = Problem(groups)
    if not groups:
        return [problem.choice(())]
    level, cost = minimise
    kept = problem.undominated(tuple(dict.fromkeys((level, cost, "error"))))
    each = Deadline(_SECONDS)
    low, high = (_least(Objective(problem, {}, quantity, None), kept, {}, each) for quantity in minimise)
    if low is None or high is None:
        return []
    ends = getattr(problem.choice(low), level), getattr(problem.choice(high), level)
    found = []
    for limit in np.linspace(*ends, max(points, 2)).tolist():
        objective = Objective(problem, {level: limit}, cost, error_of)
        picks = _least(objective, kept, objective.limits, Deadline(max(each.left, _SECONDS / points) / 4))
        if picks is None:
            continue
        if not objective.exact:
            picks = refine(objective, picks, _CALLS // max(points, 2))
        if objective.key(picks)[0] == 0:
            found.append(objective.choice(picks))
    return _unbeaten(found, level, cost)


def _unbeaten(choices: Sequence[Choice], level: Quantity, cost: Quantity) -> list[Choice]:
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (getattr(choice, level), getattr(choice, cost), choice.error)):
        if not kept or getattr(choice, cost) < getattr(kept[-1], cost):
            kept.append(choice)
    return kept


def closest(
    groups: Sequence[Group], limits: Totals, *, error_of: ErrorOf | None = None
) -> tuple[Choice, list[Quantity]]:
    """The choice whose largest relative excess over a limit is least, and the quantities whose budgets bind.

    Those that bind are each that no assignment meets by itself and, of the others, an irreducible set: no assignment
    meets them all, but without any one of them some does (J. W. Chinneck, E. W. Dravnieks, *Locating minimal infeasible
    constraint sets*, ORSA J. Computing 3(2), 1991: the deletion filter), judged with errors added up. The rest are met
    as well if that costs those that bind no more. No binding budgets: some assignment meets all, or the time was up
    before any was known to bind. Of choices that miss alike, the one of least error. What misses a budget of 0 is
    compared with a millionth of the largest sum that there can be. Arguments and errors as of `choose`.
    """
    problem, deadline = Problem(groups), Deadline(_SECONDS)
    if not groups:
        return problem.choice(()), []
    alone = [name for name in limits if not _feasible(problem, {name: limits[name]}, deadline)]
    together = {name: limit for name, limit in limits.items() if name not in alone}
    if _feasible(problem, together, deadline):
        together = {}
    for quantity in tuple(together):
        fewer = {name: limit for name, limit in together.items() if name != quantity}
        if not _feasible(problem, fewer, deadline):
            together = fewer
    binding = [name for name in limits if name in alone or name in together]
    objective = Objective(problem, problem.yardsticks(limits), "error", error_of)
    picks = _closest_added(objective, binding, Deadline(_SECONDS))
    if not objective.exact:
        picks = refine(objective, picks, _CALLS)
    return objective.choice(picks), binding


def _closest_added(objective: Objective, binding: Sequence[Quantity], deadline: Deadline) -> Solution:
    """The closest with errors added up, the others than those that bind within their limits if that can be.

    No excess is below that of the least sums of each quantity alone. Where one assignment has it, as where one budget
    is far out of reach, that is found exactly; otherwise the excess is the integer program's.
    """
    problem, limits = objective.problem, objective.limits
    kept = problem.undominated(tuple(dict.fromkeys(("error", *limits))))

    def least_missing(share: float) -> Solution | None:
        wide = {name: limit * share for name, limit in limits.items()}
        some = _least(objective, kept, {**limits, **{name: wide[name] for name in binding}}, deadline)
        return some or _least(objective, kept, wide, deadline)

    alone = [least_sum(problem, kept, problem.column(name)) / limit for name, limit in limits.items()]
    picks = least_missing(max([1.0, *alone]))
    if picks is None:
        near = nearest(problem, kept, limits, deadline)
        picks = least_missing(1 + problem.choice(near).excess(limits)) or near
    return picks


def _feasible(problem: Problem, limits: Totals, deadline: Deadline) -> bool:
    """Whether some assignment meets the limits; so it is taken to be where the time is up before that is known."""
    if not limits:
        return True
    kept = problem.undominated(tuple(limits))
    return solve(problem, kept, np.zeros(len(problem.values)), limits, deadline) is not None or not deadline.left
