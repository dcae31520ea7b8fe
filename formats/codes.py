"""Conversion between bit patterns of a format and its values.

Values are float64 tensors, which hold every number of every format here; codes are int64 tensors of bit patterns.
"""

import math

import torch

from assay.formats.errors import InvalidCode, NotRepresentable, TooManyValues, WrongDtype
from assay.formats.format import Format, format_named

__all__ = ["all_values", "binade", "decode", "encode"]


def binade(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the power of two at or below |x| (float64), clamped to the format's exponents; it determines the spacing.

    Zero and subnormals get 2^min_exponent; whatever exceeds the largest value, infinities and NaN get 2^max_exponent.
    """
    exponent = x.view(torch.int64) & (0x7FF << 52)
    exponent.clamp_((format.min_exponent + 1023) << 52, (format.max_exponent + 1023) << 52)
    return exponent.view(torch.float64)


def decode(codes: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """Return the values (float64) of bit patterns (any integer dtype and shape) of a format.

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
    if target.values:
        return torch.tensor(target.values, dtype=torch.float64, device=code.device)[code]
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
    """Return the bit patterns (int64; unsigned up to 32 bits) of values of the format: the inverse of `decode`.

    NaN becomes `Format.nan_code`; -0 becomes 0 where zero has no sign. Nothing is rounded.
    Raises NotRepresentable on any other value.
    """
    target = format_named(format)
    value = values.detach().to(torch.float64)
    if target.bits == 64:
        return value.view(torch.int64).clone()
    if not target.has_negative_zero:
        value = value + 0.0
    if target.values:
        book = torch.tensor(target.values, dtype=torch.float64, device=value.device)
        # Compare bits, since -0 and 0 may have different codes; a value not in the format gets code 0 and is refused.
        code = (value.contiguous().view(torch.int64)[..., None] == book.view(torch.int64)).int().argmax(-1)
    elif target.kind == "integer":
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
    """Return every value (float64) of a format of up to 16 bits, by bit pattern. Raises TooManyValues for others."""
    target = format_named(format)
    if target.bits > 16:
        raise TooManyValues(f"expected a format of at most 16 bits, got {target}: decode() the codes you need instead")
    return decode(torch.arange(1 << target.bits), target)
