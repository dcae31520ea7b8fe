"""What holds of rounding whatever the format: order, error, neighbours, chance, and the manners of the functions."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats.codes import all_values
from assay.formats.errors import NotRepresentable, UnknownFormat, UnknownOption, WrongDtype
from assay.formats.format import FORMATS, Format
from assay.formats.rounding import Mode, next_down, next_up, round_float32, round_to, ulp, ulp_towards
from assay.precision import AssayError

INF, NAN = math.inf, math.nan
MODES: tuple[Mode, ...] = get_args(Mode)
SETTLED = tuple(mode for mode in MODES if mode != "stochastic")
LISTED = [name for name, format in FORMATS.items() if format.bits <= 16]
Rounder = Callable[[torch.Tensor], torch.Tensor]

patient = settings(deadline=None)  # a busy machine is no fault
formats = st.sampled_from(list(FORMATS.values()))
symmetric = st.sampled_from([format for format in FORMATS.values() if format.has_negative_zero])


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def numbers(draw: st.DrawFn, format: Format, *, within: bool = False) -> torch.Tensor:
    """Some float64 numbers, most in the format's range: anywhere, at its values or midpoints, or just beside them."""
    anywhere = st.floats(format.lowest, format.largest) if within else st.floats(allow_nan=False)
    significand = st.integers(0, 2 ** (min(format.precision, 52) + 1) - 1)
    exponent = st.integers(max(format.min_exponent - format.precision, -1074), format.max_exponent - format.precision)
    midpoint = st.builds(math.ldexp, significand, exponent)
    beside = st.builds(math.nextafter, midpoint, st.sampled_from([0.0, INF]))
    sign = st.sampled_from([1.0, -1.0] if format.signed else [1.0])
    hard = st.builds(lambda x, s: min(max(s * x, format.lowest), format.largest), midpoint | beside, sign)
    return float64(*draw(st.lists(anywhere | hard, min_size=1, max_size=20)))


@patient
@given(st.data(), formats, st.sampled_from(SETTLED))
def test_rounding_keeps_order(data: st.DataObject, format: Format, mode: Mode) -> None:
    x = data.draw(numbers(format, within=not format.has_zero)).sort().values
    assert bool((round_to(x, format, mode, "saturate").diff() >= 0).all())


@patient
@given(st.data(), formats, st.sampled_from(MODES))
def test_rounding_twice_is_rounding_once(data: st.DataObject, format: Format, mode: Mode) -> None:
    once = round_to(data.draw(numbers(format, within=not format.has_zero)), format, mode, "saturate")
    for again in MODES:
        assert torch.equal(round_to(once, format, again), once)


FAST = [format for format in FORMATS.values() if format.has_zero and format.bits <= 32]


@patient
@given(st.data(), st.sampled_from(FAST))
def test_rounding_in_float32_is_rounding_in_float64(data: st.DataObject, format: Format) -> None:
    """Values at midpoints and beside them included, and without touching x unless that is allowed."""
    x = data.draw(numbers(format, within=True)).float()
    x = x[(x >= format.lowest) & (x <= format.largest)]
    expected, before = round_to(x, format), x.clone()
    assert torch.equal(round_float32(x, format).double(), expected)
    assert torch.equal(x, before)
    assert torch.equal(round_float32(x.clone(), format, inplace=True).double(), expected)


@patient
@given(st.data(), formats)
def test_nearest_errs_by_half_an_ulp_at_most(data: st.DataObject, format: Format) -> None:
    """Within the range, |round(x) - x| is at most ulp/2, and at most u|x| / (1 + u) where x is normal."""
    x = data.draw(numbers(format, within=True))
    error = (round_to(x, format) - x).abs()
    assert bool((error <= ulp(x, format) / 2).all())
    u = format.unit_roundoff
    normal = x.abs() >= (format.smallest_normal if u else INF)
    assert bool((error * (1 + u) <= u * x.abs() * (1 + 2.0**-50))[normal].all())


def test_the_half_ulp_bound_rejects_truncation() -> None:
    x = float64(1 + 0.9 * 2.0**-7)
    assert bool((round_to(x, "bf16", "toward_zero") - x).abs() > ulp(x, "bf16") / 2)


@patient
@given(st.data(), symmetric)
def test_sign_is_symmetric(data: st.DataObject, format: Format) -> None:
    """round(-x) = -round(x), zeros included, in modes that ignore the sign; "up" and "down" mirror each other."""
    x = data.draw(numbers(format))
    for mode in ("nearest", "nearest_away", "toward_zero", "up"):
        mirror: Mode = "down" if mode == "up" else mode
        left, right = round_to(-x, format, mode), -round_to(x, format, mirror)
        both_nan = left.isnan() & right.isnan()
        assert bool((both_nan | (left == right) & (left.signbit() == right.signbit())).all())


