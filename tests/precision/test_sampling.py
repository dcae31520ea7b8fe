"""What a measured error is worth: standard errors over sequences, intervals, paired comparisons."""

import copy
import math
import pickle

import numpy as np
import pytest

from assay.precision.sampling import MeasuredError, OtherSequences, difference, relative_spread


def drawn(count: int, seed: int, power: float = 1.0) -> MeasuredError:
    """An error of 0.5^(1/power) over sequences of unequal lengths, whose distances scatter by a half."""
    draw = np.random.default_rng(seed)
    weights = draw.integers(50, 150, count).astype(float)
    return MeasuredError.of(weights * 0.5 * draw.gamma(4.0, 0.25, count), weights, power)


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("count", [8, 48])
def test_the_interval_holds_the_error_of_the_text(power: float, count: int) -> None:
    found = [drawn(count, seed, power) for seed in range(2000)]
    inside = np.mean([each.low <= 0.5 ** (1 / power) <= each.high for each in found])
    assert 0.93 <= inside <= 0.975


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_standard_error_is_the_scatter_of_other_draws(power: float) -> None:
    found = [drawn(48, seed, power) for seed in range(2000)]
    assert np.mean([each.standard_error for each in found]) == pytest.approx(np.std(found), rel=0.05)


def test_a_comparison_is_paired() -> None:
    first = drawn(24, 1)
    second = MeasuredError.of(1.1 * first.distances, first.weights, 1.0)
    assert second < first.high
    assert difference(second, first).sign == 1
    assert difference(first, second).sign == -1
    draw = np.random.default_rng(0)
    signs = []
    for _ in range(1000):
        noise = 1 + 0.1 * draw.normal(size=(2, 24))
        pair = [MeasuredError.of(first.distances * each, first.weights, 1.0) for each in noise]
        signs.append(difference(*pair).sign)
    assert 0.02 < np.mean(np.abs(signs)) < 0.09


def test_a_single_sequence_shows_nothing() -> None:
    one = MeasuredError.of(np.array([2.0]), np.array([4.0]), 1.0)
    assert (one, one.low, one.high) == (0.5, 0.0, math.inf)
    assert difference(one, MeasuredError.of(np.array([8.0]), np.array([4.0]), 1.0)).sign == 0


def test_what_breaks_is_larger_than_what_does_not() -> None:
    fine = drawn(8, 0)
    broken = MeasuredError.of(np.full(8, math.nan), fine.weights, 1.0)
    assert difference(broken, fine).sign == 1
    assert difference(fine, broken).sign == -1
    assert difference(broken, broken).sign == 0
    with pytest.raises(ValueError, match="same sequences"):
        difference(fine, drawn(8, 1))


def test_a_measured_error_is_a_float_that_survives_copies() -> None:
    found = drawn(8, 0)
    for same in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (same, same.low, same.high) == (float(found), found.low, found.high)
    nothing = MeasuredError.of(np.zeros(4), np.ones(4), 1.0)
    assert (nothing.low, nothing.high) == (0.0, 0.0)


def test_the_spread_is_of_one_sequence() -> None:
    few, many = ([drawn(count, seed) for seed in range(200)] for count in (24, 96))
    assert relative_spread(few) == pytest.approx(relative_spread(many), rel=0.12)
    assert relative_spread(many) == pytest.approx(0.5, rel=0.15)
    assert relative_spread([]) == 0.0


@pytest.mark.parametrize("shape", [4.0, 0.5])
def test_other_sequences_lie_between_the_ends(shape: float) -> None:
    """Errors over 16 other sequences lie within the ends about one over 48 in about 95 % of 1,000 draws, also where a
    few sequences make most of it (shape 0.5), and then the ends are further apart."""
    draw = np.random.default_rng(5)
    others = OtherSequences(np.ones(48), 16)
    inside, width = [], []
    for _ in range(1000):
        here, there = draw.gamma(shape, 1 / shape, 48), draw.gamma(shape, 1 / shape, 16)
        below, above = others.ends(here, 1.0)
        inside.append(-below <= math.log(there.mean() / here.mean()) <= above)
        width.append(below + above)
    assert 0.92 <= np.mean(inside) <= 0.985
    assert (np.median(width) > 1.2) == (shape < 1)


def test_a_single_sequence_tells_nothing_of_others() -> None:
    assert OtherSequences(np.ones(1), 16).ends(np.ones(1), 1.0) == (math.inf, math.inf)
    others, parts = OtherSequences(np.ones(48), 16), np.random.default_rng(0).gamma(1.0, 1.0, 48)
    assert others.ends(parts, 2.0) == pytest.approx([end / 2 for end in others.ends(parts, 1.0)])


def test_what_others_overrun_is_known_from_the_largest_at_hand() -> None:
    """Of 50 samples of 64 maxima of normal values, those of 32 others exceed the largest by more than the 97.5 % end
    in few; and where all lie within a hundredth of each other, that end is below a tenth of the largest."""
    draw, beyond = np.random.default_rng(0), 0
    for _ in range(50):
        tops = np.abs(draw.normal(size=(96, 50))).max(1)
        others = OtherSequences(np.ones(64), 32)
        square = np.square(np.maximum(tops[64:] - tops[:64].max(), 0.0)).mean()
        beyond += square > np.quantile(others.excess_squares(tops[:64]), 0.975)
    assert beyond <= 3
    close = OtherSequences(np.ones(64), 32).excess_squares(np.linspace(0.99, 1.0, 64))
    assert np.quantile(close, 0.975) < 0.1**2
    assert not OtherSequences(np.ones(64), 32).excess_squares(np.ones(64)).any()


def test_an_interval_is_longer_where_few_sequences_make_the_error() -> None:
    even = MeasuredError.of(np.linspace(0.9, 1.1, 16), np.ones(16), 1.0)
    steep = MeasuredError.of(np.array([10.0, *[0.01] * 15]), np.ones(16), 1.0)
    assert math.log(even.high / even) == pytest.approx(2.13 * even.standard_error / even, rel=0.01)
    assert math.log(steep.high / steep) > 6 * steep.standard_error / steep
