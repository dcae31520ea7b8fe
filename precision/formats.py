"""Number formats as data, and the way between their bit patterns and values.

A `Format` is a row of the table `FORMATS`; all the rest (largest value, unit roundoff, where NaN sits) follows from it.
Values are float64 tensors, which hold every number of every format here; codes are int64 tensors of bit patterns.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import torch

from assay.precision.errors import InvalidCode, NotRepresentable, TooManyValues, UnknownFormat, WrongDtype

__all__ = ["ALIASES", "FORMATS", "Format", "all_values", "binade", "decode", "encode", "format_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary number format of at most 64 bits, each of whose finite values is a float64.

    A float has, from the top bit: sign (if signed), biased exponent, trailing significand. Exponent field 0 holds zero
    and the subnormals, unless `precision` is 1: there are then no trailing bits, no zero and no subnormals (e8m0).
    A signed integer is two's complement.
    """

    name: str
    kind: Literal["float", "integer"]
    bits: int
    precision: int
    """Digits of the significand, the hidden one counted; of an integer, its bits."""
    bias: int = 0
    """What the exponent field exceeds the exponent by."""
    infinities: bool = False
    nan: Literal["ieee", "all_ones", "negative_zero", "none"] = "none"
    """Which codes are NaN: those past infinity, the one with all bits set (of either sign), the one of -0, or none."""
    signed: bool = True
    source: str
    """The standard or data sheet that defines the format."""

    @property
    def trailing_bits(self) -> int:
        """Significand bits that are stored: all but the hidden one."""
        return self.precision - 1 if self.kind == "float" else 0

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent field; 0 for an integer."""
        return self.bits - self.trailing_bits - self.signed if self.kind == "float" else 0

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan != "none"

    @property
    def has_zero(self) -> bool:
        """Whether zero is a value: not so in e8m0."""
        return self.precision > 1

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has a sign."""
        return self.kind == "float" and self.signed and self.has_zero and self.nan != "negative_zero"

    @property
    def nan_code(self) -> int | None:
        """Code of the NaN that `encode` writes (IEEE: quiet, sign and payload zero), or None."""
        codes = {
            "ieee": self.largest_code + 1 | 1 << max(self.trailing_bits - 1, 0),
            "all_ones": self._magnitudes - 1,
            "negative_zero": self._magnitudes,
        }
        return codes.get(self.nan)

    @property
    def largest_code(self) -> int:
        """Code of the largest finite value."""
        if self.infinities:
            return self._magnitudes - (1 << self.trailing_bits) - 1
        return self._magnitudes - (2 if self.nan == "all_ones" else 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; the spacing is constant below the binade after it."""
        if self.kind == "integer":
            return self.bits - 1
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (an integer has one spacing: `min_exponent`)."""
        if self.kind == "integer":
            return self.min_exponent
        return (self.largest_code >> self.trailing_bits) - self.bias

    @property
    def largest(self) -> float:
        """The largest finite value."""
        if self.kind == "integer":
            return float(self.largest_code)
        hidden = 1 << self.trailing_bits
        return math.ldexp(hidden + self.largest_code % hidden, self.max_exponent - self.trailing_bits)

    @property
    def lowest(self) -> float:
        """The least finite value: -`largest` for a signed float, 0 for an unsigned integer, 2^-127 for e8m0."""
        if not self.signed:
            return 0.0 if self.has_zero else self.smallest_subnormal
        return -self.largest if self.kind == "float" else -self.largest - 1

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision; 1 for an integer."""
        return math.ldexp(1.0, self.min_exponent) if self.kind == "float" else 1.0

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, and (e8m0 apart) the smallest distance between values; 1 for an integer."""
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value; 1 for an integer."""
        return math.ldexp(1.0, 1 - self.precision) if self.kind == "float" else 1.0

    @property
    def unit_roundoff(self) -> float:
        """Relative error bound of rounding to nearest in the normal range: `epsilon` / 2 (Higham, ASNA, thm 2.2).

        Below `smallest_normal` the error is absolute, at most `smallest_subnormal` / 2. So it is everywhere for an
        integer, whose unit roundoff is 0.
        """
        return self.epsilon / 2 if self.kind == "float" else 0.0

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype whose elements are single values of this format, or None."""
        return _TORCH_DTYPES.get(self.name)

    @property
    def _magnitudes(self) -> int:
        """Number of codes that differ in more than the sign."""
        return 1 << (self.bits - self.signed)

    def __str__(self) -> str:
        return self.name


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
)
# fmt: on

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
"""The known formats by name, as torch and ml_dtypes spell it."""

_OTHER_NAMES = {
    "float64": "fp64 double",
    "float32": "fp32 float",
    "tf32": "tensorfloat32",
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "float8_e4m3fn": "e4m3fn e4m3 fp8_e4m3",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2 fp8_e5m2",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float6_e2m3fn": "e2m3fn e2m3",
    "float6_e3m2fn": "e3m2fn e3m2",
    "float4_e2m1fn": "e2m1fn e2m1 fp4 float4_e2m1fn_x2",  # _x2: torch's dtype for a byte with two of them
    "float8_e8m0fnu": "e8m0fnu e8m0",
}
ALIASES: dict[str, str] = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}
"""Short and other names, each with the name in `FORMATS` that it stands for."""

