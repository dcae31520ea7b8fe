"""Choices that meet all budgets: the integer program's best and diverse others, refined by exchanges under the true
error.

Also the Pareto front of two quantities, the least of one for every level of the other; and, where no choice meets the
budgets, the closest one, with the budgets that can't be met.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from assay.precision.choice.problem import (
    QUANTITIES,
    Choice,
    ErrorOf,
    Floats,
    Group,
    Problem,
    Quantity,
    Solution,
    Totals,
)
from assay.precision.choice.program import Difference, Mask, least_sum, narrowed, nearest, solve
from assay.runtime.deadline import Deadline

_PAIRED = 300  # Single exchanges of which pairs are formed
_TRIPLED = 40  # Single exchanges up to which triples are formed

Key = tuple[float, float, float]


class Objective:
    """The value of a choice: limits first, then the minimised quantity, then the error. Caches evaluations."""

    def __init__(self, problem: Problem, limits: Totals, minimise: Quantity, error_of: ErrorOf | None) -> None:
        self.problem = problem
        self.limits = dict(limits)
        self.minimise: Quantity = minimise
        self.exact = error_of is None  # Errors add up, so that the integer program has the last word
        self.calls = 0
        self._error_of = error_of
        self._known: dict[Solution, Choice] = {}

    def choice(self, picks: Solution) -> Choice:
        """Return the totals, with the true error."""
        if picks not in self._known:
            error = None
            if self._error_of is not None:
                self.calls += 1
                error = float(self._error_of(self.problem.schemes(picks)))
            self._known[picks] = self.problem.choice(picks, error)
        return self._known[picks]

    def key(self, picks: Solution) -> Key:
        """Return (largest relative excess over a limit, minimised quantity, error); less is better."""
        choice = self.choice(picks)
        return choice.excess(self.limits), getattr(choice, self.minimise), choice.error

    def estimated(self, totals: Floats) -> Floats:
        """Return the keys of totals [n, 5], [n, 3]."""
        return np.stack([self.excess(totals), totals[:, QUANTITIES.index(self.minimise)], totals[:, 0]], 1)

    def excess(self, totals: Floats, but: Quantity | None = None) -> Floats:
        """Return the largest relative excess of totals [n, 5] over the limits, except ``but``, [n]."""
        excess = np.zeros(len(totals))
        for quantity, limit in self.limits.items():
            over = totals[:, QUANTITIES.index(quantity)] - limit * (1 + 1e-12)
            if quantity != but:
                excess = np.maximum(excess, np.where(over > 0, over / (limit or 1e-300), 0.0))
        return excess


@np.errstate(over="ignore", invalid="ignore")
def greedy(objective: Objective, calls: int) -> Solution:
    """Return a choice: from the least errors, repeat the exchange that lowers the largest excess most for its true
    error, until limits hold or ``calls`` are spent.

    A change is evaluated again only when it comes first (M. Minoux, *Accelerated greedy algorithms*, 1978).
    """
    problem, last = objective.problem, objective.calls + calls
    errors = np.where(problem.finite, problem.values[:, 0], np.inf)
    picks = tuple(int(np.argmin(part)) for part in np.split(errors, problem.starts[1:-1]))
    added = errors - errors[problem.rows(picks)][problem.group_of]
    while objective.calls < last:
        totals, moves, changes = _exchanges(objective, picks)
        freed = objective.excess(totals, but="error") - objective.excess(totals + changes, but="error")
        moves, freed, fresh = moves[freed > 0], freed[freed > 0], set[int]()
        if not len(moves):
            break
        while (move := int(moves[np.argmin(added[moves] / freed)])) not in fresh and objective.calls < last:
            fresh.add(move)
            added[move] = _error(objective, picks, move) - totals[0, 0]
        picks = _moved(problem, picks, (move,))
    return picks


def refine(objective: Objective, start: Solution, calls: int) -> Solution:
    """Return a choice that no exchange of one or two options improves, nor of three where there are few, within
    ``calls`` evaluations of the true error.

    Exchanges are tried in the order of their promise: single ones by their true changes if calls suffice for all,
    otherwise by the options' own errors; pairs by the sums of these; triples by the true changes of their pairs, which
    determine a quadratic form.
    """
    picks, last = start, objective.calls + calls
    while objective.calls < last:
        better = _step(objective, picks, last)
        if better is None:
            break
        picks = better
    return picks


@np.errstate(over="ignore", invalid="ignore")  # a combination may make infinities though none of its options does
def _step(objective: Objective, picks: Solution, last: int) -> Solution | None:
    problem = objective.problem
    totals, moves, changes = _exchanges(objective, picks)
    if len(moves) <= (last - objective.calls) * 3 // 4:
        changes[:, 0] = [_error(objective, picks, move) - totals[0, 0] for move in moves]

    def best_of(indices: NDArray[np.int64], change: Floats) -> Solution | None:
        """Try exchanges of the moves at ``indices`` [n, 1 to 3], with their changes [n, 5]."""
        keys = objective.estimated(totals + change)
        order = np.lexsort(keys.T[::-1])[: last - objective.calls + len(moves)]
        order = order[
            objective.excess(totals + change[order], but="error") <= objective.key(picks)[0] * (1 + 1e-9) + 1e-9
        ]
        return _first_better(objective, picks, moves[indices[order]], keys[order], last)

    better = best_of(np.arange(len(moves))[:, None], changes)
    if better is not None:
        return better
    some = _promising(objective, changes) if len(moves) > _PAIRED else np.arange(len(moves))
    pairs = some[np.stack(np.triu_indices(len(some), 1), 1)]
    groups = problem.group_of[moves]
    pairs = pairs[groups[pairs[:, 0]] != groups[pairs[:, 1]]]
    better = best_of(pairs, changes[pairs].sum(1))
    if better is not None or len(moves) > _TRIPLED or len(pairs) > last - objective.calls:
        return better
    cross = np.zeros((len(moves), len(moves)))
    for one, other in pairs:
        both = _error(objective, picks, *moves[[one, other]]) - totals[0, 0]
        cross[one, other] = both - changes[one, 0] - changes[other, 0]
    triples = np.array([(*pair, third) for pair in pairs for third in range(pair[1] + 1, len(moves))], dtype=np.int64)
    triples = triples.reshape(-1, 3)
    triples = triples[groups[triples[:, 1]] != groups[triples[:, 2]]]
    change = changes[triples].sum(1)
    change[:, 0] += sum(cross[triples[:, one], triples[:, two]] for one, two in ((0, 1), (0, 2), (1, 2)))
    return best_of(triples, change)


def _first_better(
    objective: Objective, picks: Solution, exchanges: NDArray[np.int64], keys: Floats, last: int
) -> Solution | None:
    """Return the first exchange that truly improves. Only errors are estimated, so what is worse without them isn't
    tried."""
    now = objective.key(picks)
    others: Totals = {quantity: limit for quantity, limit in objective.limits.items() if quantity != "error"}
    for exchange, estimate in zip(exchanges, keys, strict=True):
        if objective.minimise != "error" and now[0] == 0 and estimate[1] > now[1]:
            continue
        changed = _moved(objective.problem, picks, exchange)
        if objective.problem.choice(changed, 0.0).excess(others) > now[0]:
            continue
        if objective.calls >= last:
            return None
        if objective.key(changed) < now:
            return changed
    return None


def _promising(objective: Objective, changes: Floats) -> NDArray[np.int64]:
    """Return exchanges that lower the error most, and the ones that free most of a limited quantity for their error."""
    half = _PAIRED // 2
    chosen = [np.argsort(changes[:, 0], kind="stable")[:half]]
    limited = [quantity for quantity in {*objective.limits, objective.minimise} if quantity != "error"]
    for quantity in sorted(limited):
        freed = -changes[:, QUANTITIES.index(quantity)]
        worth = np.where(freed > 0, np.maximum(changes[:, 0], 0.0) / np.maximum(freed, 1e-300), np.inf)
        chosen.append(np.argsort(worth, kind="stable")[: half // len(limited)])
    return np.unique(np.concatenate(chosen))


def _exchanges(objective: Objective, picks: Solution) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Return the totals [1, 5]; the alternative options, [n]; the change of each by its own error, [n, 5]."""
    problem, here = objective.problem, objective.choice(picks)
    current = problem.rows(picks)[problem.group_of]
    moves = np.flatnonzero(problem.finite & (np.arange(len(current)) != current))
    totals = np.array([[getattr(here, quantity) for quantity in QUANTITIES]])
    return totals, moves, problem.values[moves] - problem.values[current[moves]]


