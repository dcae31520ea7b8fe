"""Number formats as data.

A `Format` is a row of the table `FORMATS`; its other properties (largest value, unit roundoff, codes of NaN) are
derived from it.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch

from assay.formats.errors import UnknownFormat
from assay.runtime.errors import unknown

__all__ = ["ALIASES", "FORMATS", "Format", "format_named"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary number format of at most 64 bits, each of whose finite values is a float64.

    A float has, from the top bit: sign (if signed), biased exponent, trailing significand. Exponent field 0 holds zero
    and the subnormals, unless `precision` is 1: there are then no trailing bits, no zero and no subnormals (e8m0). A
    signed integer is two's complement. A codebook is a list of values, one for each code, in any spacing.
    """

    name: str
    kind: Literal["float", "integer", "codebook"]
    bits: int
    precision: int = 0
    """Digits of the significand, including the hidden one; the bits of an integer; 0 for a codebook."""
    bias: int = 0
    """Exponent field minus exponent."""
    infinities: bool = False
    nan: Literal["ieee", "all_ones", "negative_zero", "none"] = "none"
    """The codes of NaN: those past infinity, the one with all bits set (of either sign), the one of -0, or none."""
    signed: bool = True
    values: tuple[float, ...] = ()
    """The values of a codebook, in the order of the codes."""
    source: str
    """The standard or data sheet that defines the format."""

    @cached_property
    def trailing_bits(self) -> int:
        """Significand bits that are stored: all but the hidden one."""
        return self.precision - 1 if self.kind == "float" else 0

    @cached_property
    def exponent_bits(self) -> int:
        """Width of the exponent field; 0 for an integer."""
        return self.bits - self.trailing_bits - self.signed if self.kind == "float" else 0

    @cached_property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan != "none"

    @cached_property
    def has_zero(self) -> bool:
        """Whether zero is a value: not so in e8m0."""
        return 0.0 in self.values if self.values else self.precision > 1

    @cached_property
    def has_negative_zero(self) -> bool:
        """Whether zero has a sign."""
        if self.values:
            return any(value == 0 and math.copysign(1, value) < 0 for value in self.values)
        return self.kind == "float" and self.signed and self.has_zero and self.nan != "negative_zero"

    @cached_property
    def nan_code(self) -> int | None:
        """Code of the NaN that `encode` writes (IEEE: quiet, sign and payload zero), or None."""
        codes = {
            "ieee": self.largest_code + 1 | 1 << max(self.trailing_bits - 1, 0),
            "all_ones": self._magnitudes - 1,
            "negative_zero": self._magnitudes,
        }
        return codes.get(self.nan)

    @cached_property
    def largest_code(self) -> int:
        """Code of the largest finite value."""
        if self.values:
            return self.values.index(max(self.values))
        if self.infinities:
            return self._magnitudes - (1 << self.trailing_bits) - 1
        return self._magnitudes - (2 if self.nan == "all_ones" else 1)

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; the spacing is constant below the binade after it."""
        if self.kind == "integer":
            return self.bits - 1
        if self.values:
            return _exponent(self.smallest_subnormal)
        return 1 - self.bias if self.has_zero else -self.bias

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (an integer has one spacing: `min_exponent`)."""
        if self.kind == "integer":
            return self.min_exponent
        if self.values:
            return _exponent(self.largest)
        return (self.largest_code >> self.trailing_bits) - self.bias

    @cached_property
    def largest(self) -> float:
        """The largest finite value."""
        if self.values:
            return max(self.values)
        if self.kind == "integer":
            return float(self.largest_code)
        hidden = 1 << self.trailing_bits
        return math.ldexp(hidden + self.largest_code % hidden, self.max_exponent - self.trailing_bits)

    @cached_property
    def lowest(self) -> float:
        """The least finite value: -`largest` for a signed float, 0 for an unsigned integer, 2^-127 for e8m0."""
        if self.values:
            return min(self.values)
        if not self.signed:
            return 0.0 if self.has_zero else self.smallest_subnormal
        return -self.largest if self.kind == "float" else -self.largest - 1

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision; 1 for an integer."""
        if self.values:
            return self.smallest_subnormal
        return math.ldexp(1.0, self.min_exponent) if self.kind == "float" else 1.0

    @cached_property
    def smallest_subnormal(self) -> float:
        """The smallest positive value (except in e8m0, also the smallest gap between values); 1 for an integer."""
        if self.values:
            return min(value for value in self.values if value > 0)
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @cached_property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value; 1 for an integer; the widest gap of a codebook."""
        if self.values:
            return max(right - left for left, right in pairwise(sorted(self.values)))
        return math.ldexp(1.0, 1 - self.precision) if self.kind == "float" else 1.0

    @cached_property
    def unit_roundoff(self) -> float:
        """Relative error bound of rounding to nearest in the normal range: `epsilon` / 2 (Higham, ASNA, thm 2.2).

        Below `smallest_normal` the error is absolute, at most `smallest_subnormal` / 2. For integers and codebooks it
        is absolute everywhere, at most `epsilon` / 2: their unit roundoff is 0.
        """
        return self.epsilon / 2 if self.kind == "float" else 0.0

    @cached_property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype whose elements are single values of this format, or None."""
        return _TORCH_DTYPES.get(self.name)

    @cached_property
    def _magnitudes(self) -> int:
        """Number of codes that differ in more than the sign."""
        return 1 << (self.bits - self.signed)

    def __str__(self) -> str:
        return self.name


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


_IEEE = "IEEE 754-2019, table 3.5"
_OFP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0, 2023"
_FNUZ = "Noune et al., 8-bit numerical formats for deep neural networks, arXiv:2206.02915; AMD CDNA 3 ISA"
_MX = "OCP Microscaling Formats (MX) Specification 1.0, 2023"
_TWOS = "two's complement, ISO C23 6.2.6.2"
_BINARY = "pure binary, ISO C23 6.2.6.2"

# fmt: off
_ROWS = (
    Format(name="float64", kind="float", bits=64, precision=53, bias=1023, infinities=True, nan="ieee", source=_IEEE),
    Format(name="float32", kind="float", bits=32, precision=24, bias=127, infinities=True, nan="ieee", source=_IEEE),
    Format(name="tf32", kind="float", bits=19, precision=11, bias=127, infinities=True, nan="ieee",
           source="NVIDIA A100 Tensor Core GPU Architecture, 2020: the upper 19 bits of a float32"),
    Format(name="bfloat16", kind="float", bits=16, precision=8, bias=127, infinities=True, nan="ieee",
           source="Intel, BFLOAT16 Hardware Numerics Definition 1.0, 2018"),
    Format(name="float16", kind="float", bits=16, precision=11, bias=15, infinities=True, nan="ieee", source=_IEEE),
    Format(name="float8_e4m3fn", kind="float", bits=8, precision=4, bias=7, nan="all_ones", source=_OFP8),
    Format(name="float8_e4m3fnuz", kind="float", bits=8, precision=4, bias=8, nan="negative_zero", source=_FNUZ),
    Format(name="float8_e5m2", kind="float", bits=8, precision=3, bias=15, infinities=True, nan="ieee", source=_OFP8),
    Format(name="float8_e5m2fnuz", kind="float", bits=8, precision=3, bias=16, nan="negative_zero", source=_FNUZ),
    Format(name="float6_e2m3fn", kind="float", bits=6, precision=4, bias=1, source=_MX),
    Format(name="float6_e3m2fn", kind="float", bits=6, precision=3, bias=3, source=_MX),
    Format(name="float4_e2m1fn", kind="float", bits=4, precision=2, bias=1, source=_MX),
    Format(name="float8_e8m0fnu", kind="float", bits=8, precision=1, bias=127, nan="all_ones", signed=False,
           source=_MX),
    Format(name="int8", kind="integer", bits=8, precision=8, source=_TWOS),
    Format(name="uint8", kind="integer", bits=8, precision=8, signed=False, source=_BINARY),
    Format(name="int4", kind="integer", bits=4, precision=4, source=_TWOS),
    Format(name="uint4", kind="integer", bits=4, precision=4, signed=False, source=_BINARY),
    Format(name="int3", kind="integer", bits=3, precision=3, source=_TWOS),
    Format(name="int2", kind="integer", bits=2, precision=2, source=_TWOS),
    Format(name="nf4", kind="codebook", bits=4, source="Dettmers et al., QLoRA, arXiv:2305.14314, appendix E", values=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)),
)
# fmt: on

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
"""The known formats by name, as torch and ml_dtypes spell it."""

_OTHER_NAMES = {
    "float64": "fp64 f64 double",
    "float32": "fp32 f32 float",
    "tf32": "tensorfloat32",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float8_e4m3fn": "e4m3fn e4m3 fp8_e4m3",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2 fp8_e5m2",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float6_e2m3fn": "e2m3fn e2m3",
    "float6_e3m2fn": "e3m2fn e3m2",
    "float4_e2m1fn": "e2m1fn e2m1 fp4 float4_e2m1fn_x2",  # _x2: torch's dtype for a byte with two of them
    "float8_e8m0fnu": "e8m0fnu e8m0",
    "int8": "i8",
    "uint8": "u8",
}
ALIASES: dict[str, str] = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}
"""Short and other names, each with its name in `FORMATS`."""

_BY_NAME = FORMATS | {alias: FORMATS[name] for alias, name in ALIASES.items()}

# torch also names narrower integers, but can't compute with tensors of them.
_TORCH_DTYPES = {
    name: getattr(torch, name)
    for name, row in FORMATS.items()
    if hasattr(torch, name) and (row.kind == "float" or row.bits >= 8)
}


def format_named(format: Format | str | torch.dtype) -> Format:
    """Return the format of a name ("bfloat16", "torch.bfloat16", "bf16") or a torch dtype; return a Format unchanged.

    Raises UnknownFormat, with the nearest names.
    """
    if isinstance(format, Format):
        return format
    name = str(format).lower().removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise UnknownFormat(unknown("number format", str(format), _BY_NAME))
