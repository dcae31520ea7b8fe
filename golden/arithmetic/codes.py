"""Exact rounding of rational numbers to codes: what the arithmetics of arbitrary precision quantise by."""

from __future__ import annotations

from fractions import Fraction

from assay.formats.format import Format, format_named

Ends = tuple[Fraction, Fraction]

_QUOTIENTS = format_named("int8")  # holds every quotient to which a zero-point of four bits is added


def nearest_code(value: Fraction, format: Format) -> Fraction:
    """The number of ``format`` nearest to ``value``, saturated; on a tie the one whose significand is even."""
    step = Fraction(format.epsilon)
    if format.kind == "float":
        exponent = max(_exponent(abs(value)), format.min_exponent) if value else format.min_exponent
        step = Fraction(2) ** (exponent - format.precision + 1)
    rounded = round(value / step) * step  # Python's round of a fraction: exact, ties to even
    return min(max(rounded, Fraction(format.lowest)), Fraction(format.largest))


def power_of_two(value: Fraction, above: bool) -> float:
    """The power of two at or above a positive number, or at or below it, of e8m0's range; zero of others."""
    if value <= 0:
        return 0.0
    exponent = _exponent(value)
    return max(2.0**-127, float(Fraction(2) ** (exponent + (above and Fraction(2) ** exponent < value))))


def _exponent(value: Fraction) -> int:
    """The exponent of the power of two at or below a positive number."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def hull_of_codes(quotient: Ends, zero: tuple[int | Fraction, int | Fraction] | None, format: Format) -> Ends:
    """The least and the largest code of a quotient between two ends, a zero-point between two ends added."""
    if zero is None:
        return nearest_code(quotient[0], format), nearest_code(quotient[1], format)
    least, most = (nearest_code(end, _QUOTIENTS) + point for end, point in zip(quotient, zero, strict=True))
    return nearest_code(least, format), nearest_code(most, format)
