"""`evaluate(..., round_to=)`: the correct rounding of the exact result, against exact rationals and against Arb."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats.codes import all_values
from assay.formats.format import Format, format_named
from assay.formats.rounding import round_to, ulp
from assay.golden import Golden, evaluate
from assay.golden.arithmetic import Arb, BallArithmetic
from assay.golden.errors import OptionError

calm = settings(deadline=None)
FORMATS = ("bfloat16", "float16", "float32", "tf32", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float64")


def only(golden: Golden | tuple[Golden, ...]) -> Golden:
    assert isinstance(golden, Golden)
    return golden


def nearest(value: Fraction, name: str) -> float:
    """The number of a format nearest to a fraction, ties to even, overflow as `round_to` has it; independent of it."""
    format = format_named(name)
    size = abs(value)
    if not size:
        return 0.0
    exponent = max(_exponent(size), format.min_exponent)
    step = Fraction(2) ** (exponent - format.precision + 1)
    rounded = round(size / step) * step
    if rounded > Fraction(format.largest):
        return math.copysign(math.inf if format.infinities else math.nan if format.has_nan else format.largest, value)
    return math.copysign(float(rounded), value)


def _exponent(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def same(got: float, expected: float) -> bool:
    return got == expected or (math.isnan(got) and math.isnan(expected))


def dot(pairs: Sequence[tuple[float, float]], name: str) -> Golden:
    a = torch.tensor([[pair[0] for pair in pairs]], dtype=torch.float64)
    b = torch.tensor([[pair[1]] for pair in pairs], dtype=torch.float64)
    return only(evaluate("gemm", a, b, round_to=name))


def check_dot(pairs: Sequence[tuple[float, float]], name: str) -> None:
    """The golden of a dot product is the nearest number, and its radius holds the exact result."""
    exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
    golden, expected = dot(pairs, name), nearest(exact, name)
    assert same(golden.value.item(), expected)
    if math.isfinite(expected):
        assert abs(Fraction(expected) - exact) <= Fraction(golden.radius.item())
        spacing = ulp(torch.tensor(expected).double(), name).item()
        assert golden.radius.item() <= 1.001 * max(abs(Fraction(expected) - exact), spacing)


def midpoints(format: Format) -> list[float]:
    """Numbers half way between two neighbours, among them the one to infinity and those of subnormal numbers."""
    values = all_values(format) if format.bits <= 16 else torch.tensor([1.0, 3.0, 2.0**-60, 1e20], dtype=torch.float64)
    values = values[torch.isfinite(values) & (values > 0)].unique()
    if format.bits <= 16:
        between = ((values[1:] + values[:-1]) / 2).tolist()[:: max(1, len(values) // 12)]
        return [*between, (values[0] / 2).item(), format.largest + (format.largest - values[-2].item()) / 2]
    step = format.epsilon / 2
    return [value * (1 + step) for value in round_to(values, format).tolist()]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "float64"])
@pytest.mark.parametrize("distance", [0.0, 2.0**-200, -(2.0**-200), 2.0**-60, -(2.0**-60)])
def test_ties_and_near_ties_are_decided(name: str, distance: float) -> None:
    """A sum that lies on a midpoint goes to even, one 2^-200 beside it to its own side."""
    for middle in midpoints(format_named(name)):
        check_dot([(middle, 1.0), (distance, 1.0)], name)
        check_dot([(-middle, 1.0), (1e30, 1.0), (distance, 1.0), (-1e30, 1.0)], name)


@pytest.mark.parametrize("distance", [0.0, 2.0**-100, -(2.0**-100), 2.0**-200, -(2.0**-200)])
def test_ties_of_float64_are_decided(distance: float) -> None:
    """The same in float64, whose midpoints take two words to state, and what lies beside them a third."""
    for middle in (1.0, 1.0 + 2.0**-52, 3.0):
        check_dot([(middle, 1.0), (math.ulp(middle) / 2, 1.0), (distance, 1.0)], "float64")


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.builds(math.ldexp, st.integers(-300, 300).map(float), st.integers(-40, 40)),
)


@settings(calm, max_examples=60)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.sampled_from(FORMATS))
def test_any_dot_is_correctly_rounded(pairs: list[tuple[float, float]], name: str) -> None:
    """Dot products of any numbers, cancelling ones among them, against exact rationals."""
    check_dot(pairs, name)


@settings(calm, max_examples=40)
@given(numbers.filter(lambda x: 1e-30 < abs(x) < 1e30), st.sampled_from(FORMATS))
def test_any_reciprocal_is_correctly_rounded(x: float, name: str) -> None:
    """Quotients, which are dyadic for powers of two and no tie otherwise."""
    golden = only(evaluate("reciprocal", torch.tensor([[x]], dtype=torch.float64), round_to=name))
    assert same(golden.value.item(), nearest(1 / Fraction(x), name))


@settings(calm, max_examples=40)
@given(st.integers(1, 2**12), st.integers(-20, 20), st.booleans(), st.sampled_from(("bfloat16", "float16", "float32")))
def test_roots_of_squares_are_decided(root: int, exponent: int, odd: bool, name: str) -> None:
    """The root of a square is dyadic: a midpoint between two bfloat16 numbers among them goes to even."""
    exact = Fraction(2 * root + odd) * Fraction(2) ** exponent
    x = torch.tensor([[float(exact * exact)]], dtype=torch.float64)
    assert only(evaluate("sqrt", x, round_to=name)).value.item() == nearest(exact, name)


TRANSCENDENTAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("exp", {}), ("log", {}), ("tanh", {}), ("erf", {}), ("sigmoid", {}), ("sin", {}), ("gelu", {}),
    ("gelu", {"approximate": "tanh"}), ("softmax", {}), ("logsumexp", {}), ("silu", {}),
)  # fmt: skip


@pytest.mark.parametrize(("op", "options"), TRANSCENDENTAL)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
def test_transcendental_functions_are_correctly_rounded(op: str, options: dict[str, Any], name: str) -> None:
    """Against Arb at 400 digits, both of whose ends round to the golden; and what is proven has a finite radius."""
    x = torch.from_numpy(np.random.default_rng(5).standard_normal((3, 12)) * 4).float().double()
    x = x.abs() if op == "log" else x
    golden = only(evaluate(op, x, round_to=name, **options))
    assert bool(golden.radius.isfinite().all())
    assert bool((golden.radius[~golden.value.isfinite()] == 0).all())
    for got, exact in zip(golden.value.flatten().tolist(), _by_arb(op, x, options), strict=True):
        assert same(got, nearest(exact, name))


def _by_arb(op: str, x: torch.Tensor, options: dict[str, Any]) -> list[Fraction]:
    from assay.golden.evaluation.call import run
    from assay.golden.registry import spec

    balls = run(spec(op), Arb(400), (x,), options)[0].flatten()
    ends = [ball.mid().man_exp() for ball in balls]
    return [int(mantissa) * Fraction(2) ** int(exponent) for mantissa, exponent in ends]


def test_rounding_twice_is_seen() -> None:
    """1 + 2^-8 + 2^-40, by way of float32, would become one in bfloat16; it is 1 + 2^-7."""
    assert dot([(1.0, 1.0), (2.0**-8, 1.0), (2.0**-40, 1.0)], "bfloat16").value.item() == 1 + 2.0**-7
    assert dot([(1.0, 1.0), (2.0**-8, 1.0), (2.0**-80, 1.0)], "bfloat16").value.item() == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("bfloat16", 1e39, math.inf), ("float16", 65519.0, 65504.0), ("float16", -65520.0, -math.inf),
     ("float8_e4m3fn", 464.0, 448.0), ("float8_e4m3fn", 465.0, math.nan), ("float4_e2m1fn", 100.0, 6.0)],
)  # fmt: skip
def test_overflow_is_that_of_the_format(name: str, value: float, expected: float) -> None:
    """Beyond the largest number: infinity, NaN where the format has none, and the largest where it has neither."""
    golden = dot([(value, 1.0)], name)
    assert same(golden.value.item(), expected)
    assert golden.radius.item() == pytest.approx(abs(expected - value) if math.isfinite(expected) else 0)


@pytest.mark.parametrize(
    ("op", "x", "name", "expected", "radius"),
    [("exp", 710.0, "float64", math.inf, 0.0), ("exp", 100.0, "float32", math.inf, 0.0),
     ("exp", 10.0, "float8_e4m3fn", math.nan, 0.0), ("log", 0.0, "bfloat16", -math.inf, 0.0),
     ("log", 0.0, "float4_e2m1fn", -6.0, math.inf)],
)  # fmt: skip
def test_a_proven_overflow_has_radius_zero(op: str, x: float, name: str, expected: float, radius: float) -> None:
    """What certainly lies beyond a format is told from what is not proven; and a radius is never NaN."""
    golden = only(evaluate(op, torch.tensor([[x]], dtype=torch.float64), round_to=name))
    assert same(golden.value.item(), expected)
    assert golden.radius.item() == radius


@pytest.mark.parametrize("x", [-709.0, -720.5, -744.0, -745.5, -746.0, -1e5, -1e9])
def test_float64_is_rounded_to_near_zero(x: float) -> None:
    """Normal numbers whose error no float64 holds, subnormal ones, and zero, against Arb."""
    from flint import arb, ctx

    golden = only(evaluate("exp", torch.tensor([[x]], dtype=torch.float64), round_to="float64"))
    with ctx.workdps(100):
        exact = arb(x).exp()
        assert golden.value.item() == float(exact.mid())
        assert abs(exact - golden.value.item()) <= golden.radius.item() <= 2.0**-1074


def test_a_small_normal_reciprocal_is_proven() -> None:
    """1 / 3e307 is a normal number, half of whose unit is none."""
    golden = only(evaluate("reciprocal", torch.tensor([[3e307]], dtype=torch.float64), round_to="float64"))
    assert golden.value.item() == nearest(1 / Fraction(3e307), "float64")
    assert golden.radius.item() <= 2.0**-1074


@pytest.mark.parametrize("settings_", [{"digits": 10}, {"digits": 20}, {"round_to": "float64"}])
def test_a_cancelling_sum_of_huge_products_is_no_infinity(settings_: dict[str, Any]) -> None:
    """Products about 2^1120, beyond float64, that cancel to three: a ball too wide to tell is not known infinite."""
    drawn = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2.0**560
    x, y = drawn.unbind()
    a = torch.cat([x, torch.tensor([1.5], dtype=torch.float64), -x])[None]
    b = torch.cat([y, torch.tensor([2.0], dtype=torch.float64), y])[:, None]
    golden = only(evaluate("gemm", a, b, **settings_))
    assert golden.value.item() == 3.0
    assert golden.radius.item() < 1e-9


def test_special_values_stay() -> None:
    """NaN and infinities of the tensors come out where the mathematics puts them; the others are rounded."""
    x = torch.tensor([[1.0, -math.inf], [math.nan, 0.0], [-math.inf, -math.inf]])
    golden = only(evaluate("softmax", x, round_to="bfloat16"))
    assert golden.value[0].tolist() == [1.0, 0.0]
    assert golden.value[1:].isnan().all()
    log = only(evaluate("log", torch.tensor([[-1.0, 0.0, 1.0, 3.0]]), round_to="bfloat16"))
    assert log.value[0, 1:].tolist() == [-math.inf, 0.0, 1.1015625]
    assert log.value[0, 0].isnan()


def test_what_cannot_be_proven_has_an_infinite_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie that no tier decides is not passed off as rounded."""
    from assay.golden.evaluation import tiers

    monkeypatch.setattr(tiers, "tiers_from", lambda digits: [BallArithmetic])
    golden = dot([(1.0 + 2.0**-8, 1.0), (2.0**-70, 1.0)], "bfloat16")
    assert golden.radius.item() == math.inf


