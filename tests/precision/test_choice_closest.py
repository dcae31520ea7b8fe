"""Budgets that cannot be met, and the Pareto front."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.precision.choice import choosing
from assay.precision.choice.choosing import choose, closest, front
from assay.precision.choice.problem import Group, Option, Quantity, Totals
from tests.precision.random_problems import added, best, everything, random_problem, whole, within


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
