"""The choice of an assignment under budgets, against exhaustive search, random search and a greedy one.

Budgets that cannot be met, and the Pareto front.
"""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.precision.choice import choosing, program
from assay.precision.choice.choosing import choose, closest, front
from assay.precision.choice.problem import Group, Option, Problem, Quantity, Totals
from tests.precision.random_problems import (
    Form,
    added,
    best,
    budgets_of,
    everything,
    optimum,
    random_problem,
    whole,
    within,
)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_with_added_errors_the_choice_is_the_best_of_all(first: int) -> None:
    for seed in range(first, first + 20):
        groups, _ = random_problem(seed, groups=4)
        budgets, minimise = budgets_of(groups, seed)
        wanted = best(everything(groups, None), budgets, minimise)
        found = choose(groups, budgets, minimise=minimise, candidates=1)
        assert (wanted is None) == (not found)
        if wanted is not None:
            assert getattr(found[0], minimise) == pytest.approx(wanted, rel=1e-9, abs=1e-15), seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(12), *(pytest.param(range(n, n + 25), marks=pytest.mark.evidence) for n in range(0, 200, 25))],
    ids=lambda seeds: str(seeds.start) if len(seeds) > 12 else "few",
)
def test_refined_choices_are_the_best_of_all_under_the_quadratic_form(seeds: range) -> None:
    equal = count = 0
    for seed in seeds:
        groups, error_of = random_problem(seed, options=4)
        budgets, minimise = budgets_of(groups, seed)
        wanted = optimum(groups, error_of, budgets, minimise)
        found = choose(groups, budgets, minimise=minimise, error_of=error_of)
        assert all(within(choice, budgets) for choice in found)
        assert found or wanted is None
        if wanted is not None:
            reached = getattr(found[0], minimise)
            assert reached >= wanted * (1 - 1e-9)
            count += 1
            equal += reached <= wanted * (1 + 1e-9)
    print(f"{equal} of {count} equal the optimum")
    assert count >= 0.8 * len(seeds)
    assert equal >= 0.95 * count


@pytest.mark.parametrize("seed", range(6))
def test_no_random_and_no_greedy_choice_is_better(seed: int) -> None:
    groups, error_of = random_problem(seed, groups=30)
    limit = 0.6 * whole(groups)
    (found, *_) = choose(groups, {"bytes": limit}, error_of=error_of, candidates=4)
    problem, rng = Problem(groups), np.random.default_rng(seed)
    picks = np.stack([rng.integers(len(group.options), size=2000) for group in groups], 1)
    fits = problem.column("bytes")[picks + problem.starts[:-1]].sum(1) <= limit
    assert (error_of.of_all(groups, picks[fits]) >= found.error).all()
    assert greedy(problem, limit, error_of) >= found.error


def greedy(problem: Problem, limit: float, error_of: Form) -> float:
    """From the model as it is, the exchange that frees most bytes for its error, until the bytes fit."""
    picks = [0] * len(problem.groups)
    while problem.choice(tuple(picks)).bytes > limit:
        now = problem.choice(tuple(picks), error_of(problem.schemes(tuple(picks))))
        worth = {}
        for place, group in enumerate(problem.groups):
            for option in range(len(group.options)):
                changed = (*picks[:place], option, *picks[place + 1 :])
                freed = now.bytes - problem.choice(changed).bytes
                if freed > 0:
                    worth[changed] = (error_of(problem.schemes(changed)) - now.error) / freed
        picks = list(min(worth, key=lambda changed: worth[changed]))
    return error_of(problem.schemes(tuple(picks)))


def test_candidates_differ_in_as_many_units_as_asked() -> None:
    groups, _ = random_problem(1, groups=20)
    found = choose(groups, {"bytes": 0.6 * whole(groups)}, candidates=5, distance=4)
    assert len(found) == 5
    for one, other in itertools.combinations(found, 2):
        assert sum(one.schemes[group.name] != other.schemes[group.name] for group in groups) >= 4
    assert [choice.error for choice in found] == sorted(choice.error for choice in found)


def test_errors_of_ten_decades_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for place in range(12):
        good = Option("good", 1e-9 * float(rng.uniform(1, 2)), 8.0)
        groups.append(Group(f"u{place}", (), (Option("", 0.0, 16.0), good, Option("bad", 10.0, 4.0))))
    limit = 16.0 * 12 - 8 * 6
    (found,) = choose(groups, {"bytes": limit}, candidates=1)
    least = math.fsum(sorted(group.options[1].error for group in groups)[:6])
    assert found.error == pytest.approx(least, rel=1e-12)
    assert found.bytes <= limit


