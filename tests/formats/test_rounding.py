"""Rounding against three oracles: gfloat, the definition in IEEE 754 written out, and casts of ml_dtypes and torch."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gfloat import Domain, FormatInfo, RoundMode, round_float, round_ndarray
from gfloat import formats as gfloats

from assay.formats.codes import all_values, decode
from assay.formats.format import FORMATS, Format
from assay.formats.rounding import Mode, Overflow, round_to

INF, NAN = math.inf, math.nan
MODES: tuple[Mode, ...] = tuple(mode for mode in get_args(Mode) if mode != "stochastic")
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
SMALL = [name for name, format in FORMATS.items() if format.bits <= 8]
LISTED = [name for name, format in FORMATS.items() if format.bits <= 16]
Rounder = Callable[[torch.Tensor], torch.Tensor]
Array = npt.NDArray[np.float64]


def info(bits: int, precision: int, bias: int, *, fnuz: bool = False) -> FormatInfo:
    """gfloat's record of an interchange format of IEEE 754, or of one whose only NaN has the pattern of -0."""
    return FormatInfo(
        f"{bits} bits, {precision} digits",
        bits,
        precision,
        bias=bias,
        is_signed=True,
        domain=Domain.Finite if fnuz else Domain.Extended,
        has_nz=not fnuz,
        num_high_nans=0 if fnuz else 2 ** (precision - 1) - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT = {
    "float32": gfloats.format_info_binary32,
    "tf32": info(19, 11, 127),
    "bfloat16": gfloats.format_info_bfloat16,
    "float16": gfloats.format_info_binary16,
    "float8_e4m3fn": gfloats.format_info_ocp_e4m3,
    "float8_e4m3fnuz": info(8, 4, 8, fnuz=True),
    "float8_e5m2": gfloats.format_info_ocp_e5m2,
    "float8_e5m2fnuz": info(8, 3, 16, fnuz=True),
    "float6_e2m3fn": gfloats.format_info_ocp_e2m3,
    "float6_e3m2fn": gfloats.format_info_ocp_e3m2,
    "float4_e2m1fn": gfloats.format_info_ocp_e2m1,
}
GFLOAT_MODES = {
    "nearest": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}


@lru_cache
def magnitudes(name: str) -> Array:
    """Finite values of a format from 0 up: all of one up to 16 bits, else some of each binade and random ones."""
    format = FORMATS[name]
    if format.bits <= 16:
        values = all_values(format)
    else:
        fields = torch.arange(1 << format.exponent_bits)[:, None] << format.trailing_bits
        half = 1 << (format.trailing_bits - 1)
        trailing = torch.tensor([0, 1, 2, 3, half - 1, half, half + 1, 2 * half - 2, 2 * half - 1])
        random = torch.randint(0, format.largest_code, (10_000,), generator=torch.Generator().manual_seed(1))
        values = decode(torch.cat([(fields + trailing).flatten(), random, random + 1]), format)
    finite = values[values.isfinite() & (values >= 0)].numpy()
    return np.unique(np.abs(finite))


def last_spacing(format: Format) -> float:
    """The spacing of a format's topmost values."""
    return 2.0 ** (format.max_exponent - format.precision + 1)


@lru_cache
def hard_inputs(name: str) -> torch.Tensor:
    """Where rounding goes wrong: values, midpoints, the float64 just beside each, and around overflow's threshold."""
    format, below = FORMATS[name], magnitudes(name)
    beyond = format.largest + last_spacing(format) * np.arange(0.25, 4.25, 0.25)
    far = format.largest * np.array([2, 3, 1e3, 1e200])
    points = np.concatenate([below, (below[:-1] + below[1:]) / 2, beyond, far])
    extreme = [0.0, 5e-324, 1e-310, 2.0**-1022, format.smallest_subnormal / 4, 1.7e308, INF]
    points = np.concatenate([points, np.nextafter(points, INF), np.nextafter(points, -INF), extreme])
    return torch.from_numpy(np.concatenate([points, -points]))


def same(left: Array, right: Array) -> npt.NDArray[np.bool_]:
    """Where values and signs are equal, or both NaN."""
    equal: npt.NDArray[np.bool_] = (left == right) & (np.signbit(left) == np.signbit(right))
    return equal | np.isnan(left) & np.isnan(right)


def by_gfloat(x: Array, name: str, mode: Mode, overflow: Overflow) -> Array:
    """gfloat's array twin; it has no overflow to NaN, and refuses where we saturate."""
    info, format = GFLOAT[name], FORMATS[name]
    saturate = overflow == "saturate" or not format.has_nan
    with np.errstate(over="ignore"):
        rounded: Array = round_ndarray(info, x, GFLOAT_MODES[mode], saturate)
    return np.where(np.isinf(rounded), NAN, rounded) if overflow == "nan" else rounded


def disagreements(rounder: Rounder, name: str, mode: Mode = "nearest", overflow: Overflow = "inf") -> list[float]:
    """The checker: the hard inputs that a rounder rounds otherwise than gfloat does."""
    x = hard_inputs(name)
    wrong = ~same(rounder(x).numpy(), by_gfloat(x.numpy(), name, mode, overflow))
    return [float(value) for value in x.numpy()[wrong]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GFLOAT)
def test_hard_inputs_round_as_gfloat_rounds_them(name: str, mode: Mode) -> None:
    for overflow in OVERFLOWS:
        if overflow != "nan" or FORMATS[name].has_nan:
            rounder = partial(round_to, format=name, mode=mode, overflow=overflow)
            assert disagreements(rounder, name, mode, overflow) == []


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_casting_by_way_of_float32_is_rejected(name: str) -> None:
    """The checker finds the double rounding of a cast through float32: beside midpoints, and nowhere else."""
    caught = disagreements(lambda x: round_to(x.to(torch.float32), name), name)
    values = np.append(magnitudes(name), FORMATS[name].largest + last_spacing(FORMATS[name]))
    midpoints = ((values[:-1] + values[1:]) / 2).tolist()
    assert len(caught) > 100
    assert {abs(x) for x in caught} <= {math.nextafter(point, side) for point in midpoints for side in (0, INF)}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: round_to(x, "bfloat16", "toward_zero"), id="truncated"),
        pytest.param(lambda x: round_to(x, "bfloat16", "nearest_away"), id="ties-away"),
        pytest.param(lambda x: round_to(x, "bfloat16", overflow="saturate"), id="saturated"),
        pytest.param(lambda x: round_to(x, "bfloat16", overflow="nan"), id="overflow-to-nan"),
        pytest.param(lambda x: round_to(x, "bfloat16") + 0.0, id="zero-without-sign"),
        pytest.param(lambda x: round_to(x, "bfloat16").where(x.abs() >= 2.0**-126, x * 0), id="subnormals-flushed"),
        pytest.param(lambda x: round_to(x, "tf32"), id="another-format"),
        pytest.param(lambda x: round_to(x * (1 + 2.0**-52), "bfloat16"), id="one-float64-ulp-off"),
    ],
)
def test_a_wrong_rounder_is_rejected(wrong: Rounder) -> None:
    assert disagreements(lambda x: round_to(x, "bfloat16"), "bfloat16") == []
    assert len(disagreements(wrong, "bfloat16")) > 0


