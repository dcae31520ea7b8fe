"""Faults of quantisers: scales, zero-points, and how quotients become codes."""

import math
from typing import Any

import torch

from assay.formats.format import format_named
from assay.formats.rounding import Mode, round_to
from assay.golden.arithmetic.real import codes_of
from assay.golden.definitions.quantization import quantize_fp8, quantize_int4
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.mutators import (
    changed,
    columns_beyond,
    has,
    is_wide,
    narrowed,
    one,
    operations,
    option,
    whole,
    zero_where,
)
from assay.verify.explanation.fault_models.ops import quantizes

Tensor = torch.Tensor
_FP8, _INT8, _INT4 = (("quantize_fp8",), ("quantize_int8",), ("quantize_int4",))
_SYMMETRIC = (*_FP8, *_INT8)


def _largest(old: float, new: float) -> type:
    """Divide the span by another largest code."""
    return operations(
        quantization_scale=lambda xp, right, span, largest: right(span, new if largest == old else largest)
    )


def _scale(formula: Any) -> type:
    """Compute the scale by ``formula(span, largest code)``."""
    return operations(quantization_scale=lambda xp, right, span, largest: formula(span, largest))


def _codes_rounded(mode: Mode) -> type:
    """Round quotients to codes in another mode: for float32 evaluations."""

    def quantize(
        xp: Any, right: Any, x: Tensor, scale: Tensor, format: str, zero: Any = None, stored: Any = None
    ) -> Tensor:
        quotient = x / torch.where(scale == 0, 1.0, scale)
        return codes_of(quotient.double(), format, zero, mode).to(x.dtype)

    return operations(quantize=quantize)


def _wrapped(xp: Any, right: Any, x: Tensor, scale: Tensor, format: str, zero: Any = None, stored: Any = None) -> Any:
    """Wrap codes beyond the largest around: for float32 evaluations."""
    used = scale if stored is None else stored
    code = torch.round(x / torch.where(used == 0, 1.0, used)) + (0.0 if zero is None else zero)
    target = format_named(format)
    span = target.largest - target.lowest + 1
    return torch.remainder(code - target.lowest, span) + target.lowest


def _power_of_two(span: Tensor, largest: float) -> Tensor:
    scale = span / largest
    return torch.where(scale == 0, scale, torch.exp2(torch.ceil(torch.log2(scale.double()))).to(span.dtype))


def _zero_points(*, shifted: float = 0.0, altered: Any = None, used: Any = None) -> type:
    """Return `quantize_int4` with other zero-points: ``altered`` changes them everywhere, ``used`` only for the codes.

    ``shifted`` is added to a zero-point, in steps, before it is rounded.
    """

    def quantize(xp: Any, right: Any, x: Any, scale: Any, format: str, zero: Any = None, stored: Any = None) -> Any:
        if zero is not None:  # the zero-points of a kernel are integers
            numbers = xp.exact(zero) if isinstance(zero, Tensor) else zero
            return right(x, scale, format, zero=used(xp, numbers) if used else numbers, stored=stored)
        points = right(x + scale * shifted if shifted else x, scale, format, stored=stored)
        return altered(xp, points) if altered else points

    return operations(quantize=quantize)


def _stored_less_one(xp: Any, x: Any, *, zero: Any = None, **options: Any) -> tuple[Any, ...]:
    codes, scale, own = quantize_int4(xp, x, **options)
    return codes, scale, _less(xp, own)


def _more(xp: Any, points: Any) -> Any:
    """Return one more, at most 15."""
    return -xp.maximum(-points - 1.0, xp.exact(torch.full(tuple(points.shape), -15.0)))


def _less(xp: Any, points: Any) -> Any:
    """Return one less, at least 0."""
    return xp.maximum(points - 1.0, xp.exact(torch.zeros(tuple(points.shape))))


