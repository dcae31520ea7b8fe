"""How a tensor may be stored: element format, granularity and format of scales; scales, codes and the values read back.

The arithmetic is that of compressed-tensors and torchao, in float32: codes are round(x / scale) (+ zero), clamped, and
the value is (code - zero) * scale. So the simulation matches a checkpoint bit for bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from assay.formats.format import Format, format_named
from assay.formats.rounding import round_float32
from assay.precision.errors import WrongShape
from assay.precision.schemes.ggml import BlockType, block_types

Granularity = Literal["element", "tensor", "row", "group", "block"]
Rule = Literal["absmax", "mse", "output", "awq"]
ScaleFormat = Literal["float32", "bfloat16", "float8_e8m0fnu", "float8_e4m3fn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """Elements of one format with scales (and zero-points) between them: x ~ (code - zero) * scale.

    A row is a vector along the last dimension: an output channel of a weight [N, K], a token of an activation.
    """

    format: str
    """Element format, of `assay.formats`; or a block type of ggml, of configs/ggml.toml, which its code stores."""
    per: Granularity = "element"
    """The granularity of scales: "element" (none: a plain cast), the tensor, a row, a group of `size` along the row, or
    a block of `size` rows by `size` columns."""
    size: int = 0
    symmetric: bool = True
    """Without zero-point. An asymmetric range always holds zero."""
    dynamic: bool = True
    """An activation's scales are computed from the values at run time; otherwise once, from the calibration data."""
    scale_format: ScaleFormat = "float32"
    """bfloat16: as checkpoints of 16-bit models hold scales, and transformers rounds those to that are float32; e8m0:
    powers of two, as in OCP MX; e4m3: with one float32 scale of the tensor beside them, as in NVFP4."""
    rule: Rule = "absmax"
    """How a weight's scale is searched: from the largest magnitude; by least squared error; by least squared error of
    the output, columns weighted by the mean square of their input ("output"); with the columns scaled by a power of
    their input's mean magnitude that is searched too ("awq", arXiv:2306.00978)."""

    @property
    def element(self) -> Format:
        """The element format."""
        return self.blocks.element if self.blocks else format_named(self.format)

    @property
    def blocks(self) -> BlockType | None:
        """The block type of ggml; None: scales as the other fields say."""
        return block_types().get(self.format)

    def bits(self, shape: tuple[int, ...]) -> float:
        """Return the bits of a tensor of this shape, scales and zero-points included."""
        elements, columns = float(math.prod(shape)), float(shape[-1]) if shape else 1.0
        rows = elements / columns if columns else 0.0
        if self.blocks:
            return rows * -(-columns // self.blocks.block) * self.blocks.bytes * 8
        scales = {
            "element": 0.0,
            "tensor": 1.0,
            "row": rows,
            "group": rows * -(-columns // max(self.size, 1)),
            "block": -(-rows // max(self.size, 1)) * -(-columns // max(self.size, 1)),
        }[self.per]
        each = format_named(self.scale_format).bits + (0 if self.symmetric else self.element.bits)
        return elements * self.element.bits + scales * each + (32 if self.scale_format == "float8_e4m3fn" else 0)


_E4M3 = format_named("float8_e4m3fn")
_TINY = torch.finfo(torch.float32).tiny
_STEP = 16  # Columns of the smallest groups of any scheme

Reduce = Callable[..., Tensor]
"""torch.amin or torch.amax."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales and zero-points of a tensor. Shapes broadcast against the tensor as laid out by `grouped`."""

    scale: Tensor
    """float32, as in the product: for NVFP4 the e4m3 scale divided by ``divisor`` already."""
    zero: Tensor | None = None
    divisor: Tensor | None = None
    """NVFP4's scale of the tensor, in the convention of compressed-tensors: 448 * 6 / largest magnitude."""


def grouped(x: Tensor, quantizer: Quantizer, within: int = 1) -> tuple[Tensor, tuple[int, ...]]:
    """Return x laid out so that one axis or two hold the elements that share a scale, and these axes; the order of
    values stays.

    Rows: [..., K] itself. Groups: [..., K/size, size]. Blocks: [..., N/size, size, K/size, size], padded with zeros.
    within: the number of columns of the tensor that each of x represents. Raises WrongShape if a group size doesn't
    divide K.
    """
    rows, columns = quantizer.size, quantizer.size // within
    if quantizer.per == "group":
        if x.shape[-1] % columns:
            raise WrongShape(f"expected rows of a multiple of {rows} elements, got {x.shape[-1]}: take another scheme")
        return torch.unflatten(x, -1, (-1, columns)), (-1,)
    if quantizer.per == "block":
        pad = (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
        padded = torch.nn.functional.pad(x, pad) if any(pad) else x
        return torch.unflatten(torch.unflatten(padded, -1, (-1, columns)), -3, (-1, rows)), (-3, -1)
    # Experts stand along the first dimension of a weight of three: each has scales of its own.
    return x, ((-1,) if quantizer.per == "row" else tuple(range(x.dim())))


class Extremes:
    """The extreme values of a tensor's rows in steps of a few columns, from which those of any grouping follow: for
    several quantizers of one weight."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._fine: dict[tuple[Reduce, bool], Tensor] = {}

    def of(self, quantizer: Quantizer, reduce: Reduce, *, magnitudes: bool = False) -> Tensor:
        """As `_extreme`."""
        if self.x.shape[-1] % _STEP or quantizer.size % _STEP:
            return _extreme(self.x, quantizer, reduce, magnitudes=magnitudes)
        key = reduce, magnitudes
        if key not in self._fine:
            steps = torch.unflatten(self.x.abs() if magnitudes else self.x, -1, (-1, _STEP))
            self._fine[key] = reduce(steps, -1)
        laid, axes = grouped(self._fine[key], quantizer, _STEP)
        return reduce(laid, axes, keepdim=True)


def _extreme(x: Tensor | Extremes, quantizer: Quantizer, reduce: Reduce, *, magnitudes: bool = False) -> Tensor:
    if isinstance(x, Extremes):
        return x.of(quantizer, reduce, magnitudes=magnitudes)
    laid, axes = grouped(x, quantizer)
    return reduce(laid.abs() if magnitudes else laid, axes, keepdim=True)


def scales_of(
    x: Tensor | Extremes, quantizer: Quantizer, shrink: Tensor | float = 1.0, divisor: Tensor | None = None
) -> Scales:
    """Return scales by the largest magnitude (or range) of the elements that share one, times ``shrink`` (float32,
    broadcasts).

    divisor: NVFP4's scale of the tensor where it is known beforehand, as for an activation.

    Symmetric: the largest magnitude is half of the elements' range: of integers (int8: 127.5 steps, int4: 7.5), as in
    compressed-tensors and torchao; of floats and codebooks their largest value. e8m0: the power of two that brings the
    largest magnitude into the element's last binade (OCP MX 1.0, 6.3), one more where it would round past the largest
    value. NVFP4: e4m3 scales of groups, times a scale of the tensor that brings the largest of them to 448.
    """
    low, high = quantizer.element.lowest, quantizer.element.largest
    if not quantizer.symmetric:
        least = _extreme(x, quantizer, torch.amin).clamp(max=0.0) * shrink
        most = _extreme(x, quantizer, torch.amax).clamp(min=0.0) * shrink
        scale = _held((most - least) / (high - low), quantizer)
        return Scales(scale, (low - least / scale).round().clamp(low, high))
    largest = _extreme(x, quantizer, torch.amax, magnitudes=True) * shrink
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


def divisor_of(magnitudes: Tensor, quantizer: Quantizer) -> Tensor:
    """NVFP4's scale of the tensor, 448 * 6 / largest magnitude: it brings the largest group's scale to e4m3's end."""
    whole = _E4M3.largest * quantizer.element.largest / magnitudes.amax().clamp(min=_TINY)
    return torch.where(whole.isfinite(), whole, 1.0)


def _held(scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the scale as stored; for zeros, where any scale is right, the epsilon of its format."""
    format = format_named(quantizer.scale_format)
    return torch.where(scale == 0, format.epsilon, round_float32(scale, format).clamp(min=_TINY))


def _power_of_two(largest: Tensor, quantizer: Quantizer) -> Tensor:
    significand, exponent = torch.frexp(largest)  # largest = significand * 2^exponent, significand in [1/2, 1)
    # What a value of this significand would round past the largest element from, in the element's last binade.
    threshold = {"float6_e2m3fn": 1.9375}.get(quantizer.format, 1.75)
    exponent = exponent - 1 + (significand >= threshold / 2) - quantizer.element.max_exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))


def codes_of(x: Tensor, quantizer: Quantizer, scales: Scales) -> Tensor:
    """Return the codes of x as element values (float32, laid out by `grouped`)."""
    laid, _ = grouped(x, quantizer)
    scaled = laid / scales.scale
    if scales.zero is not None:
        scaled += scales.zero
    scaled.clamp_(quantizer.element.lowest, quantizer.element.largest)
    return round_float32(scaled, quantizer.element, inplace=True)


def store(x: Tensor, quantizer: Quantizer, scales: Scales | None = None) -> Tensor:
    """Return x (float32) stored and read back, with its own scales where none are given.

    NaN stays NaN; an infinity spoils the elements that share its scale, as in a kernel.
    """
    if quantizer.per == "element":
        return round_float32(x, quantizer.element)
    chosen = scales if scales is not None else scales_of(x, quantizer)
    values = codes_of(x, quantizer, chosen)  # in place: memory takes longer than arithmetic
    if chosen.zero is not None:
        values -= chosen.zero
    values.mul_(chosen.scale)
    if quantizer.per == "group":
        return values.flatten(-2)
    if quantizer.per == "block":
        return values.flatten(-2).flatten(-3, -2)[..., : x.shape[-2], : x.shape[-1]]
    return values
