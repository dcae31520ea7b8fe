"""Random problems of choice, and exhaustive search."""

import itertools
import math
from collections.abc import Mapping

import numpy as np

from assay.precision.choice.problem import QUANTITIES, Choice, Group, Option, Problem, Quantity, Totals


class Form:
    """A quadratic form: half of the mean square of the sum of one term [samples] for each group's option."""

    def __init__(self, terms: Mapping[tuple[str, str], np.ndarray]) -> None:
        self.terms = terms

    def __call__(self, schemes: Mapping[str, str]) -> float:
        return float(np.mean(np.sum([self.terms[taken] for taken in schemes.items()], 0) ** 2) / 2)

    def of_all(self, groups: list[Group], picks: np.ndarray) -> np.ndarray:
        """The errors [n] of the options taken, picks [n, groups]."""
        several = [np.stack([self.terms[group.name, option.scheme] for option in group.options]) for group in groups]
        return np.mean(sum(terms[picks[:, place]] for place, terms in enumerate(several)) ** 2, 1) / 2


def random_problem(seed: int, groups: int = 6, options: int = 5, samples: int = 24) -> tuple[list[Group], Form]:
    """Groups whose options' errors span eight decades, and a quadratic form: half of the mean of (sum of t)^2.

    Every other group's t correlate with those of the group before.
    """
    rng = np.random.default_rng(seed)
    made: list[Group] = []
    terms: dict[tuple[str, str], np.ndarray] = {}
    for place in range(groups):
        size, scale = float(rng.integers(100, 10000)), 10 ** rng.uniform(-3, 0)
        taken = [Option("", 0.0, 2 * size, 0.0, 1e-3 * size, 1e-2 * size)]
        terms[f"u{place}", ""] = np.zeros(samples)
        for option in range(options - 1):
            term = rng.standard_normal(samples) * scale * 10 ** rng.uniform(-1, 1)
            if place and rng.random() < 0.5:
                term = term + terms[f"u{place - 1}", f"s{option}"] * rng.uniform(-1, 1)
            terms[f"u{place}", f"s{option}"] = term
            less = rng.uniform(0.3, 1.0, 2) * (1e-3 * size, 1e-2 * size)
            weight = float(np.ceil(size * rng.uniform(0.3, 1.9)))
            taken.append(Option(f"s{option}", float(np.mean(term**2) / 2), weight, 0.0, *map(float, less)))
        made.append(Group(f"u{place}", (f"u{place}.a", f"u{place}.b"), tuple(taken)))

    return made, Form(terms)


def added(groups: list[Group], schemes: Mapping[str, str]) -> float:
    """The sum of the errors of the options taken."""
    return math.fsum(
        option.error for group in groups for option in group.options if option.scheme == schemes[group.name]
    )


def whole(groups: list[Group], quantity: Quantity = "bytes") -> float:
    """The total of a model left as it is."""
    return math.fsum(getattr(group.options[0], quantity) for group in groups)


def everything(groups: list[Group], error_of: Form | None) -> list[Choice]:
    """Every assignment."""
    problem = Problem(groups)
    every = itertools.product(*(range(len(group.options)) for group in groups))
    return [problem.choice(picks, error_of(problem.schemes(picks)) if error_of else None) for picks in every]


def best(choices: list[Choice], budgets: Totals, minimise: Quantity) -> float | None:
    """The least of a quantity within budgets, None if nothing fits."""
    return min((getattr(choice, minimise) for choice in choices if within(choice, budgets)), default=None)


def within(choice: Choice, budgets: Totals) -> bool:
    """Whether all budgets hold."""
    return all(getattr(choice, name) <= limit * (1 + 1e-12) for name, limit in budgets.items())


def budgets_of(groups: list[Group], seed: int) -> tuple[Totals, Quantity]:
    """One of four questions: least error under bytes, and under time too; least bytes, least time under error."""
    size, step = whole(groups), whole(groups, "decode")
    middling = math.fsum(float(np.median([option.error for option in group.options])) for group in groups)
    kinds: list[tuple[Totals, Quantity]] = [
        ({"bytes": 0.6 * size}, "error"),
        ({"bytes": 0.65 * size, "decode": 0.8 * step}, "error"),
        ({"error": 0.3 * middling}, "bytes"),
        ({"error": 0.3 * middling, "bytes": 0.9 * size}, "decode"),
    ]
    return kinds[seed % len(kinds)]


def optimum(groups: list[Group], error_of: Form, budgets: Totals, minimise: Quantity) -> float | None:
    """The least of a quantity within budgets by exhaustive search."""
    problem = Problem(groups)
    picks = np.stack(np.meshgrid(*(np.arange(len(group.options)) for group in groups), indexing="ij"), -1)
    picks = picks.reshape(-1, len(groups))
    totals = problem.values[picks + problem.starts[:-1]].sum(1)
    totals[:, 0] = error_of.of_all(groups, picks)
    for name, limit in budgets.items():
        totals = totals[totals[:, QUANTITIES.index(name)] <= limit * (1 + 1e-12)]
    return min(totals[:, QUANTITIES.index(minimise)].tolist(), default=None)
