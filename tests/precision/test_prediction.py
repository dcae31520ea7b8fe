"""The quadratic form from products whose truth is known, and the interval around it."""

import math

import numpy as np
import pytest

from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.prediction.quadratic_form import Key, Products, QuadraticForm

DRAW = np.random.default_rng(0)


def products(keys: list[Key], sums: np.ndarray, squares: np.ndarray, thinning: float = 1.0) -> Products:
    return Products(tuple(keys), sums, squares, np.full(len(keys), thinning), np.zeros(len(keys)))


def independent(sites: int, count: int, sizes: np.ndarray) -> Products:
    """Sites whose terms are independent: their sums are normal with the squares as variances."""
    squares = np.tile((sizes**2)[:, None], (1, count))
    keys: list[Key] = [(f"site{i}", "part") for i in range(sites)]
    return products(keys, DRAW.normal(size=(sites, count)) * sizes[:, None], squares)


@pytest.mark.parametrize("count", [8, 32, 128])
def test_independent_errors_add_up(count: int) -> None:
    sizes = np.geomspace(0.1, 10, 40)
    form = QuadraticForm(independent(40, count, sizes))
    exact = count * float((sizes**2).sum())
    assert form.of([(f"site{i}", "part") for i in range(40)]) == pytest.approx(exact, rel=0.15)


def test_a_bias_is_believed() -> None:
    plain = independent(30, 64, np.ones(30))
    sums, squares = plain.sums.copy(), plain.squares.copy()
    sums[3] = 20.0  # four hundred terms of 1/20 of the squares each, all of one sign
    form = QuadraticForm(products(list(plain.keys), sums, squares))
    assert form.of([("site3", "part")]) == pytest.approx(64 * 400, rel=0.01)
    assert form.of([("site4", "part")]) == pytest.approx(64, rel=0.5)


def test_one_change_at_two_places_is_one_change() -> None:
    plain = independent(6, 64, np.ones(6))
    sums = plain.sums.copy()
    sums[1], sums[2] = sums[0], -sums[0]
    form = QuadraticForm(products(list(plain.keys), sums, plain.squares))
    alone = form.of([("site0", "part")])
    assert form.of([("site0", "part"), ("site1", "part")]) == pytest.approx(4 * alone, rel=0.2)
    assert form.of([("site0", "part"), ("site2", "part")]) == pytest.approx(0, abs=0.2 * alone)
    assert form.of([("site0", "part"), ("site4", "part")]) == pytest.approx(2 * alone, rel=0.3)


def test_a_bias_of_thinned_terms_is_one_of_all() -> None:
    plain = independent(30, 64, np.ones(30))
    sums = plain.sums.copy()
    sums[3] = 20.0
    forms = [QuadraticForm(products(list(plain.keys), sums, plain.squares, thin)) for thin in (1.0, 4.0)]
    whole, thinned = (form.of([("site3", "part")]) for form in forms)
    assert thinned == pytest.approx(4 * whole, rel=0.01)
    assert forms[0].of([("site4", "part")]) == forms[1].of([("site4", "part")])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_overflows_is_infinite(bad: float) -> None:
    plain = independent(5, 16, np.ones(5))
    sums, squares = plain.sums.copy(), plain.squares.copy()
    sums[2, 3], squares[2, 3] = bad, abs(bad)
    form = QuadraticForm(products(list(plain.keys), sums, squares))
    assert form.of([("site2", "part")]) == math.inf
    assert math.isfinite(form.of([("site1", "part"), ("site3", "part")]))


def test_an_effect_that_is_nowhere_is_nothing() -> None:
    plain = products([("dead", "part")], np.zeros((1, 16)), np.zeros((1, 16)))
    assert QuadraticForm(plain).of([]) == QuadraticForm(plain).of([("dead", "part")]) == 0.0


def drawn(count: int, noise: float, seed: int) -> list[Measured]:
    draw = np.random.default_rng(seed)
    predicted, sites = np.exp(draw.uniform(-9, -2, count)), draw.uniform(1, 20, count)
    off = draw.normal(size=count) * np.sqrt(noise**2 + (2 * noise) ** 2 / sites)
    measured = 1.3 * predicted * np.exp(off)
    return [Measured(*map(float, row)) for row in zip(predicted, measured, sites, strict=True)]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
def test_the_interval_covers(noise: float) -> None:
    inside, off = [], []
    for seed in range(30):
        calibration = Calibration.fit(drawn(20, noise, seed))
        for pair in drawn(60, noise, seed + 1000):
            error, low, high = calibration.interval(pair)
            inside.append(low <= pair.measured <= high)
            off.append(math.log(error / pair.measured))
    assert np.mean(inside) >= 0.94
    assert abs(float(np.median(off))) < 0.2 * noise


def test_the_interval_is_not_wide_for_nothing() -> None:
    widths = []
    for noise in (0.05, 0.4):
        fitted = [Calibration.fit(drawn(20, noise, seed)).interval(pair(1e-3)) for seed in range(10)]
        widths.append(np.mean([math.log(high / low) for _, low, high in fitted]))
    assert widths[0] < 0.4 * widths[1]