def test_the_double_rounding_witness() -> None:
    """1 + 2^-8 + 2^-40 is just above a midpoint of bfloat16: up; through float32, as ml_dtypes does, it lands on 1."""
    witness = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to(witness, "bfloat16").item() == 1 + 2.0**-7
    assert round_float(GFLOAT["bfloat16"], witness.item()) == 1 + 2.0**-7
    assert witness.to(torch.float32).to(torch.bfloat16).item() == 1.0


def by_definition(x: float, name: str, mode: Mode, overflow: Overflow) -> float:
    """IEEE 754-2019, 4.3 and 7.4, in exact arithmetic on the list of values."""
    format, values = FORMATS[name], grid(name)
    lowest, largest = values[1], values[-2]
    if not format.has_zero and x <= lowest:
        return lowest if x >= 0 else NAN
    limit = largest if x > 0 else lowest
    if math.isfinite(x):
        result = choose(min(max(x, values[0]), values[-1]), values, mode, format.kind == "codebook")
        if lowest <= result <= largest:
            return math.copysign(result, x) if format.has_negative_zero else result + 0.0
        if mode in ("toward_zero", "down" if x > 0 else "up"):
            return limit
    if overflow == "saturate" or not format.has_nan:
        return limit
    return math.copysign(INF, x) if overflow == "inf" and format.infinities else NAN