def test_each_element_of_each_result_is_rounded() -> None:
    """An op with several results gives each of them rounded, and choices as they are."""
    weights, ids = evaluate("moe_route", torch.randn(4, 6), round_to="float16")  # type: ignore[misc]
    assert bool((round_to(weights.value, "float16") == weights.value).all())
    assert ids.value.dtype == torch.int64


@pytest.mark.parametrize(
    ("settings_", "parts"),
    [({"round_to": "bfloat17"}, "bfloat17"), ({"round_to": "int8"}, "floating-point"),
     ({"round_to": "bfloat16", "digits": 20}, "one of them")],
)  # fmt: skip
def test_a_wrong_format_is_one_clear_line(settings_: dict[str, Any], parts: str) -> None:
    """An unknown format, an integer one, and digits beside a format."""
    with pytest.raises((OptionError, ValueError, KeyError), match=parts):
        evaluate("softmax", torch.zeros(1, 2), **settings_)


def test_a_key_seen_alone_ties_like_its_value() -> None:
    """The first row of causal attention is its one value, midpoints of bfloat16 among them, whatever the scale."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 128, generator=generator).half() for _ in range(3))
    golden = evaluate("attention", q, k, v, causal="top_left", round_to="bfloat16")
    assert bool(golden.radius.isfinite().all())
    assert torch.equal(golden.value[:, :, 0], v[:, :, 0].bfloat16().double())


@pytest.mark.parametrize(
    ("op", "x", "format", "value"),
    [("exp2", -134.0, "bfloat16", 0.0), ("exp2", -25.0, "float16", 0.0), ("log2", 2.0**17, "float8_e4m3fn", 16.0)],
)
def test_powers_of_two_tie(op: str, x: float, format: str, value: float) -> None:
    """2^x of a whole number and the logarithm of a power of two are exact, so that their ties are decided."""
    golden = evaluate(op, torch.tensor([[x]]), round_to=format)
    assert golden.value.item() == value
    assert golden.radius.isfinite().all()
