"""Budgets that cannot be met, and the Pareto front."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.precision.choice import Budgets, Option, Quantity, Unit, choose, closest, front
from tests.precision.random_problems import added, best, everything, random_problem, whole, within


def test_budgets_that_cannot_be_met_are_named() -> None:
    """Of three budgets one can't be met by itself; another two can't be met together, and the choice misses least."""
    units, _ = random_problem(2, units=8)
    smallest = math.fsum(min(option.bytes for option in unit.options) for unit in units)
    found, binding = closest(units, Budgets(max_error=1e9, max_bytes=0.9 * smallest, max_decode=1e9))
    assert binding == ("max_bytes",)
    assert found.bytes == smallest
    together = Budgets(max_error=0.0, max_bytes=0.5 * whole(units), max_decode=1e9)
    assert choose(units, together) == []
    assert closest(units, together)[1] == ("max_error", "max_bytes")


@pytest.mark.parametrize("seed", range(8))
def test_the_closest_choice_has_the_least_relative_excess(seed: int) -> None:
    """No assignment misses its worst budget by less, and without any binding budget all others can be met."""
    units, _ = random_problem(seed, units=4)
    error = 0.05 * math.fsum(max(option.error for option in unit.options) for unit in units)
    budgets = Budgets(max_error=error / 50, max_bytes=0.45 * whole(units), max_decode=0.5 * whole(units, "decode"))
    found, binding = closest(units, budgets)
    every = everything(units, None)
    least = min(choice.excess(budgets.limits) for choice in every)
    assert found.excess(budgets.limits) == pytest.approx(least, rel=1e-6, abs=1e-12)
    assert bool(binding) == (best(every, budgets, "error") is None)
    only = {name: limit for name, limit in budgets.limits.items() if f"max_{name}" in binding}
    assert not binding or all(choice.excess(only) for choice in every)
    alone = {name for name, limit in budgets.limits.items() if all(choice.excess({name: limit}) for choice in every)}
    assert alone <= set(only)
    for name in set(only) - alone:
        rest = {other: limit for other, limit in only.items() if other != name and other not in alone}
        assert any(not choice.excess(rest) for choice in every)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [0.0, 1e-9, 1.0])
def test_far_out_of_reach_the_least_is_the_closest(seed: int, limit: float) -> None:
    """Under a budget that nothing comes near, the choice has the fewest bytes, and of those the least true error."""
    units, error_of = random_problem(seed, units=5)
    found, binding = closest(units, Budgets(max_bytes=limit), error_of=error_of)
    every = everything(units, error_of)
    assert binding == ("max_bytes",)
    assert found.bytes == min(choice.bytes for choice in every)
    assert found.error == min(choice.error for choice in every if choice.bytes == found.bytes)


@pytest.mark.parametrize("seed", range(6))
def test_two_budgets_far_out_of_reach_are_missed_by_the_least(seed: int) -> None:
    """The larger of two huge relative excesses is the least that any assignment has; both budgets are named."""
    units, error_of = random_problem(seed, units=4)
    limits = Budgets(max_bytes=1e-5 * whole(units), max_decode=0.8e-5 * whole(units, "decode"))
    found, binding = closest(units, limits, error_of=error_of)
    least = min(choice.excess(limits.limits) for choice in everything(units, None))
    assert binding == ("max_bytes", "max_decode")
    assert found.excess(limits.limits) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(("decode", "names"), [(1e-9, ["decode"]), (1e9, [])])
def test_what_is_impossible_alone_is_named_beside_what_is_together(decode: float, names: list[str]) -> None:
    """Two budgets can't be met together; a third one that can't be met by itself is named as well."""
    units, _ = random_problem(2, units=8)
    _, binding = closest(units, Budgets(max_error=0.0, max_bytes=0.5 * whole(units), max_decode=decode))
    assert binding == tuple(f"max_{name}" for name in ["error", "bytes", *names])


def test_under_a_tiny_error_the_model_as_it_is_fits() -> None:
    """Where nothing but the model as it is keeps the error, it is found, though others are looked for near it."""
    options = (Option("", 0.0, 2e9), Option("fp8", 1e-4, 1e9), Option("breaks", math.inf, 1.0))
    units = [Unit(f"u{place}", (f"u{place}",), options) for place in range(8)]
    for error_of in (None, lambda schemes: 1.5 * added(units, schemes)):
        (found,) = choose(units, Budgets(max_error=1e-12), minimise="bytes", error_of=error_of)
        assert set(found.schemes.values()) == {""}
    assert choose(units, Budgets(max_error=1e-12, max_bytes=1e10)) == []
    assert closest(units, Budgets(max_error=1e-12))[1] == ()


powers = st.floats(-30, 30).map(lambda power: 10**power)
errors = st.floats(-15, 15).map(lambda power: 10**power) | st.sampled_from([0.0, math.inf, math.nan])
middling = st.none() | st.floats(1, 3e12) | powers
budgets = st.builds(Budgets, powers, middling, st.none(), st.none(), st.none() | powers)


@settings(max_examples=150, deadline=None)
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
    rows: list[list[tuple[float, float, float]]], limits: Budgets, minimise: Quantity, crossed: bool
) -> None:
    """Over 60 decades, infinities among them: what is chosen keeps the budgets and is the best, or the closest is."""
    units = [
        Unit(f"u{place}", (), (Option("", 0.0, 1e12), *(Option(f"s{i}", e, b, 0.0, t, t) for i, (e, b, t) in numbered)))
        for place, numbered in enumerate(enumerate(options) for options in rows)
    ]
    error_of = (lambda schemes: 1.5 * added(units, schemes)) if crossed else None
    every = [choice for choice in everything(units, error_of) if math.isfinite(choice.error)]
    wanted = best(every, limits, minimise)
    found = choose(units, limits, minimise=minimise, error_of=error_of, candidates=3)
    assert all(within(choice, limits) for choice in found)
    assert (wanted is None) == (not found)
    assert wanted is None or getattr(found[0], minimise) <= wanted * (1 + 1e-6)
    nearest, binding = closest(units, limits, error_of=error_of)
    least = min(choice.excess(limits.limits) for choice in every)
    assert nearest.excess(limits.limits) <= least * (1 + 1e-6) + 1e-9
    assert crossed or bool(binding) == bool(least)


def test_budgets_that_can_be_met_bind_nothing() -> None:
    """Then the closest is the choice of least error."""
    units, _ = random_problem(3)
    budgets = Budgets(max_bytes=0.7 * whole(units))
    found, binding = closest(units, budgets)
    assert binding == ()
    assert found.error == pytest.approx(choose(units, budgets)[0].error, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["bytes", "decode"])
def test_the_front_is_of_the_best(seed: int, level: Quantity) -> None:
    """No assignment at all beats a point of the front in both quantities, and the ends are the ends."""
    units, error_of = random_problem(seed, units=4)
    found = front(units, minimise=(level, "error"), points=6, error_of=error_of)
    every = everything(units, error_of)
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
