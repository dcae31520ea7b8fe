"""The table of formats, names, and bit patterns, against ml_dtypes, torch and numpy."""

import dataclasses
import re
import statistics
import subprocess
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from assay.formats.codes import all_values, binade, decode, encode
from assay.formats.errors import InvalidCode, NotRepresentable, TooManyValues, UnknownFormat, WrongDtype
from assay.formats.format import ALIASES, FORMATS, Format, format_named
from assay.formats.rounding import round_to
from assay.precision import AssayError

LISTED = [name for name, format in FORMATS.items() if format.bits <= 16]
FLOATS = [name for name, format in FORMATS.items() if format.kind == "float"]
IN_ML_DTYPES = [name for name in LISTED if hasattr(ml_dtypes, name)]
IN_TORCH = [name for name in LISTED if FORMATS[name].torch_dtype is not None]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal values with equal signs, NaN where the other has NaN."""
    both_nan = left.isnan() & right.isnan()
    return left.shape == right.shape and bool((both_nan | (left == right) & (left.signbit() == right.signbit())).all())


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of a format, as unsigned integers of the storage width of ml_dtypes and torch."""
    count = 1 << FORMATS[name].bits
    return torch.from_numpy(np.arange(count, dtype=np.uint8 if count <= 256 else np.uint16))


def by_ml_dtypes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """The values of bit patterns according to ml_dtypes."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return torch.from_numpy(codes.numpy().view(getattr(ml_dtypes, name)).astype(np.float64))


@pytest.mark.parametrize("name", sorted({*IN_ML_DTYPES, *IN_TORCH}))
def test_every_pattern_has_the_value_of_ml_dtypes_and_torch(name: str) -> None:
    if name in IN_ML_DTYPES:
        assert same(all_values(name), by_ml_dtypes(patterns(name), name))
    dtype = format_named(name).torch_dtype
    if dtype is not None:
        assert same(all_values(name), patterns(name).view(dtype).to(torch.float64))


def test_the_oracles_cover_every_format_up_to_16_bits() -> None:
    assert {*IN_ML_DTYPES, *IN_TORCH, "int3", "nf4"} == set(LISTED)


def test_int3_is_the_lower_part_of_int4_and_tf32_the_upper_part_of_float32() -> None:
    codes = torch.arange(8)
    assert same(all_values("int3"), decode(torch.where(codes >= 4, codes | 8, codes), "int4"))
    codes = torch.arange(1 << 19)
    assert same(decode(codes, "tf32"), decode(codes << 13, "float32"))


def normal_quantiles(offset: float) -> list[float]:
    """Quantiles of the standard normal, eight above zero and seven below, evenly between 1 - offset and 1/2, and 0."""
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * step / 8) for step in range(8)]
    below = [-quantile(offset + (0.5 - offset) * step / 7) for step in range(7)]
    return sorted(value / above[0] for value in [*above, 0.0, *below])


def test_nf4_holds_quantiles_of_the_normal_distribution() -> None:
    """Its values are float32 and, to float32's accuracy, QLoRA's quantiles, whose outermost leave (1/32 + 1/30) / 2."""
    expected = normal_quantiles(1 - (1 / 32 + 1 / 30) / 2)
    assert all_values("nf4").tolist() == pytest.approx(expected, abs=2e-7)
    assert torch.equal(all_values("nf4").float().double(), all_values("nf4"))
    assert all_values("nf4").tolist() != pytest.approx(normal_quantiles(0.99), abs=2e-7)


def test_a_codebook_may_list_its_values_in_any_order() -> None:
    """Codes mean the values at their places, 0 and -0 apart; values are rounded to their neighbours by size."""
    signed = Format(name="b", kind="codebook", bits=3, values=(0.0, 0.5, 4.0, 2.0, -0.0, -0.5, -4.0, -2.0), source="-")
    assert encode(decode(torch.arange(8), signed), signed).tolist() == list(range(8))
    assert round_to(torch.tensor([1.3, -0.1, 3.5, -9.0]), signed).tolist() == [2.0, -0.0, 4.0, -4.0]
    limits = (signed.lowest, signed.largest, signed.largest_code, signed.smallest_subnormal, signed.epsilon)
    assert limits == (-4.0, 4.0, 2, 0.5, 2.0)
    assert signed.has_negative_zero


def test_the_comparison_rejects_a_wrong_pattern_table() -> None:
    """The table of e4m3fn is told from that of e4m3fnuz, and a lost sign of zero from none lost."""
    assert not same(all_values("float8_e4m3fn"), by_ml_dtypes(patterns("float8_e4m3fnuz"), "float8_e4m3fnuz"))
    assert not same(all_values("float8_e4m3fn"), all_values("float8_e4m3fn") + 0.0)


@pytest.mark.parametrize(("name", "integer", "real"), [("float32", "i4", "f4"), ("float64", "i8", "f8")])
def test_wide_patterns_have_the_value_of_numpy(name: str, integer: str, real: str) -> None:
    info = np.iinfo(integer)
    ends = [info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max]
    random = np.random.default_rng(0).integers(info.min, info.max, 20_000)
    codes = np.concatenate([ends, random]).astype(integer)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = codes.view(real).astype(np.float64)
    assert same(decode(torch.from_numpy(codes), name), torch.from_numpy(expected))


@pytest.mark.parametrize("name", FORMATS)
def test_encode_inverts_decode(name: str) -> None:
    """Every pattern but NaN's comes back from its value; NaN comes back as the one pattern of `nan_code`."""
    format = format_named(name)
    if name in LISTED:
        codes = torch.arange(1 << format.bits)
    else:  # a sample, subnormals and infinities among it
        codes = torch.randint(0, 1 << min(format.bits, 62), (20_000,), generator=torch.Generator().manual_seed(0))
        codes = torch.cat([codes, codes >> 8, torch.tensor([0, 1, format.largest_code, format.largest_code + 1])])
    values = decode(codes, format)
    if format.nan_code is not None:
        codes = torch.where(values.isnan(), format.nan_code, codes)
    assert torch.equal(encode(values, format), codes)


