"""Quantisers: scales, zero-points and codes of float tensors.

The scale is the span of a group over the largest code, in float32; codes are the quotients rounded to nearest even. An
exact tie goes to the even code where the scale is a power of two; elsewhere the scale's own rounding decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.registry import Option, choice, define, flag

_GROUP = 128
_SCALES = {"row": "[R,1]", "tensor": "[]", "group128": f"[R,ceil(N/{_GROUP})]"}


def row_groups(xp: Any, x: Any, size: int) -> list[Any]:
    """x[R,N] in groups of neighbours [R,G,size]; the rest of each row, where there is one, apart."""
    rows, columns = x.shape
    whole = columns // size
    parts = [x[:, : whole * size].reshape(rows, whole, size)] if whole else []
    return parts + ([x[:, whole * size :].reshape(rows, 1, columns - whole * size)] if columns % size else [])


def _parts(xp: Any, x: Any, granularity: str) -> list[Any]:
    """x[R,N] as [.., G, n], each n with a scale of its own."""
    rows, columns = x.shape
    if granularity == "group128":
        return row_groups(xp, x, _GROUP)
    return [x.reshape(1, 1, rows * columns) if granularity == "tensor" else x.reshape(rows, 1, columns)]


def row_maximum(xp: Any, x: Any) -> Any:
    """The largest along the last axis, and not below zero."""
    return xp.maximum(xp.max(x), xp.exact(xp.integers(0)))


def rejoined(xp: Any, parts: list[Any], like: Any, shape: tuple[int, ...]) -> Any:
    """Groups [R,G,n] side by side; of no group at all what ``like`` has none of."""
    flat = [part.reshape(part.shape[0], part.shape[1] * part.shape[2]) for part in parts]
    return (xp.concatenate(flat, 1) if flat else like[:, :0]).reshape(shape)


def _scale_shape(shape: tuple[int, int], granularity: str) -> tuple[int, ...]:
    rows, columns = shape
    return {"row": (rows, 1), "tensor": (), "group128": (rows, -(-columns // _GROUP))}[granularity]


def _symmetric(xp: Any, x: Any, granularity: str, largest: int, format: str, stored: Any) -> tuple[Any, Any]:
    """Codes and scales of x[R,N], whose largest magnitude becomes the largest code."""
    if stored is not None and granularity == "tensor":
        stored = stored.reshape(1, 1)
    codes, scales, done = [], [], 0
    for part in _parts(xp, x, granularity):
        scale = xp.quantization_scale(row_maximum(xp, xp.abs(part)), largest)
        given = None if stored is None else stored_part(stored, done, scale.shape)
        codes.append(xp.quantize(part, scale, format, stored=given))
        scales.append(scale)
        done += scale.shape[1]
    return rejoined(xp, codes, x, x.shape), rejoined(xp, scales, x, _scale_shape(x.shape, granularity))


def stored_part(stored: Any, first: int, shape: tuple[int, ...]) -> Any:
    """The scales or zero-points [R,groups] of the groups from ``first`` on, as [R,G,1]."""
    return stored[:, first : first + shape[1], None]


def _rows(options: Mapping[str, Any]) -> str | None:
    return None if options["granularity"] == "tensor" else "R"


@define(
    "quantize_fp8",
    lambda options: (
        f"x[R,N]=real(448) -> codes:float8_e4m3fn[R,N]=rounded, scale:float32{_SCALES[options['granularity']]}"
    ),
    options={"granularity": choice("row", "tensor", "group128")},
    rows=_rows,
    empty=("R",),
    chosen=("scale",),
)
def quantize_fp8(xp: Any, x: Any, *, granularity: str, scale: Any = None) -> tuple[Any, Any]:
    """Codes of e4m3 and scales amax / 448, per row, of the whole, or per 128 neighbours in a row."""
    return _symmetric(xp, x, granularity, 448, "float8_e4m3fn", scale)


@define(
    "quantize_int8",
    lambda options: f"x[R,N]=real(127) -> codes:int8[R,N]=rounded, scale:float32{_SCALES[options['granularity']]}",
    options={"granularity": choice("row", "tensor")},
    rows=_rows,
    empty=("R",),
    chosen=("scale",),
)
def quantize_int8(xp: Any, x: Any, *, granularity: str, scale: Any = None) -> tuple[Any, Any]:
    """Codes of int8 and scales amax / 127, per row or of the whole."""
    return _symmetric(xp, x, granularity, 127, "int8", scale)


def _int4_signature(options: Mapping[str, Any]) -> str:
    groups = f"[R,ceil(N/{options['group']})]"
    return f"x[R,N]=real(15) -> codes:uint8[R,N]=rounded, scale:float32{groups}, zero:uint8{groups}=rounded"


@define(
    "quantize_int4",
    _int4_signature,
    options={
        "group": Option(_GROUP, lambda value: type(value) is int and value > 0, "a positive whole number"),
        "symmetric": flag(),
    },
    rows="R",
    chosen=("scale", "zero"),
)
def quantize_int4(
    xp: Any, x: Any, *, group: int, symmetric: bool, scale: Any = None, zero: Any = None
) -> tuple[Any, Any, Any]:
    """Codes 0 to 15, scales, and the zero-points that stand for 0.0, per ``group`` neighbours in a row.

    The range includes zero: scale = (max(x, 0) - min(x, 0)) / 15, zero = round(-min(x, 0) / scale). Symmetric: scale =
    amax / 7, zero 8, codes 1 to 15. ``zero``: a kernel's own zero-points, which its codes must agree with.
    """
    codes, scales, zeros, done = [], [], [], 0
    for part in row_groups(xp, x, group):
        below = row_maximum(xp, -part)
        span = row_maximum(xp, xp.abs(part)) if symmetric else row_maximum(xp, part) + below
        step = xp.quantization_scale(span, 7 if symmetric else 15)
        stored = None if scale is None else stored_part(scale, done, step.shape)
        point = (
            xp.exact(xp.native.full(step.shape, 8)) if symmetric else xp.quantize(below, step, "uint4", stored=stored)
        )
        own = point if zero is None or symmetric else stored_part(zero, done, step.shape)
        codes.append(xp.quantize(part, step, "uint4", zero=own, stored=stored))
        scales.append(step)
        zeros.append(point)
        done += step.shape[1]
    shape = (x.shape[0], -(-x.shape[1] // group))
    return rejoined(xp, codes, x, x.shape), rejoined(xp, scales, x, shape), rejoined(xp, zeros, x, shape)
