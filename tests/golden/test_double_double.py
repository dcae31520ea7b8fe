"""The primitives of double-double numbers: every bound against exact rationals."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from assay.golden.arithmetic.double_double import TINY, DoubleDouble, fast_two_sum, square_root, two_product, two_sum
from assay.golden.arithmetic.exact import Exact
from assay.golden.arithmetic.ozaki import exact_matmul, exact_sum, total

calm = settings(deadline=None, max_examples=200)
U2 = Fraction(1, 2**106)

whole = st.integers(-(2**53), 2**53)
floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.builds(math.ldexp, whole.map(float), st.integers(-110, 60)),
    st.builds(lambda base, ulps: base * (1 + ulps * 2.0**-52), st.sampled_from((1.0, -1.0, 3.0)), st.integers(-4, 4)),
)
moderate = floats.filter(lambda x: x == 0 or 1e-120 < abs(x) < 1e120)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def pairs(draw: st.DrawFn, numbers: st.SearchStrategy[float] = moderate) -> DoubleDouble:
    """Normalised pairs: the low word, where there is one, at most half an ulp of the high one."""
    high = draw(numbers)
    low = draw(st.one_of(st.none(), st.floats(-1, 1).map(lambda share: share * math.ulp(high) / 2)))
    if low is None:
        return DoubleDouble(tensor(high))
    first, second = fast_two_sum(tensor(high), tensor(low))
    rad = draw(st.one_of(st.none(), st.floats(0, 2.0**-90).map(lambda share: tensor(share * abs(high)))))
    return DoubleDouble(first, second, rad)


def value(x: DoubleDouble, place: int = 0) -> Fraction:
    return Fraction(x.high.flatten()[place].item()) + Fraction(x.rest.flatten()[place].item())


def ends(x: DoubleDouble) -> list[Fraction]:
    """The number itself, and the ends that its radius leaves to it."""
    radius = Fraction(x.radius[0].item())
    return [value(x) - radius, value(x), value(x) + radius]


def holds(x: DoubleDouble, exact: Fraction) -> bool:
    """Whether the exact number lies within the radius; an infinite one claims nothing."""
    radius = x.radius[0].item()
    return math.isinf(radius) or abs(value(x) - exact) <= Fraction(radius) * (1 + Fraction(1, 2**30))


def is_normalised(x: DoubleDouble) -> bool:
    return not math.isfinite(x.high[0].item()) or x.high[0].item() + x.rest[0].item() == x.high[0].item()


@calm
@given(floats, floats)
def test_two_sum_is_exact(a: float, b: float) -> None:
    """The sum and its error add up to a + b, for all numbers whose sum does not overflow."""
    assume(math.isfinite(a + b) and abs(a) < 1e307 and abs(b) < 1e307)
    high, low = two_sum(tensor(a), tensor(b))
    assert Fraction(high.item()) + Fraction(low.item()) == Fraction(a) + Fraction(b)


@calm
@given(floats, floats)
def test_two_product_is_exact_but_for_underflow(a: float, b: float) -> None:
    """The product and its error add up to a b, to within `TINY` where it underflows."""
    assume(abs(a) < 2.0**990 and abs(b) < 2.0**990 and abs(Fraction(a) * Fraction(b)) < Fraction(2) ** 1000)
    high, low = two_product(tensor(a), tensor(b))
    error = abs(Fraction(high.item()) + Fraction(low.item()) - Fraction(a) * Fraction(b))
    assert error == 0 or (abs(high.item()) < 2.0**-900 and error <= Fraction(TINY))


@calm
@given(pairs(), pairs())
def test_sums_and_differences_are_held(x: DoubleDouble, y: DoubleDouble) -> None:
    """x + y and x - y lie within the radius for all that x and y may be; sums of float64 have radius zero."""
    for result, sign in ((x + y, 1), (x - y, -1)):
        assert is_normalised(result)
        for a in ends(x):
            assert all(holds(result, a + sign * b) for b in ends(y))
        if x.low is None and y.low is None:
            assert result.rad is None
            assert value(result) == value(x) + sign * value(y)
        elif x.rad is None and y.rad is None:
            assert abs(value(result) - value(x) - sign * value(y)) <= 3 * U2 * abs(value(x) + sign * value(y)) * 2


@calm
@given(pairs(), pairs())
def test_products_are_held(x: DoubleDouble, y: DoubleDouble) -> None:
    """x y lies within the radius, which is 8 u^2 |x y| beside what is inherited, and zero for products of float64."""
    result = x * y
    assert is_normalised(result)
    for a in ends(x):
        assert all(holds(result, a * b) for b in ends(y))
    if x.low is None and y.low is None:
        assert result.radius.item() <= TINY
    elif x.rad is None and y.rad is None:
        assert Fraction(result.radius.item()) <= 9 * U2 * abs(value(x) * value(y)) + Fraction(2 * TINY)


@calm
@given(pairs(), pairs())
def test_quotients_are_held(x: DoubleDouble, y: DoubleDouble) -> None:
    """x / y lies within the radius; where the quotient is a float64 that is all there is."""
    assume(y.high.item() != 0)
    result = x / y
    assert is_normalised(result)
    for a in ends(x):
        assert all(holds(result, a / b) for b in ends(y) if b)
    if x.rad is None and y.rad is None:
        assert Fraction(result.radius.item()) <= 13 * U2 * abs(value(x) / value(y)) + Fraction(TINY) * (
            2 + 2 / abs(value(y))
        )


@calm
@given(pairs(moderate.map(abs)))
def test_square_roots_are_held(x: DoubleDouble) -> None:
    """The squares of the radius's ends enclose x."""
    assume(x.high.item() > 0)
    result = square_root(x)
    radius = result.radius.item()
    assert is_normalised(result)
    if math.isfinite(radius):
        grown = Fraction(radius) * (1 + Fraction(1, 2**30))
        for a in ends(x):
            assert max(value(result) - grown, Fraction(0)) ** 2 <= max(a, Fraction(0)) <= (value(result) + grown) ** 2