def _error(objective: Objective, picks: Solution, *moves: int) -> float:
    return objective.choice(_moved(objective.problem, picks, moves)).error


def _moved(problem: Problem, picks: Solution, moves: Iterable[int]) -> Solution:
    changed = list(picks)
    for move in moves:
        group = int(problem.group_of[move])
        changed[group] = int(move - problem.starts[group])
    return tuple(changed)


_CALLS = 4000  # Evaluations of the true error for one choice
_SECONDS = 20.0  # Time limit of the integer programs of one choice


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
    """Return choices that meet all limits, the least of ``minimise`` first, then of the error; empty if there are none.

    Errors of options are added up first; this finds ``candidates`` solutions that differ in at least ``distance``
    groups (default: a twentieth of them). With ``error_of``, the error of an assignment with its cross terms, each of
    them, and a greedy one, is improved by exchanges with half of the `_CALLS`, the best with the rest; duplicates are
    dropped. ``seconds``: time limit of the integer programs, which then return their best so far; without reaching it,
    results are reproducible. Raises ValueError for a group without finite options.
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
    """Return solutions with added errors; where there are none, the nearest to one."""
    problem, limits = objective.problem, dict(objective.limits)
    solutions = [_least(objective, kept, limits, Deadline(seconds / 2))]
    for _ in range(3 if "error" in limits and not objective.exact else 0):
        # The limit on the error is one on the true error: what is added up may be so much larger or smaller.
        picks = solutions[-1]
        added = problem.choice(picks).error if picks is not None else 0.0
        if picks is None or not added > 0 or not objective.choice(picks).error > 0:
            break
        limits["error"] = objective.limits["error"] * added / objective.choice(picks).error
        solutions.append(_least(objective, kept, limits, Deadline(seconds / 8)))
    starts = list(dict.fromkeys(picks for picks in solutions if picks is not None))
    if not starts:
        return [nearest(problem, kept, problem.scales_of_limits(objective.limits), Deadline(seconds / 4))]
    few, _ = narrowed(problem, kept, problem.column(objective.minimise), limits)
    while len(starts) < candidates:
        differences = [Difference(picks, distance) for picks in starts]
        picks = _least(objective, few, limits, Deadline(seconds / 2 / candidates), differences)
        if picks is None:
            break
        starts.append(picks)
    return starts


def _least(
    objective: Objective, kept: Mask, limits: Totals, deadline: Deadline, differences: Sequence[Difference] = ()
) -> Solution | None:
    """Return the minimum of the minimised quantity within the limits, and of these the least error; errors added up."""
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
    """Return choices that no other beats in both quantities, ordered by the first.

    The epsilon-constraint method: the second quantity is minimised under ``points`` evenly spaced limits on the first,
    from its minimum to its value at the second's minimum. Other arguments and errors as in `choose`.
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
    choices = []
    for limit in np.linspace(*ends, max(points, 2)).tolist():
        objective = Objective(problem, {level: limit}, cost, error_of)
        picks = _least(objective, kept, objective.limits, Deadline(max(each.left, _SECONDS / points) / 4))
        if picks is None:
            continue
        if not objective.exact:
            picks = refine(objective, picks, _CALLS // max(points, 2))
        if objective.key(picks)[0] == 0:
            choices.append(objective.choice(picks))
    unbeaten: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (getattr(choice, level), getattr(choice, cost), choice.error)):
        if not unbeaten or getattr(choice, cost) < getattr(unbeaten[-1], cost):
            unbeaten.append(choice)
    return unbeaten


