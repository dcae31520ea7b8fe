"""Faults of quantisers: scales, zero-points, and how quotients become codes."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.arithmetic.real import codes_of
from assay.golden.definitions.quantize import rejoined, row_groups, row_maximum, stored_part
from assay.precision.formats import format_named
from assay.precision.rounding import round_to
from assay.verify.inputs.cases import Case
from assay.verify.suspects.common import QUANTIZERS
from assay.verify.suspects.mechanisms import asked, changed, columns_beyond, is_wide, option, whole, zero_where
from assay.verify.suspects.suspect import Suspect

Tensor = torch.Tensor
_FP8, _INT8, _INT4 = (("quantize_fp8",), ("quantize_int8",), ("quantize_int4",))
_SYMMETRIC = (*_FP8, *_INT8)


def _largest(old: float, new: float) -> type:
    """The span divided by another largest code."""

    class Largest:
        def quantization_scale(self: Any, span: Any, largest: float) -> Any:
            return super().quantization_scale(span, new if largest == old else largest)  # type: ignore[misc]

    return Largest


class _WithoutMagnitude:
    """The largest number rather than the largest magnitude."""

    def abs(self: Any, x: Any) -> Any:
        return x


class _NotSaturated:
    """Codes beyond the largest wrap around: for float32 evaluations."""

    def quantize(self: Any, x: Tensor, scale: Tensor, format: str, zero: Any = None, stored: Any = None) -> Tensor:
        used = scale if stored is None else stored
        code = torch.round(x / torch.where(used == 0, 1.0, used)) + (0.0 if zero is None else zero)
        target = format_named(format)
        span = target.largest - target.lowest + 1
        return torch.remainder(code - target.lowest, span) + target.lowest


class _SmallerScale(_NotSaturated):
    """amax / 128 lets the largest quotient be 128, which wraps to -128."""

    def quantization_scale(self: Any, span: Any, largest: float) -> Any:
        return span / (largest + 1)


class _Truncated:
    def quantize(self: Any, x: Tensor, scale: Tensor, format: str, zero: Any = None, stored: Any = None) -> Tensor:
        quotient = x / torch.where(scale == 0, 1.0, scale)
        return codes_of(quotient.double(), format, zero, "toward_zero").to(x.dtype)


class _Away:
    def quantize(self: Any, x: Tensor, scale: Tensor, format: str, zero: Any = None, stored: Any = None) -> Tensor:
        quotient = x / torch.where(scale == 0, 1.0, scale)
        return codes_of(quotient.double(), format, zero, "nearest_away").to(x.dtype)


class _ZeroGroupNan:
    """A group of zeros is divided by its scale, zero."""

    def quantization_scale(self: Any, span: Tensor, largest: float) -> Tensor:
        return torch.where(span == 0, math.nan, span / largest)


class _ScaleInBfloat16:
    def quantization_scale(self: Any, span: Tensor, largest: float) -> Tensor:
        return round_to((span / largest).double(), "bfloat16").to(span.dtype)


class _ScaleInFloat16:
    def quantization_scale(self: Any, span: Tensor, largest: float) -> Tensor:
        return round_to((span / largest).double(), "float16").to(span.dtype)


class _PowerOfTwo:
    def quantization_scale(self: Any, span: Tensor, largest: float) -> Tensor:
        scale = span / largest
        return torch.where(scale == 0, scale, torch.exp2(torch.ceil(torch.log2(scale.double()))).to(span.dtype))


class _TailOfMaximum:
    """The maximum leaves out what is beyond the last whole block of 16."""

    def max(self: Any, x: Any) -> Any:
        return super().max(x[..., : whole(x.shape[-1], 16)])  # type: ignore[misc]


def _int4(
    *, with_zero: bool = True, shifted: float = 0.0, point: Any = None, made_with: Any = None, returned: Any = None
) -> Any:
    """`quantize_int4` with another range or zero-point.

    ``shifted``: so many steps are added before a zero-point is rounded. ``point`` alters it then for all that follows,
    ``made_with`` for the codes, ``returned`` for the caller.
    """

    def definition(
        xp: Any, x: Any, *, group: int, symmetric: bool, scale: Any = None, zero: Any = None
    ) -> tuple[Any, Any, Any]:
        codes, scales, zeros, done = [], [], [], 0
        for part in row_groups(xp, x, group):
            most = row_maximum if with_zero else lambda xp, part: xp.max(part)
            below = most(xp, -part)
            step = xp.quantization_scale(row_maximum(xp, xp.abs(part)), 7)
            if not symmetric:
                step = xp.quantization_scale(most(xp, part) + below, 15)
            stored = None if scale is None else stored_part(scale, done, step.shape)
            points = xp.exact(xp.native.full(step.shape, 8))
            if not symmetric:
                points = xp.quantize(below + step * shifted if shifted else below, step, "uint4", stored=stored)
                points = point(xp, points) if point else points
            own = points
            if zero is not None and not symmetric and returned is None:
                own = xp.exact(stored_part(zero, done, step.shape))
            own = made_with(xp, own) if made_with else own
            codes.append(xp.quantize(part, step, "uint4", zero=own, stored=stored))
            scales.append(step)
            zeros.append(returned(xp, points) if returned else points)
            done += step.shape[1]
        shape = (x.shape[0], -(-x.shape[1] // group))
        return rejoined(xp, codes, x, x.shape), rejoined(xp, scales, x, shape), rejoined(xp, zeros, x, shape)

    return definition


def _more(xp: Any, points: Any) -> Any:
    """One more, of 15 at most."""
    return -xp.maximum(-points - 1.0, xp.exact(torch.full(tuple(points.shape), -15.0)))


def _less(xp: Any, points: Any) -> Any:
    """One less, of 0 at least."""
    return xp.maximum(points - 1.0, xp.exact(torch.zeros(tuple(points.shape))))


def _asymmetric(case: Case) -> bool:
    return not case.options["symmetric"]


def _first_scale(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    """The scale of the first group returned for all."""
    codes, scale, *rest = found
    if not len(scale.shape) or 0 in scale.shape:
        return found
    index = torch.zeros(scale.shape[0], dtype=torch.int64)
    return (codes, scale[index], *rest)


def _reciprocal_scale(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    codes, scale, *rest = found
    unit = xp.exact(torch.ones(scale.shape))
    return (codes, unit / scale, *rest)


def _codes_zero(mask: Any) -> Any:
    def results(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
        codes, *rest = found
        return (zero_where(mask)(xp, codes), *rest)

    return results


SUSPECTS = (
    Suspect("scale_of_240", "scale", "the scale is amax / 240, the largest code of e4m3fnuz", _FP8,
            origin="vllm#50467, #45681", arithmetic=_largest(448, 240)),
    Suspect("scale_of_224", "scale", "the scale is amax / 224", _FP8, origin="vllm#50467, #45681",
            arithmetic=_largest(448, 224)),
    Suspect("scale_of_128", "scale", "the scale is amax / 128: 127.6 becomes -128", _INT8, origin="sglang-jax#1598",
            arithmetic=_SmallerScale, emulated=True),
    Suspect("scale_of_128_saturated", "scale", "the scale is amax / 128, and codes saturate", _INT8,
            arithmetic=_largest(127, 128)),
    Suspect("scale_of_16", "scale", "the span is divided by 16, not by 15", _INT4, arithmetic=_largest(15, 16),
            applies=_asymmetric),
    Suspect("scale_of_8", "scale", "the largest magnitude is divided by 8, not by 7", _INT4, arithmetic=_largest(7, 8),
            applies=asked("symmetric", True)),
    Suspect("largest_without_magnitude", "formula", "the scale is that of the largest number, not of the largest "
            "magnitude", _SYMMETRIC, origin="unsloth#10841", arithmetic=_WithoutMagnitude),
    Suspect("truncating_codes", "store", "quotients are truncated to codes, not rounded", QUANTIZERS,
            origin="aiter#4637", arithmetic=_Truncated, contract={"rounding": "toward_zero"}),
    Suspect("codes_round_ties_away", "store", "quotients halfway between two codes are rounded away from zero",
            QUANTIZERS, needs="quotients halfway between two codes", arithmetic=_Away, emulated=True),
    Suspect("zero_group_nan", "special values", "a group of zeros gives a scale of NaN: zero divided by zero",
            QUANTIZERS, origin="kernels-community#680", needs="a row or group of zeros", arithmetic=_ZeroGroupNan,
            emulated=True),
    Suspect("scale_in_bfloat16", "precision", "the scale is rounded to bfloat16", QUANTIZERS,
            arithmetic=_ScaleInBfloat16, emulated=True),
    Suspect("scale_in_float16", "precision", "the scale is rounded to float16", QUANTIZERS,
            arithmetic=_ScaleInFloat16, emulated=True),
    Suspect("scale_power_of_two", "scale", "the scale is rounded up to a power of two", QUANTIZERS,
            arithmetic=_PowerOfTwo, emulated=True),
    Suspect("tail_of_maximum_dropped", "tail", "the scale leaves out what is beyond the last whole block of 16",
            QUANTIZERS, needs="more than 16 columns, no multiple of 16", arithmetic=_TailOfMaximum),
    Suspect("granularity_ignored", "scale", "one scale for each row, whatever is asked for", _FP8,
            applies=asked("granularity", "group128"), needs="more than 128 columns", options=None,
            definition=lambda xp, x, *, granularity, scale=None: _by_row(xp, x, scale)),
    Suspect("scale_of_first_row", "scale", "the scale of the first row is returned for all", QUANTIZERS,
            needs="more than one row", results=_first_scale,
            applies=lambda case: case.options.get("granularity") != "tensor"),
    Suspect("scale_inverted", "scale", "the reciprocal of the scale is returned", QUANTIZERS,
            results=_reciprocal_scale),
    Suspect("codes_beyond_tile_zero", "tail", "codes beyond the last whole tile of 16 columns are zero", QUANTIZERS,
            needs="more than 16 columns, no multiple of 16", results=_codes_zero(columns_beyond(16))),
    Suspect("nan_dropped_by_amax", "special values", "NaN in the input is dropped, as fmax does", _SYMMETRIC,
            origin="tilelang#3024", needs="a NaN in the input",
            inputs=changed("x", lambda x: torch.where(x.isnan(), 0.0, x))),
    Suspect("quantised_from_bfloat16", "precision", "the input is rounded to bfloat16 first", QUANTIZERS,
            applies=is_wide,
            inputs=changed("x", lambda x: round_to(x.double(), "bfloat16"))),
    Suspect("symmetric_ignored", "formula", "symmetric=True is ignored", _INT4, applies=asked("symmetric", True),
            options=option(symmetric=False)),
    Suspect("range_without_zero", "formula", "the range does not include zero: groups of one sign are clipped", _INT4,
            origin="unsloth#10841", applies=_asymmetric, definition=_int4(with_zero=False)),
    Suspect("zero_point_left_out", "formula", "the zero-point is left out", _INT4, applies=_asymmetric,
            definition=_int4(point=lambda xp, points: points * 0.0)),
    Suspect("zero_point_subtracted", "formula", "the zero-point is subtracted from the codes, not added", _INT4,
            definition=_int4(made_with=lambda xp, points: -points)),
    Suspect("zero_point_rounded_down", "formula", "quotients are rounded down to zero-points, not to nearest", _INT4,
            applies=_asymmetric, definition=_int4(shifted=-0.5)),
    Suspect("zero_point_rounded_up", "formula", "quotients are rounded up to zero-points, not to nearest", _INT4,
            applies=_asymmetric, definition=_int4(shifted=0.5)),
    Suspect("zero_point_too_large", "formula", "zero-points are one too large, and codes with them", _INT4,
            applies=_asymmetric, definition=_int4(point=_more)),
    Suspect("zero_point_too_small", "formula", "zero-points are one too small, and codes with them", _INT4,
            applies=_asymmetric, definition=_int4(point=_less)),
    Suspect("zero_point_stored_less_one", "packing", "zero-points are returned less one, as GPTQ stores them", _INT4,
            applies=_asymmetric, definition=_int4(returned=_less)),
    Suspect("zero_point_larger_in_codes", "packing", "codes are made with zero-points one larger than those returned",
            _INT4, applies=_asymmetric, definition=_int4(made_with=_more)),
    Suspect("zero_point_smaller_in_codes", "packing", "codes are made with zero-points one smaller than those returned",
            _INT4, applies=_asymmetric, definition=_int4(made_with=_less)),
    Suspect("int4_codes_wrap", "store", "codes beyond 15 wrap around", _INT4, arithmetic=_NotSaturated,
            emulated=True, needs="a group whose codes go beyond the largest"),
)  # fmt: skip


def _by_row(xp: Any, x: Any, scale: Any) -> tuple[Any, Any]:
    """Codes by one scale a row, returned for each of its groups."""
    rows, columns = x.shape
    part = x.reshape(rows, 1, columns)
    step = xp.quantization_scale(row_maximum(xp, xp.abs(part)), 448)
    given = None if scale is None or not scale.shape[-1] else scale[:, :1, None]
    codes = xp.quantize(part, step, "float8_e4m3fn", stored=given).reshape(rows, columns)
    index = torch.zeros(-(-columns // 128), dtype=torch.int64)
    return codes, step.reshape(rows, 1)[:, index]