def test_an_option_that_makes_infinities_is_never_taken() -> None:
    options = (Option("", 0.0, 4.0), Option("overflows", math.inf, 1.0), Option("nan", math.nan, 0.5))
    group = Group("u", ("u",), (*options, Option("fp8", 0.1, 2.0)))
    (found, *_) = choose([group], {}, minimise="bytes")
    assert found.schemes == {"u": "fp8"}
    assert choose([group], {"bytes": 1.0}) == []
    with pytest.raises(ValueError, match=r"got none in 'u'"):
        choose([Group("u", ("u",), options[1:])], {})


def test_dominated_options_are_dropped() -> None:
    """Only an option that none beats in every quantity asked about stays; of equals, the first."""
    same, worse, better = Option("", 0.0, 4.0), Option("worse", 0.2, 3.0), Option("better", 0.1, 2.0, decode=9.0)
    problem = Problem([Group("u", ("u",), (same, same, worse, better))])
    assert problem.undominated(("error", "bytes")).tolist() == [True, False, False, True]
    assert problem.undominated(("error", "bytes", "decode")).tolist() == [True, False, True, True]
    assert problem.undominated(("decode",)).tolist() == [True, False, False, False]


numbers = st.floats(0, 1e6, allow_nan=False).map(lambda value: float(f"{value:.6g}"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=4), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_budgets_hold_and_nothing_that_fits_is_better(
    rows: list[list[tuple[float, float, float]]], share: float, other: float
) -> None:
    groups = [
        Group(f"u{place}", (), tuple(Option(f"s{i}", e, b, decode=t) for i, (e, b, t) in enumerate(options)))
        for place, options in enumerate(rows)
    ]
    budgets: Totals = {
        "bytes": share * math.fsum(max(option.bytes for option in group.options) for group in groups),
        "decode": other * math.fsum(max(option.decode for option in group.options) for group in groups),
    }
    found = choose(groups, budgets, candidates=3)
    wanted = best(everything(groups, None), budgets, "error")
    assert all(within(choice, budgets) for choice in found)
    assert (wanted is None) == (not found)
    if wanted is not None:
        assert found[0].error == pytest.approx(wanted, rel=1e-6, abs=1e-12)
        assert found[0].error == added(groups, found[0].schemes)


def test_the_answer_is_the_same_at_every_run() -> None:
    groups, error_of = random_problem(5, groups=12)
    budgets = {"bytes": 0.6 * whole(groups)}
    assert choose(groups, budgets, error_of=error_of) == choose(groups, budgets, error_of=error_of)


def test_what_was_found_before_the_time_was_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a problem that isn't proved by its likeliest options, with no time for the others: the best of the likeliest;
    with time, that of all."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(1, 2, (400, 4))
    groups = [
        Group(f"u{i}", (), tuple(Option(f"s{j}", float(1 / size), float(size)) for j, size in enumerate(row)))
        for i, row in enumerate(sizes)
    ]
    problem = Problem(groups)
    limits: Totals = {"bytes": 0.9 * float(sizes.max(1).sum())}
    kept, costs = np.ones(1600, dtype=bool), problem.column("error")
    whole = program.solve(problem, kept, costs, limits, program.Deadline(60.0))
    likely, _ = program.narrowed(problem, kept, costs, limits)
    assert likely.sum() < 1600
    improved = program._improved
    monkeypatch.setattr(program, "narrowed", lambda *_: (likely, 0.0))
    monkeypatch.setattr(program, "_improved", lambda *given: None if given[1] is kept else improved(*given))
    hurried = program.solve(problem, kept, costs, limits, program.Deadline(60.0))
    assert whole is not None
    assert hurried is not None
    errors = [problem.choice(picks).error for picks in (whole, hurried)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


def test_a_large_problem_takes_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    """2,000 groups of 30 options: under 20 s of processor time, the budget kept, the error at most 1e-4 above a dual
    bound; and the solver prints nothing."""
    rng = np.random.default_rng(0)
    groups = []
    for place in range(2000):
        size, sensitivity = 10 ** rng.uniform(6, 8), 10 ** rng.uniform(-8, -3)
        bits = rng.choice([3.0, 4.0, 4.25, 4.5, 6.0, 8.0, 8.25], 29) * rng.uniform(1, 1.02, 29)
        errors = sensitivity * 4.0 ** (4 - bits) * rng.lognormal(0, 0.5, 29)
        options = [
            Option(f"s{i}", float(e), float(b * size / 8)) for i, (e, b) in enumerate(zip(errors, bits, strict=True))
        ]
        groups.append(Group(f"u{place}", (f"u{place}",), (Option("", 0.0, 2 * size), *options)))
    limit = 0.3 * whole(groups)
    started = time.process_time()
    found = choose(groups, {"bytes": limit}, seconds=120.0)
    spent = time.process_time() - started
    print(f"{spent:.1f} s, {len(found)} candidates")
    assert spent < 20
    assert len(found) == 8
    assert all(choice.bytes <= limit for choice in found)
    assert found[0].error <= (1 + 1e-4) * dual_bound(Problem(groups), limit)
    assert "Highs" not in capfd.readouterr().out


def dual_bound(problem: Problem, limit: float) -> float:
    """The best Lagrangian bound on the least error within bytes: for each price a sum of minima; no integer program."""
    errors, sizes = problem.column("error"), problem.column("bytes")
    prices = np.geomspace(1e-18, 1e-8, 400)
    values = [
        np.minimum.reduceat(errors + price * sizes, problem.starts[:-1]).sum() - price * limit for price in prices
    ]
    near = prices[int(np.argmax(values))]
    finer = np.geomspace(near / 1.06, near * 1.06, 400)
    return float(
        max(np.minimum.reduceat(errors + price * sizes, problem.starts[:-1]).sum() - price * limit for price in finer)
    )


def test_budgets_that_cannot_be_met_are_named() -> None:
    groups, _ = random_problem(2, groups=8)
    smallest = math.fsum(min(option.bytes for option in group.options) for group in groups)
    found, binding = closest(groups, {"error": 1e9, "bytes": 0.9 * smallest, "decode": 1e9})
    assert binding == ["bytes"]
    assert found.bytes == smallest
    together = {"error": 0.0, "bytes": 0.5 * whole(groups), "decode": 1e9}
    assert choose(groups, together) == []
    assert closest(groups, together)[1] == ["error", "bytes"]


@pytest.mark.parametrize("seed", range(8))
def test_the_closest_choice_has_the_least_relative_excess(seed: int) -> None:
    groups, _ = random_problem(seed, groups=4)
    error = 0.05 * math.fsum(max(option.error for option in group.options) for group in groups)
    budgets = {"error": error / 50, "bytes": 0.45 * whole(groups), "decode": 0.5 * whole(groups, "decode")}
    found, binding = closest(groups, budgets)
    every = everything(groups, None)
    least = min(choice.excess(budgets) for choice in every)
    assert found.excess(budgets) == pytest.approx(least, rel=1e-6, abs=1e-12)
    assert bool(binding) == (best(every, budgets, "error") is None)
    only = {name: limit for name, limit in budgets.items() if name in binding}
    assert not binding or all(choice.excess(only) for choice in every)
    alone = {name for name, limit in budgets.items() if all(choice.excess({name: limit}) for choice in every)}
    assert alone <= set(only)
    for name in set(only) - alone:
        rest = {other: limit for other, limit in only.items() if other != name and other not in alone}
        assert any(not choice.excess(rest) for choice in every)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [0.0, 1e-9, 1.0])
def test_far_out_of_reach_the_least_is_the_closest(seed: int, limit: float) -> None:
    groups, error_of = random_problem(seed, groups=5)
    found, binding = closest(groups, {"bytes": limit}, error_of=error_of)
    every = everything(groups, error_of)
    assert binding == ["bytes"]
    assert found.bytes == min(choice.bytes for choice in every)
    assert found.error == min(choice.error for choice in every if choice.bytes == found.bytes)


@pytest.mark.parametrize("seed", range(6))
def test_two_budgets_far_out_of_reach_are_missed_by_the_least(seed: int) -> None:
    groups, error_of = random_problem(seed, groups=4)
    limits = {"bytes": 1e-5 * whole(groups), "decode": 0.8e-5 * whole(groups, "decode")}
    found, binding = closest(groups, limits, error_of=error_of)
    least = min(choice.excess(limits) for choice in everything(groups, None))
    assert binding == ["bytes", "decode"]
    assert found.excess(limits) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(("decode", "names"), [(1e-9, ["decode"]), (1e9, [])])
def test_what_is_impossible_alone_is_named_beside_what_is_together(decode: float, names: list[str]) -> None:
    groups, _ = random_problem(2, groups=8)
    _, binding = closest(groups, {"error": 0.0, "bytes": 0.5 * whole(groups), "decode": decode})
    assert binding == ["error", "bytes", *names]


def test_under_a_tiny_error_the_model_as_it_is_fits() -> None:
    options = (Option("", 0.0, 2e9), Option("fp8", 1e-4, 1e9), Option("breaks", math.inf, 1.0))
    groups = [Group(f"u{place}", (f"u{place}",), options) for place in range(8)]
    for error_of in (None, lambda schemes: 1.5 * added(groups, schemes)):
        (found,) = choose(groups, {"error": 1e-12}, minimise="bytes", error_of=error_of)
        assert set(found.schemes.values()) == {""}
    assert choose(groups, {"error": 1e-12, "bytes": 1e10}) == []
    assert closest(groups, {"error": 1e-12})[1] == []


powers = st.floats(-30, 30).map(lambda power: 10**power)
errors = st.floats(-15, 15).map(lambda power: 10**power) | st.sampled_from([0.0, math.inf, math.nan])
middling = st.floats(1, 3e12) | powers
budgets = st.fixed_dictionaries({"error": powers}, optional={"bytes": middling, "decode": powers})


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(errors, st.floats(1, 1e12), st.floats(1e-9, 1)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    budgets,
    st.sampled_from(["error", "bytes"]),
    st.booleans(),
)
def test_budgets_and_errors_of_any_size(
    rows: list[list[tuple[float, float, float]]], limits: Totals, minimise: Quantity, crossed: bool
) -> None:
    groups = [
        Group(
            f"u{place}", (), (Option("", 0.0, 1e12), *(Option(f"s{i}", e, b, 0.0, t, t) for i, (e, b, t) in numbered))
        )
        for place, numbered in enumerate(enumerate(options) for options in rows)
    ]
    error_of = (lambda schemes: 1.5 * added(groups, schemes)) if crossed else None
    every = [choice for choice in everything(groups, error_of) if math.isfinite(choice.error)]
    wanted = best(every, limits, minimise)
    found = choose(groups, limits, minimise=minimise, error_of=error_of, candidates=3)
    assert all(within(choice, limits) for choice in found)
    assert (wanted is None) == (not found)
    assert wanted is None or getattr(found[0], minimise) <= wanted * (1 + 1e-6)
    nearest, binding = closest(groups, limits, error_of=error_of)
    least = min(choice.excess(limits) for choice in every)
    assert nearest.excess(limits) <= least * (1 + 1e-6) + 1e-9
    assert crossed or bool(binding) == bool(least)


def test_budgets_that_can_be_met_bind_nothing() -> None:
    groups, _ = random_problem(3)
    budgets = {"bytes": 0.7 * whole(groups)}
    found, binding = closest(groups, budgets)
    assert binding == []
    assert found.error == pytest.approx(choose(groups, budgets)[0].error, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["bytes", "decode"])
def test_the_front_is_of_the_best(seed: int, level: Quantity) -> None:
    groups, error_of = random_problem(seed, groups=4)
    found = front(groups, minimise=(level, "error"), points=6, error_of=error_of)
    every = everything(groups, error_of)
    for choice in found:
        assert not any(
            getattr(other, level) <= getattr(choice, level) and other.error < choice.error * (1 - 1e-9)
            for other in every
        )
    assert getattr(found[0], level) == pytest.approx(min(getattr(choice, level) for choice in every))
    assert found[-1].error == 0
    errors = [choice.error for choice in found]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors) >= 4


def test_no_budget_binds_that_there_was_no_time_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_SECONDS", 0.0)
    options = (Option("", 0.0, bytes=4.0), Option("a", 1.0, bytes=2.0), Option("b", 3.0, bytes=1.0))
    groups = [Group(str(number), (str(number),), options) for number in range(400)]
    assert closest(groups, {"bytes": 1200.0, "error": 500.0})[1] == []
