"""A tensor's stored form: scales chosen for it, its codes, and the values that they stand for.

The arithmetic is that of compressed-tensors and torchao, in float32: codes are round(x / scale) (+ zero), clamped, and
the value is (code - zero) * scale. So what is simulated here is bit for bit what a checkpoint holds.
"""

from dataclasses import dataclass

import torch

from assay.formats.format import format_named
from assay.precision.errors import WrongShape
from assay.precision.schemes.quantizer import Quantizer
from assay.precision.schemes.rounding import round_element

_E4M3 = format_named("float8_e4m3fn")
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Scales:
    """What is stored beside the codes. Shapes broadcast against the tensor as `grouped` lays it out."""

    scale: torch.Tensor
    """float32, as it is multiplied with: for NVFP4 the e4m3 scale divided by ``divisor`` already."""
    zero: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    """NVFP4's scale of the tensor, in the convention of compressed-tensors: 448 * 6 / largest magnitude."""


def grouped(x: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, tuple[int, ...]]:
    """x laid out so that one axis or two hold what shares a scale, and these axes: its values keep their order.

    Rows: [..., K] itself. Groups: [..., K/size, size]. Blocks: [..., N/size, size, K/size, size], padded with zeros.
    Raises WrongShape if a group size doesn't divide K.
    """
    size = quantizer.size
    if quantizer.per == "group":
        if x.shape[-1] % size:
            raise WrongShape(f"expected rows of a multiple of {size} elements, got {x.shape[-1]}: take another scheme")
        return torch.unflatten(x, -1, (-1, size)), (-1,)
    if quantizer.per == "block":
        pad = (0, -x.shape[-1] % size, 0, -x.shape[-2] % size)
        padded = torch.nn.functional.pad(x, pad) if any(pad) else x
        return torch.unflatten(torch.unflatten(padded, -1, (-1, size)), -3, (-1, size)), (-3, -1)
    # Experts stand along the first dimension of a weight of three: each has scales of its own.
    return x, ((-1,) if quantizer.per == "row" else tuple(range(x.dim())))


def _restored(laid: torch.Tensor, shape: torch.Size, quantizer: Quantizer) -> torch.Tensor:
    if quantizer.per == "group":
        return laid.flatten(-2)
    if quantizer.per == "block":
        whole = laid.flatten(-2).flatten(-3, -2)
        return whole[..., : shape[-2], : shape[-1]]
    return laid


def scales_of(
    x: torch.Tensor, quantizer: Quantizer, shrink: torch.Tensor | float = 1.0, divisor: torch.Tensor | None = None
) -> Scales:
    """Scales by the largest magnitude (or range) of what shares one, times ``shrink`` (float32, broadcasts).

    divisor: NVFP4's scale of the tensor where it is known beforehand, as that of an activation is.

    Symmetric: the largest magnitude is half of the elements' range: of integers (int8: 127.5 steps, int4: 7.5), as
    compressed-tensors and torchao have it; of floats and codebooks their largest value. e8m0: the power of two that
    brings the largest magnitude into the element's last binade (OCP MX 1.0, 6.3), one more where it would round past
    the largest value. NVFP4: e4m3 scales of groups, times a scale of the tensor that brings the largest of them to 448.
    """
    laid, axes = grouped(x, quantizer)
    low, high = quantizer.element.lowest, quantizer.element.largest
    if not quantizer.symmetric:
        least = laid.amin(axes, keepdim=True).clamp(max=0.0) * shrink
        most = laid.amax(axes, keepdim=True).clamp(min=0.0) * shrink
        scale = _held((most - least) / (high - low), quantizer)
        return Scales(scale, (low - least / scale).round().clamp(low, high))
    largest = laid.abs().amax(axes, keepdim=True) * shrink
    if quantizer.scale_format == "float8_e8m0fnu":
        return Scales(_power_of_two(largest, quantizer))
    scale = largest / ((high - low) / 2)
    if quantizer.scale_format == "float8_e4m3fn":
        if divisor is None:
            divisor = divisor_of(largest, quantizer)
        coarse = (scale * divisor).clamp(max=_E4M3.largest).to(torch.float8_e4m3fn).to(torch.float32)
        coarse = torch.where(coarse == 0, 0.125, coarse)  # compressed-tensors' eps; any will do, all codes are zero
        return Scales(coarse / divisor, divisor=divisor)
    return Scales(_held(scale, quantizer))


def divisor_of(magnitudes: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """NVFP4's scale of the tensor, 448 * 6 / largest magnitude: it brings the largest group's scale to e4m3's end."""
    whole = _E4M3.largest * quantizer.element.largest / magnitudes.amax().clamp(min=_TINY)
    return torch.where(whole.isfinite(), whole, 1.0)


def _held(scale: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """The scale as it is stored; where all is zero any will do, here the epsilon of its format."""
    format = format_named(quantizer.scale_format)
    return torch.where(scale == 0, format.epsilon, round_element(scale, format).clamp(min=_TINY))


def _power_of_two(largest: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    significand, exponent = torch.frexp(largest)  # largest = significand * 2^exponent, significand in [1/2, 1)
    # What a value of this significand would round past the largest element from, in the element's last binade.
    threshold = {"float6_e2m3fn": 1.9375}.get(quantizer.format, 1.75)
    exponent = exponent - 1 + (significand >= threshold / 2) - quantizer.element.max_exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))


def codes_of(x: torch.Tensor, quantizer: Quantizer, scales: Scales) -> torch.Tensor:
    """The element values (float32, laid out by `grouped`) that x is stored as."""
    laid, _ = grouped(x, quantizer)
    scaled = laid / scales.scale
    if scales.zero is not None:
        scaled += scales.zero
    return round_element(scaled.clamp_(quantizer.element.lowest, quantizer.element.largest), quantizer.element)


def values_of(codes: torch.Tensor, quantizer: Quantizer, scales: Scales, shape: torch.Size) -> torch.Tensor:
    """The values (float32, of ``shape``) that codes stand for."""
    laid = (codes if scales.zero is None else codes - scales.zero) * scales.scale
    return _restored(laid, shape, quantizer)


def store(x: torch.Tensor, quantizer: Quantizer, scales: Scales | None = None) -> torch.Tensor:
    """x (float32) stored and read back; with its own scales where none are given.

    NaN stays NaN; an infinity spoils what it shares a scale with, as it does in a kernel.
    """
    if quantizer.per == "element":
        return round_element(x, quantizer.element)
    chosen = scales if scales is not None else scales_of(x, quantizer)
    return values_of(codes_of(x, quantizer, chosen), quantizer, chosen, x.shape)