@patient
@given(st.data(), formats, st.sampled_from(MODES))
def test_every_mode_takes_a_neighbour(data: st.DataObject, format: Format, mode: Mode) -> None:
    """Within the range, "down" <= x <= "up", and every mode returns one of these two, "toward_zero" the smaller."""
    x = data.draw(numbers(format, within=True))
    low, high, taken = round_to(x, format, "down"), round_to(x, format, "up"), round_to(x, format, mode)
    assert bool(((low <= x) & (x <= high) & ((taken == low) | (taken == high))).all())
    assert bool((round_to(x, format, "toward_zero").abs() <= x.abs()).all())


def bias_in_standard_errors(rounder: Rounder, x: float, spacing: float) -> float:
    """The mean error over 100,000 roundings of x, in units of the standard error that unbiased rounding would have."""
    draws = 100_000
    share = x / spacing % 1
    error = rounder(float64(x).expand(draws)).mean().item() - x
    return abs(error) / (spacing * math.sqrt(share * (1 - share) / draws))


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("bfloat16", 1 + 2.0**-9),
        ("bfloat16", -3.3e-39),
        ("float32", math.pi),
        ("float8_e4m3fn", 0.7),
        ("float8_e5m2", -1.3e-5),
        ("float4_e2m1fn", 0.1),
        ("int8", -17.9),
        ("nf4", -0.6),
    ],
)
def test_stochastic_rounding_is_unbiased(name: str, x: float) -> None:
    """The mean of 100,000 draws is x within 5 standard errors (by chance once in 1.7 million), subnormals included.

    Rounding to nearest and towards zero fails the same test.
    """
    spacing = ulp(float64(x), name).item()
    generator = torch.Generator().manual_seed(0)
    assert bias_in_standard_errors(lambda v: round_to(v, name, "stochastic", generator=generator), x, spacing) < 5
    assert bias_in_standard_errors(lambda v: round_to(v, name), x, spacing) > 5
    assert bias_in_standard_errors(lambda v: round_to(v, name, "toward_zero"), x, spacing) > 5


def test_stochastic_overflow_is_in_proportion() -> None:
    """Half-way between the largest value and what would follow, half of the draws overflow; at the largest none."""
    generator = torch.Generator().manual_seed(0)
    x = float64(464.0, 448.0, 479.999).expand(10_000, 3)
    share = round_to(x, "e4m3", "stochastic", generator=generator).isnan().double().mean(0)
    assert share[0].item() == pytest.approx(0.5, abs=0.025)
    assert share[1] == 0
    assert share[2] > 0.99


def test_stochastic_rounding_obeys_its_generator() -> None:
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)
    state = torch.random.get_rng_state()
    draw = [round_to(x, "e4m3", "stochastic", generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", LISTED)
def test_neighbours_are_those_of_the_list_of_values(name: str) -> None:
    values = all_values(name)
    values = float64(*sorted(set(values[values.isfinite()].tolist())))
    between = (values[:-1] + values[1:]) / 2
    assert torch.equal(next_up(values[:-1], name), values[1:])
    assert torch.equal(next_down(values[1:], name), values[:-1])
    assert torch.equal(next_up(between, name), values[1:])
    assert torch.equal(ulp_towards(values[:-1], values[1:], name), values[1:] - values[:-1])
    assert torch.equal(ulp_towards(values[1:], values[:-1], name), values[1:] - values[:-1])
    assert torch.equal(next_down(between, name), values[:-1])


@pytest.mark.parametrize("name", LISTED)
def test_ulp_is_the_distance_to_the_next_value(name: str) -> None:
    """For every value but the outermost, ulp is the distance to the next value further from zero; at zero, to above."""
    values = all_values(name)
    values = float64(*sorted(set(values[values.isfinite()].tolist())))
    above, below = values[values >= 0], values[values < 0]
    assert torch.equal(ulp(above[:-1], name), above.diff())
    assert torch.equal(ulp(below[1:], name), below.diff())
    if FORMATS[name].kind != "codebook":
        assert torch.equal(ulp(-above[:-1], name), above.diff())


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("float32", np.float32), ("float64", np.float64)])
def test_ulp_and_neighbours_are_those_of_numpy(name: str, dtype: Any) -> None:
    """Spacing and nextafter agree in numpy's formats, at zeros, subnormals, infinities and the largest value too.

    Of the largest value itself numpy calls the spacing infinite.
    """
    info = np.finfo(dtype)
    special = [0.0, -0.0, info.tiny, info.smallest_subnormal, info.max, info.min, 1.0, -1.0]
    random = np.random.default_rng(0).standard_normal(10_000) * np.exp2(np.arange(10_000) % 30 - 20)
    x = np.concatenate([special, random]).astype(dtype)
    with np.errstate(all="ignore"):
        inside = x[np.abs(x) < info.max]
        assert ulp(torch.from_numpy(inside), name).tolist() == np.spacing(np.abs(inside)).astype(np.float64).tolist()
        x = np.append(x, np.array([INF, -INF], dtype))
        for step, end in ((next_up, INF), (next_down, -INF)):
            assert step(torch.from_numpy(x), name).tolist() == np.nextafter(x, dtype(end)).astype(np.float64).tolist()