def _of_rows(xp: Any, x: Any, *, scale: Any = None, granularity: str, **options: Any) -> tuple[Any, Any]:
    own = None if scale is None else scale[:, :1]
    codes, result = quantize_fp8(xp, x, scale=own, granularity="row", **options)
    return codes, result[:, torch.zeros(-(-x.shape[1] // 128), dtype=torch.int64)]


_asymmetric = has("symmetric", False)


def _of_first_row(xp: Any, scale: Any) -> Any:
    return scale[torch.zeros(scale.shape[0], dtype=torch.int64)] if len(scale.shape) and 0 not in scale.shape else scale


FAULT_MODELS = (
    FaultModel("scale_of_240", "scale", "the scale is amax / 240, the largest code of e4m3fnuz", _FP8,
        origin="vllm#50467, #45681", arithmetic=_largest(448, 240)),
    FaultModel("scale_of_224", "scale", "the scale is amax / 224", _FP8, origin="vllm#50467, #45681",
        arithmetic=_largest(448, 224)),
    FaultModel("scale_of_128", "scale", "the scale is amax / 128: 127.6 becomes -128", _INT8, origin="sglang-jax#1598",
        emulated=True, arithmetic=operations(quantize=_wrapped,
         quantization_scale=lambda xp, right, span, largest: span / (largest + 1))),
    FaultModel("scale_of_128_saturated", "scale", "the scale is amax / 128, and codes saturate", _INT8,
        arithmetic=_largest(127, 128)),
    FaultModel("scale_of_16", "scale", "the span is divided by 16, not by 15", _INT4, arithmetic=_largest(15, 16),
        applies=_asymmetric),
    FaultModel("scale_of_8", "scale", "the largest magnitude is divided by 8, not by 7", _INT4,
        arithmetic=_largest(7, 8), applies=has("symmetric", True)),
    FaultModel("largest_without_magnitude", "formula", "the scale is that of the largest number, not of the largest "
        "magnitude", _SYMMETRIC, origin="unsloth#10841", arithmetic=operations(abs=lambda xp, right, x: x)),
    FaultModel("truncating_codes", "store", "quotients are truncated to codes, not rounded", quantizes,
        origin="aiter#4637", arithmetic=_codes_rounded("toward_zero"), contract={"rounding": "toward_zero"}),
    FaultModel("codes_round_ties_away", "store", "quotients halfway between two codes are rounded away from zero",
        quantizes, needs="quotients halfway between two codes", arithmetic=_codes_rounded("nearest_away"),
        emulated=True),
    FaultModel("zero_group_nan", "special values", "a group of zeros gives a scale of NaN: zero divided by zero",
        quantizes, origin="kernels-community#680", needs="a row or group of zeros",
        arithmetic=_scale(lambda span, largest: torch.where(span == 0, math.nan, span / largest)),
        emulated=True),
    FaultModel("scale_in_bfloat16", "precision", "the scale is rounded to bfloat16", quantizes,
        arithmetic=_scale(lambda span, largest: narrowed(span / largest, "bfloat16")), emulated=True),
    FaultModel("scale_in_float16", "precision", "the scale is rounded to float16", quantizes,
        arithmetic=_scale(lambda span, largest: narrowed(span / largest, "float16")), emulated=True),
    FaultModel("scale_power_of_two", "scale", "the scale is rounded up to a power of two", quantizes,
        arithmetic=_scale(_power_of_two), emulated=True),
    FaultModel("tail_of_maximum_dropped", "tail", "the scale leaves out what is beyond the last whole block of 16",
        quantizes, needs="more than 16 columns, no multiple of 16",
        arithmetic=operations(max=lambda xp, right, x: right(x[..., : whole(x.shape[-1], 16)]))),
    FaultModel("granularity_ignored", "scale", "one scale for each row, whatever is asked for", _FP8,
        applies=has("granularity", "group128"), needs="more than 128 columns",
        definition=_of_rows),
    FaultModel("scale_of_first_row", "scale", "the scale of the first row is returned for all", quantizes,
        needs="more than one row", results=one(1, _of_first_row),
        applies=lambda case: case.options.get("granularity") != "tensor"),
    FaultModel("scale_inverted", "scale", "the reciprocal of the scale is returned", quantizes,
        results=one(1, lambda xp, scale: xp.exact(torch.ones(scale.shape)) / scale)),
    FaultModel("codes_beyond_tile_zero", "tail", "codes beyond the last whole tile of 16 columns are zero", quantizes,
        needs="more than 16 columns, no multiple of 16", results=one(0, zero_where(columns_beyond(16)))),
    FaultModel("quantised_from_bfloat16", "precision", "the input is rounded to bfloat16 first", quantizes,
        applies=is_wide, inputs=changed("x", lambda x: round_to(x.double(), "bfloat16"))),
    FaultModel("symmetric_ignored", "formula", "symmetric=True is ignored", _INT4, applies=has("symmetric", True),
        options=option(symmetric=False)),
    FaultModel("range_without_zero", "formula", "the range does not include zero: groups of one sign are clipped",
        _INT4, origin="unsloth#10841", applies=_asymmetric,
        arithmetic=operations(maximum=lambda xp, right, a, b: a)),
    FaultModel("zero_point_left_out", "formula", "the zero-point is left out", _INT4, applies=_asymmetric,
        arithmetic=_zero_points(altered=lambda xp, points: points * 0.0)),
    FaultModel("zero_point_subtracted", "formula", "the zero-point is subtracted from the codes, not added", _INT4,
        arithmetic=_zero_points(used=lambda xp, points: -points)),
    FaultModel("zero_point_rounded_down", "formula", "quotients are rounded down to zero-points, not to nearest", _INT4,
        applies=_asymmetric, arithmetic=_zero_points(shifted=-0.5)),
    FaultModel("zero_point_rounded_up", "formula", "quotients are rounded up to zero-points, not to nearest", _INT4,
        applies=_asymmetric, arithmetic=_zero_points(shifted=0.5)),
    FaultModel("zero_point_too_large", "formula", "zero-points are one too large, and codes with them", _INT4,
        applies=_asymmetric, arithmetic=_zero_points(altered=_more)),
    FaultModel("zero_point_too_small", "formula", "zero-points are one too small, and codes with them", _INT4,
        applies=_asymmetric, arithmetic=_zero_points(altered=_less)),
    FaultModel("zero_point_stored_less_one", "packing", "zero-points are returned less one, as GPTQ stores them", _INT4,
        applies=_asymmetric, definition=_stored_less_one),
    FaultModel("zero_point_larger_in_codes", "packing",
        "codes are made with zero-points one larger than those returned",
        _INT4, applies=_asymmetric, arithmetic=_zero_points(used=_more)),
    FaultModel("zero_point_smaller_in_codes", "packing",
        "codes are made with zero-points one smaller than those returned",
        _INT4, applies=_asymmetric, arithmetic=_zero_points(used=_less)),
    FaultModel("int4_codes_wrap", "store", "codes beyond 15 wrap around", _INT4,
        arithmetic=operations(quantize=_wrapped), emulated=True, needs="a group whose codes go beyond the largest"),
)  # fmt: skip
