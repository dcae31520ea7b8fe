"""Floats in rational arithmetic, straight from IEEE 754's definitions: what the interpreter is compared with."""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Float:
    """A binary format: its bits, digits of the significand (the hidden one counted) and exponent's bias."""

    bits: int
    digits: int
    bias: int
    finite: bool = False  # no infinities: e4m3 has one NaN, the narrower ones have none
    nans: bool = True

    @property
    def trailing(self) -> int:
        return self.digits - 1

    @property
    def lowest_exponent(self) -> int:
        return 1 - self.bias

    @property
    def largest(self) -> Fraction:
        fields = 2 ** (self.bits - 1 - self.trailing) - (1 if self.finite else 2)
        significand = 2**self.digits - (2 if self.finite and self.nans else 1)
        return Fraction(significand) * Fraction(2) ** (fields - self.bias - self.trailing)

    def value(self, pattern: int) -> Fraction | float:
        """The number of a pattern; infinities and NaN as floats."""
        sign = -1 if pattern >> (self.bits - 1) else 1
        field = pattern >> self.trailing & (2 ** (self.bits - self.digits) - 1)
        rest = pattern & (2**self.trailing - 1)
        top = field == 2 ** (self.bits - self.digits) - 1
        if top and not self.finite:
            return math.nan if rest else sign * math.inf
        if top and self.nans and rest == 2**self.trailing - 1:
            return math.nan
        if field == 0:
            return sign * Fraction(rest) * Fraction(2) ** (self.lowest_exponent - self.trailing) if rest else sign * 0.0
        return sign * Fraction(2**self.trailing + rest) * Fraction(2) ** (field - self.bias - self.trailing)

    def rounded(self, exact: Fraction, mode: str, *, saturate: bool = False) -> Fraction | float:
        """A nonzero number, rounded as PTX's ``mode`` says."""
        magnitude, sign = abs(exact), 1 if exact > 0 else -1
        exponent = max(_exponent(magnitude), self.lowest_exponent)
        unit = Fraction(2) ** (exponent - self.trailing)
        whole, rest = divmod(magnitude, unit)
        half = Fraction(1, 2) * unit
        up = {
            "rn": rest > half or (rest == half and whole % 2 == 1),
            "rna": rest >= half,
            "rz": False,
            "rp": rest > 0 and sign > 0,
            "rm": rest > 0 and sign < 0,
        }[mode]
        found = (whole + up) * unit
        if found > self.largest:
            toward_zero = mode == "rz" or (mode == "rp" and sign < 0) or (mode == "rm" and sign > 0)
            found = self.largest if saturate or toward_zero else math.inf
        return sign * found if found else sign * 0.0


def _exponent(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


HALF, BFLOAT, SINGLE, DOUBLE = Float(16, 11, 15), Float(16, 8, 127), Float(32, 24, 127), Float(64, 53, 1023)
E4M3, E5M2, E2M1 = Float(8, 4, 7, finite=True), Float(8, 3, 15), Float(4, 2, 1, finite=True, nans=False)
E2M3, E3M2 = Float(6, 4, 1, finite=True, nans=False), Float(6, 3, 3, finite=True, nans=False)
TF32 = Float(19, 11, 127)
FLOATS = {
    "f16": HALF, "bf16": BFLOAT, "f32": SINGLE, "f64": DOUBLE, "e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1,
    "e2m3": E2M3, "e3m2": E3M2, "tf32": TF32,
}  # fmt: skip