def test_beyond_the_last_value() -> None:
    """Past the end lies infinity, NaN where there is none, and the end itself where there is neither."""
    ends = {"bfloat16": INF, "float8_e4m3fn": NAN, "float4_e2m1fn": 6.0, "int8": 127.0}
    for name, end in ends.items():
        largest = float64(FORMATS[name].largest)
        torch.testing.assert_close(next_up(largest, name), float64(end), rtol=0, atol=0, equal_nan=True)
    assert ulp(float64(1e300, INF, -INF, NAN), "float8_e4m3fn").nan_to_num(-1).tolist() == [32, -1, -1, -1]


def test_overflow_by_mode_and_policy() -> None:
    """Above the largest value, modes that round down return it; the others, and infinity in all, follow the policy."""
    x = float64(1e6, INF)
    for mode in SETTLED:
        inward = mode in ("toward_zero", "down")
        assert round_to(x, "float16", mode).tolist() == [65504.0 if inward else INF, INF]
        assert round_to(x, "float16", mode, "saturate").tolist() == [65504.0, 65504.0]
        assert round_to(x, "e4m3", mode).isnan().tolist() == [not inward, True]
        assert round_to(x, "float16", mode, "nan").isnan().tolist() == [not inward, True]
        assert round_to(x, "int4", mode).tolist() == [7.0, 7.0]


def test_float64_keeps_every_value() -> None:
    """Rounding to float64 changes nothing but infinities, as the overflow policy says, and returns a copy."""
    x = float64(math.pi, -0.0, 5e-324, 1.7e308, INF, -INF)
    for mode in MODES:
        rounded = round_to(x, "float64", mode)
        assert torch.equal(rounded.view(torch.int64), x.view(torch.int64))
        assert rounded.data_ptr() != x.data_ptr()
    assert round_to(x[4:], "float64", overflow="saturate").tolist() == [1.7976931348623157e308, -1.7976931348623157e308]
    assert bool(round_to(x[4:], "float64", overflow="nan").isnan().all())


def test_e8m0_rounds_to_powers_of_two() -> None:
    """e8m0 takes ties to the larger power, what is below its least value to that, and negative numbers to NaN."""
    x = float64(1.4, 1.5, 3.0, 6.0, 0.0, -0.0, 2.0**-130, 1.5 * 2.0**127, -(2.0**-130))
    expected = float64(1, 2, 4, 8, 2.0**-127, 2.0**-127, 2.0**-127, NAN, NAN)
    torch.testing.assert_close(round_to(x, "e8m0"), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_are_kept(mode: Mode) -> None:
    for shape in ((), (0,), (3, 0), (5, 7)):
        assert round_to(torch.ones(shape, dtype=torch.float64), "bf16", mode).shape == shape


@pytest.mark.parametrize("mode", SETTLED)
def test_strides_do_not_matter_and_inputs_stay(mode: Mode) -> None:
    base = torch.randn(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = base.clone()
    for view in (base.t(), base[::3, 1::2], base[:, :1].expand(20, 9), base.flip(0)):
        assert torch.equal(round_to(view, "e4m3", mode), round_to(view.contiguous(), "e4m3", mode))
    assert torch.equal(base, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_narrower_inputs_are_promoted_exactly(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 101).to(dtype)
    assert round_to(x, "e4m3").dtype == torch.float64
    assert torch.equal(round_to(x, "e4m3"), round_to(x.to(torch.float64), "e4m3"))
    assert torch.equal(round_to(x, dtype), x.to(torch.float64))


def test_the_result_carries_no_gradient() -> None:
    assert not round_to(torch.ones(3, requires_grad=True), "bf16").requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "builtin", "message"),
    [
        ((torch.ones(2), "bf61"), UnknownFormat, ValueError, "did you mean 'bf16'"),
        ((torch.ones(2), "bf16", "nearset"), UnknownOption, ValueError, "a rounding mode of nearest, .*'nearset'"),
        ((torch.ones(2), "bf16", "up", "clip"), UnknownOption, ValueError, "expected overflow of inf, .*'clip'"),
        ((torch.ones(2), "int8", "up", "nan"), NotRepresentable, ValueError, "overflow='saturate' for int8"),
        ((float64(1, NAN), "int8"), NotRepresentable, ValueError, "got NaN, which int8 has not"),
        ((float64(1, NAN), "float4_e2m1fn"), NotRepresentable, ValueError, "got NaN"),
        ((torch.ones(2, dtype=torch.int64), "bf16"), WrongDtype, TypeError, "got torch.int64"),
    ],
)
def test_misuse_is_explained(
    arguments: tuple[Any, ...], error: type[AssayError], builtin: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        round_to(*arguments)
    assert isinstance(caught.value, AssayError)
    assert isinstance(caught.value, builtin)