def test_a_square_has_an_exact_root() -> None:
    """sqrt(x^2) = x with radius zero, and so have quotients that come out even."""
    assert square_root(DoubleDouble(tensor(9.0, 2.25, 0.0))).radius.tolist() == [0, 0, 0]
    assert (DoubleDouble(tensor(1.0, 3.0)) / DoubleDouble(tensor(4.0, 0.5))).radius.tolist() == [0, 0]


@pytest.mark.parametrize("high", [math.inf, -math.inf, math.nan, 1e308, 2.0**1000])
def test_what_leaves_float64_claims_nothing(high: float) -> None:
    """Overflow, infinities and NaN give an infinite radius, not a wrong number."""
    x = DoubleDouble(tensor(high), tensor(0.0))
    for result in (x + x, x * x, x - x * 2.0, x / x, square_root(x * x)):
        exact = math.isfinite(high) and math.isfinite(result.high.item())
        assert math.isinf(result.radius.item()) or (exact and result.radius.item() < 1e300)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(pairs(), pairs()), min_size=1, max_size=9), st.none() | pairs())
def test_dot_products_are_held(terms: list[tuple[DoubleDouble, DoubleDouble]], bias: DoubleDouble | None) -> None:
    """Products of matrices, of numbers of all sizes together, with a bias or without."""
    a, b = (Exact().stack([term[place] for term in terms], 0) for place in (0, 1))
    plus = None if bias is None else bias.reshape(1, 1)
    result = exact_matmul(a.reshape(1, len(terms)), b.reshape(len(terms), 1), plus)
    exact = sum((value(x) * value(y) for x, y in terms), value(bias) if bias is not None else Fraction(0))
    radius = result.radius.item()
    assert math.isinf(radius) or abs(value(result) - exact) <= Fraction(radius)
    size = math.fsum(abs(x.high.item() * y.high.item()) for x, y in terms)
    largest = max(abs(x.high.item()) for x, _ in terms) * max(abs(y.high.item()) for _, y in terms)
    if bias is None and all(x.rad is None and y.rad is None for x, y in terms) and 1e-200 < size < 1e200:
        assert radius <= 2.0**-100 * largest * len(terms)


@settings(deadline=None, max_examples=100)
@given(st.lists(pairs(), min_size=1, max_size=40))
def test_sums_along_an_axis_are_held(terms: list[DoubleDouble]) -> None:
    """Long sums, cancelling ones among them: off by 2^-104 of the largest term at most."""
    x = Exact().stack(terms, 0).reshape(1, len(terms))
    result = exact_sum(x, -1)
    exact, radius = sum(map(value, terms), Fraction(0)), result.radius.item()
    assert math.isinf(radius) or abs(value(result) - exact) <= Fraction(radius)
    if all(term.rad is None for term in terms):
        assert radius <= 2.0**-100 * max(abs(term.high.item()) for term in terms) * len(terms)


@calm
@given(st.lists(moderate, min_size=1, max_size=7))
def test_totals_lose_what_they_say(terms: list[float]) -> None:
    """A sum of a few float64 in two words: what a third would hold is the radius."""
    result = total([tensor(term) for term in terms], None)
    assert abs(value(result) - sum(map(Fraction, terms))) <= Fraction(result.radius.item())


def test_a_row_of_zeros_is_exact_beside_any_other() -> None:
    """A product with, and a sum of, nothing but zeros has radius zero, though other rows leave slices out."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(3, 40, dtype=torch.float64, generator=generator) * 2.0 ** torch.arange(-300, 300, 15).double()
    b = torch.randn(40, 3, dtype=torch.float64, generator=generator) / 3
    a[1], b[:, 2] = 0, 0
    product, summed = exact_matmul(DoubleDouble(a), DoubleDouble(b)), exact_sum(DoubleDouble(a), -1)
    zero = torch.zeros(3, 3, dtype=torch.bool)
    zero[1], zero[:, 2] = True, True
    assert bool((product.high[zero] == 0).all())
    assert torch.equal(product.radius == 0, zero)
    assert (summed.radius[:, 0] == 0).tolist() == [False, True, False]