_BY_NAME = FORMATS | {alias: FORMATS[name] for alias, name in ALIASES.items()}

# torch.int4 and torch.uint4 exist too, but no tensor can be computed with.
_TORCH_DTYPES = {name: getattr(torch, name) for name in FORMATS.keys() - {"int4", "uint4"} if hasattr(torch, name)}


def format_named(format: Format | str | torch.dtype) -> Format:
    """The format that a name ("bfloat16", "torch.bfloat16", "bf16") or a torch dtype stands for; a Format is itself.

    Raises UnknownFormat, with the nearest names.
    """
    if isinstance(format, Format):
        return format
    name = str(format).lower().removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = get_close_matches(name, _BY_NAME)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(FORMATS)}"
    raise UnknownFormat(f"expected a number format, got {str(format)!r}: {hint}")


def binade(x: torch.Tensor, format: Format) -> torch.Tensor:
    """The power of two at or below |x| (float64), held within the format's exponents: what its spacing hangs on.

    Zero and subnormals get 2^min_exponent; whatever exceeds the largest value, infinities and NaN get 2^max_exponent.
    """
    exponent = x.view(torch.int64) & (0x7FF << 52)
    exponent.clamp_((format.min_exponent + 1023) << 52, (format.max_exponent + 1023) << 52)
    return exponent.view(torch.float64)


def decode(codes: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """The values (float64) of bit patterns (any integer dtype and shape) of a format.

    A code is the pattern read as an unsigned integer; read as two's complement it may be negative.
    Raises InvalidCode if a code needs more bits than the format has, WrongDtype if the codes are no integers.
    """
    target = format_named(format)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise WrongDtype(f"expected integer bit patterns, got {codes.dtype}: use encode() to make them from values")
    code = codes.to(torch.int64)
    if target.bits == 64:
        return code.view(torch.float64).clone()
    outside = (code < -(1 << (target.bits - 1))) | (code >= 1 << target.bits)
    if bool(outside.any()):
        raise InvalidCode(f"expected {target.bits}-bit codes of {target}, got {int(code[outside][0])}: unpack them")
    code = code & ((1 << target.bits) - 1)
    sign_bit = 1 << (target.bits - 1) if target.signed else 0
    if target.kind == "integer":
        return ((code ^ sign_bit) - sign_bit).to(torch.float64)
    magnitude = code & (target._magnitudes - 1)
    field, hidden = magnitude >> target.trailing_bits, 1 << target.trailing_bits
    normal = field >= target.min_exponent + target.bias
    exponent = field.clamp(min=target.min_exponent + target.bias) - target.bias - target.trailing_bits
    scale = ((exponent + 1023) << 52).view(torch.float64)  # a power of two, exactly; pow() need not be exact
    value = ((magnitude & (hidden - 1)) + normal * hidden) * scale
    value.masked_fill_(magnitude > target.largest_code, math.nan)
    if target.infinities:
        value.masked_fill_(magnitude == target.largest_code + 1, math.inf)
    value = torch.where((code & sign_bit) != 0, -value, value)
    return value.masked_fill_(code == sign_bit, math.nan) if target.nan == "negative_zero" else value


def encode(values: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """The bit patterns (int64; unsigned up to 32 bits) of values that the format holds: the inverse of `decode`.

    NaN becomes `Format.nan_code`; -0 becomes 0 where zero has no sign. Nothing is rounded.
    Raises NotRepresentable on any other value.
    """
    target = format_named(format)
    value = values.detach().to(torch.float64)
    if target.bits == 64:
        return value.view(torch.int64).clone()
    if not target.has_negative_zero:
        value = value + 0.0
    if target.kind == "integer":
        code = value.nan_to_num().to(torch.int64) & ((1 << target.bits) - 1)
    else:
        power = binade(value, target)
        field = (power.view(torch.int64) >> 52) - 1023 + target.bias
        hidden = 1 << target.trailing_bits
        significand = (value.abs() / power * hidden).nan_to_num(posinf=0.0).to(torch.int64)
        magnitude = ((field << target.trailing_bits) + significand - hidden) & (target._magnitudes - 1)
        if target.infinities:
            magnitude.masked_fill_(value.isinf(), target.largest_code + 1)
        code = magnitude + (value.signbit() & target.signed) * (1 << (target.bits - 1))
        if target.nan_code is not None:
            code.masked_fill_(value.isnan(), target.nan_code)
    back = decode(code, target)
    foreign = (back != value) & ~(back.isnan() & value.isnan())
    if bool(foreign.any()):
        example = float(value[foreign][0])
        raise NotRepresentable(f"expected values of {target}, got {example!r}: use round_to(values, '{target}') first")
    return code


def all_values(format: Format | str | torch.dtype) -> torch.Tensor:
    """Every value (float64) of a format of up to 16 bits, indexed by bit pattern. Raises TooManyValues for others."""
    target = format_named(format)
    if target.bits > 16:
        raise TooManyValues(f"expected a format of at most 16 bits, got {target}: decode() the codes you need instead")
    return decode(torch.arange(1 << target.bits), target)