@pytest.mark.parametrize("name", [name for name in FLOATS if name in LISTED and FORMATS[name].has_nan])
def test_nan_is_written_as_ml_dtypes_writes_it(name: str) -> None:
    dtype = np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))
    written = np.array([np.nan]).astype(dtype).view(f"u{dtype.itemsize}")
    assert encode(torch.tensor([float("nan")]), name).tolist() == written.tolist()


@pytest.mark.parametrize("name", FLOATS)
def test_properties_agree_with_finfo(name: str) -> None:
    """Largest, smallest and epsilon are those of ml_dtypes' or numpy's finfo; tf32 is held against its definition."""
    format = format_named(name)
    if name == "tf32":
        assert (format.exponent_bits, format.trailing_bits, format.smallest_normal) == (8, 10, 2.0**-126)
        return
    info = ml_dtypes.finfo(getattr(ml_dtypes, name, name))  # type: ignore[no-untyped-call]
    assert format.largest == float(info.max)
    assert format.lowest == float(info.min)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest_subnormal == float(info.smallest_subnormal)
    assert format.epsilon == 2 * format.unit_roundoff == float(info.eps)
    assert (format.exponent_bits, format.trailing_bits) == (info.nexp, info.nmant)


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "nans", "infinities"),
    [
        ("bfloat16", (2 - 2**-7) * 2.0**127, 2.0**-133, 254, 2),
        ("float16", 65504, 2.0**-24, 2046, 2),
        ("float8_e4m3fn", 448, 2.0**-9, 2, 0),
        ("float8_e4m3fnuz", 240, 2.0**-10, 1, 0),
        ("float8_e5m2", 57344, 2.0**-16, 6, 2),
        ("float8_e5m2fnuz", 57344, 2.0**-17, 1, 0),
        ("float6_e2m3fn", 7.5, 0.125, 0, 0),
        ("float6_e3m2fn", 28, 0.0625, 0, 0),
        ("float4_e2m1fn", 6, 0.5, 0, 0),
        ("float8_e8m0fnu", 2.0**127, 2.0**-127, 1, 0),
        ("int8", 127, 1, 0, 0),
        ("uint8", 255, 1, 0, 0),
        ("int4", 7, 1, 0, 0),
        ("uint4", 15, 1, 0, 0),
        ("int3", 3, 1, 0, 0),
        ("int2", 1, 1, 0, 0),
        ("nf4", 1, 0.07958029955625534, 0, 0),
    ],
)
def test_limits_are_those_of_the_specifications(
    name: str, largest: float, smallest: float, nans: int, infinities: int
) -> None:
    format, values = format_named(name), all_values(name)
    finite = values[values.isfinite()]
    assert format.largest == finite.max() == largest
    assert format.lowest == finite.min()
    assert format.smallest_subnormal == finite[finite > 0].min() == smallest
    assert values[format.largest_code] == largest
    assert int(values.isnan().sum()) == nans
    assert int(values.isinf().sum()) == infinities
    assert format.has_zero == bool((values == 0).any())
    assert format.has_negative_zero == bool(((values == 0) & values.signbit()).any())


