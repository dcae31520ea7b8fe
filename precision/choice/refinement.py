"""Exchanges of one or two options, as long as they make a choice better under the true error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from assay.precision.choice.problem import QUANTITIES, Choice, ErrorOf, Floats, Picks, Problem, Quantity

__all__ = ["Judge", "refine"]

_PAIRED = 300
"""Single exchanges of which pairs are formed."""

Key = tuple[float, float, float]


class Judge:
    """What a choice is worth: limits first, then what is minimised, then the error. Remembers what it was told."""

    def __init__(
        self, problem: Problem, limits: Mapping[Quantity, float], minimise: Quantity, error_of: ErrorOf | None
    ) -> None:
        self.problem = problem
        self.limits = dict(limits)
        self.minimise: Quantity = minimise
        self.exact = error_of is None
        """Errors add up, so that the integer program has the last word."""
        self.calls = 0
        self._error_of = error_of
        self._known: dict[Picks, Choice] = {}

    def choice(self, picks: Picks) -> Choice:
        """The totals, with the true error."""
        if picks not in self._known:
            error = None
            if self._error_of is not None:
                self.calls += 1
                error = float(self._error_of(self.problem.schemes(picks)))
            self._known[picks] = self.problem.choice(picks, error)
        return self._known[picks]

    def key(self, picks: Picks) -> Key:
        """Less is better: the largest relative excess over a limit, the quantity that is minimised, the error."""
        choice = self.choice(picks)
        return choice.excess(self.limits), getattr(choice, self.minimise), choice.error

    def estimated(self, totals: Floats) -> Floats:
        """The keys of totals [n, 5], [n, 3]."""
        excess = np.zeros(len(totals))
        for quantity, limit in self.limits.items():
            over = totals[:, QUANTITIES.index(quantity)] - limit * (1 + 1e-12)
            excess = np.maximum(excess, np.where(over > 0, over / (limit or 1e-300), 0.0))
        return np.stack([excess, totals[:, QUANTITIES.index(self.minimise)], totals[:, 0]], 1)


def refine(judge: Judge, start: Picks, calls: int) -> Picks:
    """A choice that no exchange of one or two options makes better, as far as ``calls`` of the true error reach.

    Exchanges are tried in the order of what they promise: the true changes of single ones where there are calls enough
    for all, sums of these for pairs; the options' own errors otherwise.
    """
    picks, last = start, judge.calls + calls
    while judge.calls < last:
        better = _step(judge, picks, last)
        if better is None:
            break
        picks = better
    return picks


def _step(judge: Judge, picks: Picks, last: int) -> Picks | None:
    problem = judge.problem
    current = problem.rows(picks)
    moves = np.flatnonzero(problem.finite)
    moves = moves[moves != current[problem.unit_of[moves]]]
    if not len(moves):
        return None
    here = judge.choice(picks)
    totals = np.array([getattr(here, quantity) for quantity in QUANTITIES])
    changes = problem.values[moves] - problem.values[current[problem.unit_of[moves]]]
    measured = len(moves) <= (last - judge.calls) // 2
    if measured:
        changes[:, 0] = [judge.choice(_moved(problem, picks, (move,))).error - here.error for move in moves]
    keys = judge.estimated(totals + changes)
    order = np.lexsort(keys.T[::-1])
    found = _first_better(judge, picks, [(int(moves[place]),) for place in order], keys[order], last)
    if found is not None:
        return found
    some = _promising(judge, changes) if len(moves) > _PAIRED else np.arange(len(moves))
    first, second = np.triu_indices(len(some), 1)
    first, second = some[first], some[second]
    apart = problem.unit_of[moves[first]] != problem.unit_of[moves[second]]
    first, second = first[apart], second[apart]
    keys = judge.estimated(totals + changes[first] + changes[second])
    order = np.lexsort(keys.T[::-1])[: max(last - judge.calls, 0)]
    pairs = [(int(moves[first[place]]), int(moves[second[place]])) for place in order]
    return _first_better(judge, picks, pairs, keys[order], last)


def _first_better(
    judge: Judge, picks: Picks, exchanges: list[tuple[int, ...]], keys: Floats, last: int
) -> Picks | None:
    """The first exchange that is better in truth. Only errors are estimated: what is worse without them isn't tried."""
    now = judge.key(picks)
    others = [quantity for quantity in judge.limits if quantity != "error"]
    for exchange, estimate in zip(exchanges, keys, strict=True):
        if judge.minimise != "error" and now[0] == 0 and estimate[1] > now[1]:
            continue
        changed = _moved(judge.problem, picks, exchange)
        if others and judge.problem.choice(changed, 0.0).excess({name: judge.limits[name] for name in others}) > now[0]:
            continue
        if judge.calls >= last:
            return None
        if judge.key(changed) < now:
            return changed
    return None


def _promising(judge: Judge, changes: Floats) -> NDArray[np.int64]:
    """Exchanges that lower the error most, and those that free most of a limited quantity for their error."""
    half = _PAIRED // 2
    chosen = [np.argsort(changes[:, 0], kind="stable")[:half]]
    limited = [quantity for quantity in {*judge.limits, judge.minimise} if quantity != "error"]
    for quantity in sorted(limited):
        freed = -changes[:, QUANTITIES.index(quantity)]
        worth = np.where(freed > 0, np.maximum(changes[:, 0], 0.0) / np.maximum(freed, 1e-300), np.inf)
        chosen.append(np.argsort(worth, kind="stable")[: half // len(limited)])
    return np.unique(np.concatenate(chosen))


def _moved(problem: Problem, picks: Picks, moves: tuple[int, ...]) -> Picks:
    changed = list(picks)
    for move in moves:
        unit = int(problem.unit_of[move])
        changed[unit] = int(move - problem.starts[unit])
    return tuple(changed)