def closest(
    groups: Sequence[Group], limits: Totals, *, error_of: ErrorOf | None = None
) -> tuple[Choice, list[Quantity]]:
    """Return the choice whose largest relative excess over a limit is least, and the binding budgets.

    Binding are all budgets that no assignment meets alone and, of the others, an irreducible set: no assignment meets
    them all, but without any one of them some does (J. W. Chinneck, E. W. Dravnieks, *Locating minimal infeasible
    constraint sets*, ORSA J. Computing 3(2), 1991: the deletion filter), decided with errors added up. The rest are met
    too if that doesn't worsen the binding ones. No binding budgets: some assignment meets all, or time was up before
    any was known to bind. Of choices with the same excess, the one of least error. The excess over a budget of 0 is
    relative to a millionth of the largest possible sum. Arguments and errors as in `choose`.
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
    objective = Objective(problem, problem.scales_of_limits(limits), "error", error_of)
    picks = _closest_added(objective, binding, Deadline(_SECONDS))
    if not objective.exact:
        picks = refine(objective, picks, _CALLS)
    return objective.choice(picks), binding


def _closest_added(objective: Objective, binding: Sequence[Quantity], deadline: Deadline) -> Solution:
    """Return the closest choice with errors added up, the other budgets within their limits if possible.

    No excess is below that of the least sums of each quantity alone. Where one assignment reaches it, for instance
    where one budget is far out of reach, it is found exactly; otherwise the excess is the integer program's.
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
    """Return whether some assignment meets the limits; True if time is up before that is known."""
    if not limits:
        return True
    kept = problem.undominated(tuple(limits))
    return solve(problem, kept, np.zeros(len(problem.values)), limits, deadline) is not None or not deadline.left
