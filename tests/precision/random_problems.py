"""Random problems of choice, and exhaustive search."""

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from assay.precision.choice import Budgets, Choice, Option, Quantity, Unit
from assay.precision.choice.problem import QUANTITIES, Problem

Form = Callable[[Mapping[str, str]], float]


def random_problem(seed: int, units: int = 6, options: int = 5, samples: int = 24) -> tuple[list[Unit], Form]:
    """Units whose options' errors span eight decades, and a quadratic form: half of the mean of (sum of t)^2.

    Every other unit's t correlate with those of the unit before.
    """
    rng = np.random.default_rng(seed)
    made: list[Unit] = []
    terms: dict[tuple[str, str], np.ndarray] = {}
    for place in range(units):
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
        made.append(Unit(f"u{place}", (f"u{place}.a", f"u{place}.b"), tuple(taken)))

    def error_of(schemes: Mapping[str, str]) -> float:
        return float(np.mean(np.sum([terms[taken] for taken in schemes.items()], 0) ** 2) / 2)

    return made, error_of


def added(units: list[Unit], schemes: Mapping[str, str]) -> float:
    """The sum of the errors of the options taken."""
    return math.fsum(option.error for unit in units for option in unit.options if option.scheme == schemes[unit.name])


def whole(units: list[Unit], quantity: Quantity = "bytes") -> float:
    """The total of a model left as it is."""
    return math.fsum(getattr(unit.options[0], quantity) for unit in units)


def everything(units: list[Unit], error_of: Form | None) -> list[Choice]:
    """Every assignment."""
    problem = Problem(units)
    found = []
    for picks in itertools.product(*(range(len(unit.options)) for unit in units)):
        error = error_of(problem.schemes(picks)) if error_of else None
        found.append(problem.choice(picks, error))
    return found


def best(choices: list[Choice], budgets: Budgets, minimise: Quantity) -> float | None:
    """The least of a quantity within budgets, None if nothing fits."""
    fit = [getattr(choice, minimise) for choice in choices if within(choice, budgets)]
    return min(fit) if fit else None


def within(choice: Choice, budgets: Budgets) -> bool:
    """Whether all budgets hold."""
    return all(getattr(choice, name) <= limit * (1 + 1e-12) for name, limit in budgets.limits.items())


def budgets_of(units: list[Unit], seed: int) -> tuple[Budgets, Quantity]:
    """One of four questions: least error under bytes, and under time too; least bytes, least time under error."""
    size, step = whole(units), whole(units, "decode")
    middling = math.fsum(float(np.median([option.error for option in unit.options])) for unit in units)
    kinds: list[tuple[Budgets, Quantity]] = [
        (Budgets(max_bytes=0.6 * size), "error"),
        (Budgets(max_bytes=0.65 * size, max_decode=0.8 * step), "error"),
        (Budgets(max_error=0.3 * middling), "bytes"),
        (Budgets(max_error=0.3 * middling, max_bytes=0.9 * size), "decode"),
    ]
    return kinds[seed % len(kinds)]


def optimum(units: list[Unit], error_of: Form, budgets: Budgets, minimise: Quantity) -> float | None:
    """The least of a quantity within budgets by exhaustive search, asking only for the errors that matter."""
    problem = Problem(units)
    picks = np.stack(np.meshgrid(*(np.arange(len(unit.options)) for unit in units), indexing="ij"), -1)
    picks = picks.reshape(-1, len(units))
    totals = problem.values[picks + problem.starts[:-1]].sum(1)
    limits = {name: limit for name, limit in budgets.limits.items() if name != "error"}
    for name, limit in limits.items():
        fits = totals[:, QUANTITIES.index(name)] <= limit * (1 + 1e-12)
        picks, totals = picks[fits], totals[fits]
    errors = (error_of(problem.schemes(tuple(map(int, row)))) for row in picks)
    if minimise == "error":
        return min(errors, default=None)
    order = np.argsort(totals[:, QUANTITIES.index(minimise)], kind="stable")
    for place in order:
        choice = problem.choice(tuple(map(int, picks[place])), error_of(problem.schemes(tuple(map(int, picks[place])))))
        if within(choice, budgets):
            return float(getattr(choice, minimise))
    return None