@lru_cache
def grid(name: str) -> list[float]:
    """The finite values of a format in order, and on either side the next, if its exponent had no limit."""
    finite = all_values(name)
    values = sorted(set(finite[finite.isfinite()].tolist()))
    step = values[-1] - values[-2] if FORMATS[name].has_zero else values[-1]
    return [values[0] - step, *values, values[-1] + step]


def choose(x: float, values: list[float], mode: Mode, codebook: bool) -> float:
    """Which of its neighbours in a sorted list the mode takes x to."""
    low, high = values[bisect_right(values, x) - 1], values[bisect_left(values, x)]
    inward, outward = (low, high) if x > 0 else (high, low)
    match mode:
        case "up":
            return high
        case "down":
            return low
        case "toward_zero":
            return inward
    lean = 2 * Fraction(x) - Fraction(low) - Fraction(high)
    if low == high or lean != 0:
        return high if lean > 0 else low
    if mode == "nearest_away":
        return outward
    # In a codebook a code is the place in the list, here one more for the value before its first.
    is_even = values.index(low) % 2 if codebook else Fraction(low) / (Fraction(high) - Fraction(low)) % 2 == 0
    return low if is_even else high


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SMALL)
def test_small_formats_round_by_the_definition(name: str, mode: Mode) -> None:
    x = hard_inputs(name)
    for overflow in OVERFLOWS:
        if overflow != "nan" or FORMATS[name].has_nan:
            expected = np.array([by_definition(value, name, mode, overflow) for value in x.tolist()])
            assert x.numpy()[~same(round_to(x, name, mode, overflow).numpy(), expected)].tolist() == []


DECIMALS = Format(name="decimals", kind="codebook", bits=4, source="-", values=tuple(n / 10 for n in range(-8, 8)))


@pytest.mark.parametrize("mode", ["nearest", "nearest_away"])
def test_a_codebook_of_decimals_has_exact_midpoints(mode: Mode) -> None:
    """Where the midpoint of two values is no float64, a number next to it is no tie: it goes to the nearer value."""
    values = list(DECIMALS.values)
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    assert set(middles) - {(Fraction(low) + Fraction(high)) / 2 for low, high in pairwise(values)}
    near = [x for middle in middles for x in (math.nextafter(middle, -INF), middle, math.nextafter(middle, INF))]
    expected = [choose(x, [values[0] - 0.1, *values], mode, codebook=True) for x in near]
    assert round_to(torch.tensor(near, dtype=torch.float64), DECIMALS, mode).tolist() == expected


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", *(n for n in SMALL if hasattr(ml_dtypes, n) and FORMATS[n].kind == "float")]
)
def test_float32_inputs_round_as_ml_dtypes_casts_them(name: str) -> None:
    """From float32, whence one cast rounds once, ml_dtypes agrees; its policy on overflow is the format's own.

    Left out are the inputs of e8m0 that ml_dtypes turns into NaN: zero.
    """
    x = hard_inputs(name)
    x = x[x.to(torch.float32).to(torch.float64) == x]
    x = x[x != 0] if name == "float8_e8m0fnu" else x
    with np.errstate(over="ignore", invalid="ignore"):
        cast = x.numpy().astype(np.float32).astype(getattr(ml_dtypes, name, name)).astype(np.float64)
    assert x.numpy()[~same(round_to(x, name).numpy(), cast)].tolist() == []


@pytest.mark.parametrize("name", [n for n in LISTED if FORMATS[n].torch_dtype and FORMATS[n].kind == "float"])
def test_float32_inputs_round_as_torch_casts_them(name: str) -> None:
    """From float32, torch's casts agree on all that does not overflow, which some formats and versions saturate.

    Left out are negative inputs of e8m0, whose sign torch drops.
    """
    format, x = FORMATS[name], hard_inputs(name)
    x = x[(x.to(torch.float32).to(torch.float64) == x) & (x.abs() <= format.largest)]
    x = x[~x.signbit()] if not format.signed else x
    assert format.torch_dtype is not None
    cast = x.to(torch.float32).to(format.torch_dtype).to(torch.float64)
    assert x.numpy()[~same(round_to(x, name).numpy(), cast.numpy())].tolist() == []


def test_float32_rounds_as_the_hardware_does() -> None:
    x = hard_inputs("float32")
    assert bool(same(round_to(x, "float32").numpy(), x.to(torch.float32).to(torch.float64).numpy()).all())