def test_what_cotangents_leave_open_is_in_the_interval() -> None:
    calibration = Calibration.fit(drawn(20, 0.1, 0))
    known, open_, single = (
        calibration.interval(each)
        for each in (Measured(1e-3, 0.0, 20.0), Measured(1e-3, 0.0, 20.0, 0.2), Measured(1e-3, 0.0, 1.0))
    )
    assert open_[2] / open_[1] > 1.5 * known[2] / known[1]
    assert single[2] / single[1] > 1.1 * known[2] / known[1]


def pair(predicted: float) -> Measured:
    return Measured(predicted, 0.0, 5.0)


def test_the_line_can_be_read_backwards() -> None:
    calibration = Calibration.fit(drawn(48, 0.1, 5))
    for error in (1e-6, 1e-3, 0.1):
        assert calibration.interval(pair(calibration.raw(error)))[0] == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_jumps_are_told_from_a_scale(power: float) -> None:
    draw = np.random.default_rng(3)
    predicted = np.exp(draw.uniform(-12, -4, 90)) ** (1 / power)
    exact = (predicted**power + 0.01 * predicted ** (power / 2)) ** (1 / power)
    noise = (0.03 + 0.5 * 0.01 / (predicted ** (power / 2) + 0.01)) / power
    measured = exact * np.exp(draw.normal(size=90) * noise)
    pairs = [Measured(float(p), float(m), 5.0) for p, m in zip(predicted, measured, strict=True)]
    calibration = Calibration.fit(pairs, power=power)
    assert calibration.jumps == pytest.approx(0.01, rel=0.6)
    ends = [calibration.interval(pair(float(p))) for p in (predicted.min(), predicted.max())]
    for (error, _, _), p in zip(ends, (predicted.min(), predicted.max()), strict=True):
        assert error == pytest.approx(float((p**power + 0.01 * p ** (power / 2)) ** (1 / power)), rel=0.35)
    assert ends[0][2] / ends[0][1] > ends[1][2] / ends[1][1]
    assert ends[0][1] < calibration.scale * float(predicted.min())


def several(cotangents: int, shape: float, seed: int) -> tuple[Products, np.ndarray]:
    """200 rows of 48 sequences whose expected squares are gamma distributed with that shape; those squares too. Each
    cotangent's are these times a chi-square of two degrees of freedom over 2."""
    draw = np.random.default_rng(seed)
    exact = draw.gamma(shape, 1.0, (200, 48))
    squares = exact[:, None] * draw.chisquare(2, (200, cotangents, 48)) / 2
    sums = np.sqrt(squares) * draw.choice([-1.0, 1.0], squares.shape)
    again = (sums[:, 1:], squares[:, 1:]) if cotangents > 1 else None
    keys: list[Key] = [(f"site{row}", "part") for row in range(200)]
    return Products(tuple(keys), sums[:, 0], squares[:, 0], np.ones(200), np.zeros(200), again), exact


def test_further_cotangents_halve_what_one_leaves_open() -> None:
    scatter, said = {}, {}
    for cotangents in (1, 4):
        given, exact = several(cotangents, 0.5, 1)
        form = QuadraticForm(given)
        off = [math.log(form.of([key]) / exact[row].sum()) for row, key in enumerate(given.keys)]
        scatter[cotangents] = float(np.std(off))
        said[cotangents] = float(np.median([math.sqrt(form.noise([key])) for key in given.keys]))
    assert scatter[4] < 0.6 * scatter[1]
    for cotangents, found in said.items():
        assert scatter[cotangents] < found < 2 * scatter[cotangents]


@pytest.mark.parametrize("shape", [1000.0, 0.5])
def test_a_profile_is_what_the_schemes_of_a_site_have_in_common(shape: float) -> None:
    _, exact = several(4, shape, 2)
    draw = np.random.default_rng(5)
    squares = exact[:1, None] * draw.chisquare(2, (20, 4, 48)) / 2
    sums = np.sqrt(squares)
    keys: list[Key] = [("site", ("weight", f"scheme{row}", "")) for row in range(20)]
    form = QuadraticForm(
        Products(tuple(keys), sums[:, 0], squares[:, 0], np.ones(20), np.zeros(20), (sums[:, 1:], squares[:, 1:]))
    )
    found, true = form.profile(keys[:1]), exact[0]
    assert found.std() / found.mean() == pytest.approx(true.std() / true.mean(), rel=0.15, abs=0.15)


def test_what_was_measured_leaves_no_noise() -> None:
    given, _ = several(4, 0.5, 3)
    key = given.keys[7]
    form = QuadraticForm(given).corrected([key], 5.0)
    assert form.of([key]) == pytest.approx(5.0)
    assert form.noise([key]) == 0.0
    assert form.noise([key, given.keys[8]]) > 0.0