def test_every_format_names_its_source_and_cannot_be_changed() -> None:
    assert all(format.source and format.name == name for name, format in FORMATS.items())
    assert len(set(FORMATS.values())) == len(FORMATS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["int8"].bits = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("fp32", "float32"),
        ("e4m3", "float8_e4m3fn"),
        ("e4m3fnuz", "float8_e4m3fnuz"),
        ("e5m2", "float8_e5m2"),
        (torch.half, "float16"),
        (torch.float8_e8m0fnu, "float8_e8m0fnu"),
        (torch.float4_e2m1fn_x2, "float4_e2m1fn"),
        ("torch.int4", "int4"),
        (FORMATS["tf32"], "tf32"),
    ],
)
def test_a_format_is_found_by_name_alias_or_dtype(given: Format | str | torch.dtype, name: str) -> None:
    assert format_named(given) is FORMATS[name]


def test_aliases_and_dtypes_lead_to_formats() -> None:
    assert set(ALIASES.values()) <= set(FORMATS)
    assert not set(ALIASES) & set(FORMATS)
    assert all(format_named(format.torch_dtype) is format for format in FORMATS.values() if format.torch_dtype)


MISUSE: dict[str, tuple[Callable[[], object], type[AssayError], type[Exception], str]] = {
    "a name near another": (lambda: format_named("bfloat61"), UnknownFormat, ValueError, "'bfloat61'.*did you mean"),
    "a part of a name": (lambda: format_named("float8_e4m3"), UnknownFormat, ValueError, "float8_e4m3fn"),
    "a name near none": (lambda: format_named("xyz"), UnknownFormat, ValueError, "'xyz'.*known: "),
    "a dtype": (lambda: format_named(torch.complex64), UnknownFormat, ValueError, "complex64"),
    "two int4 in a byte": (
        lambda: decode(torch.tensor([3, 16]), "int4"),
        InvalidCode,
        ValueError,
        "expected 4-bit codes of int4, got 16",
    ),
    "a code below all": (lambda: decode(torch.tensor([3, -9]), "int4"), InvalidCode, ValueError, "of int4, got -9"),
    "values as codes": (lambda: decode(torch.ones(2), "int8"), WrongDtype, TypeError, "integer bit patterns"),
    "too many values": (lambda: all_values("tf32"), TooManyValues, ValueError, "tf32"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_explained(name: str) -> None:
    """Each misuse raises its own AssayError, which is also the natural builtin, and says what came."""
    call, error, builtin, message = MISUSE[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, AssayError)
    assert isinstance(caught.value, builtin)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("float8_e4m3fn", 1.0625),
        ("float8_e4m3fn", 480.0),
        ("float8_e4m3fn", float("inf")),
        ("bfloat16", 2.0**-134),
        ("float4_e2m1fn", float("nan")),
        ("float8_e8m0fnu", 0.0),
        ("float8_e8m0fnu", -1.0),
        ("float8_e8m0fnu", 2.0**-128),
        ("float16", 1e300),
        ("int4", 8.0),
        ("nf4", 0.5),
        ("nf4", float("nan")),
        ("uint8", -1.0),
        ("int8", 0.5),
        ("int8", float("nan")),
        ("int8", float("-inf")),
    ],
)
def test_encode_refuses_what_the_format_lacks(name: str, value: float) -> None:
    with pytest.raises(NotRepresentable, match=re.escape(f"expected values of {name}, got {value!r}:")):
        encode(torch.tensor([1.0, value], dtype=torch.float64), name)


def test_encode_takes_minus_zero_where_zero_has_no_sign() -> None:
    """-0 encodes as 0 in fnuz formats and integers, whose pattern 100...0 means something else."""
    minus_zero = torch.tensor(-0.0)
    assert [int(encode(minus_zero, name)) for name in ("float8_e4m3fnuz", "int8", "float8_e4m3fn")] == [0, 0, 128]


def test_decode_reads_signed_storage() -> None:
    unsigned = torch.arange(256).to(torch.uint8)
    assert same(decode(unsigned.view(torch.int8), "float8_e5m2"), decode(unsigned, "float8_e5m2"))


def test_shapes_are_kept() -> None:
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        codes = torch.zeros(shape, dtype=torch.uint8)
        assert decode(codes, "bf16").shape == encode(decode(codes, "bf16"), "bf16").shape == shape


def test_the_binade_is_held_within_the_exponents() -> None:
    """The binade of a value is its power of two, and the nearest one of the format for whatever has none."""
    x = torch.tensor([0.0, 2.0**-8, 0.5, -3.9, 448.0, 1e9, float("-inf"), float("nan")], dtype=torch.float64)
    assert binade(x, FORMATS["float8_e4m3fn"]).tolist() == [2.0**-6, 2.0**-6, 0.5, 2.0, 256.0, 256.0, 256.0, 256.0]


def test_the_package_loads_on_demand() -> None:
    """Importing the package loads no torch; using one of its names does; an unknown name is an AttributeError."""
    program = (
        "import sys, assay.precision as p; before = 'torch' in sys.modules; p.formats; p.round_to; "
        "print(before, 'torch' in sys.modules, hasattr(p, 'nonesuch'), set(p.__all__) <= set(dir(p)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False", "True"]
