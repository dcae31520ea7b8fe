"""Faults of matrix products: layouts and tails, scales of quantised operands, packings, sparse indices."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.definitions.microscaling import E2M1
from assay.golden.definitions.quantized import AWQ_ORDER, nibbles, repeat
from assay.precision.rounding import round_to
from assay.verify.inputs.cases import Case
from assay.verify.suspects.common import MATRICES
from assay.verify.suspects.mechanisms import asked, changed, is_narrow, one, tail_dropped, zero_where
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
_DENSE = ("gemm", "linear")
_FP8, _INT8, _MX, _NV, _INT4, _SPARSE = (
    ("gemm_fp8",), ("gemm_int8",), ("gemm_mxfp8",), ("gemm_nvfp4",), ("gemm_int4",), ("gemm_2to4",),
)  # fmt: skip
_SCALED = (*_FP8, *_INT8, *_MX)
_SPLIT = tuple(name for name in MATRICES if name != "gemm_2to4")


def _square_transposed(name: str) -> Any:
    """A square operand read as its transpose."""

    def inputs(values: Tensors, case: Case) -> Tensors:
        x = values[name]
        return values | ({name: x.T} if x.dim() == 2 and x.shape[0] == x.shape[1] else {})

    return inputs


class _BiasTwice:
    def matmul(self: Any, a: Any, b: Any, plus: Any = None) -> Any:
        found = super().matmul(a, b, plus)  # type: ignore[misc]
        return found if plus is None else found + plus


class _RoundedBeforeBias:
    """The product is rounded to the input dtype before the bias is added: for float32 evaluations."""

    def matmul(self: Any, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
        found = super().matmul(a, b)  # type: ignore[misc]
        if plus is None:
            return found
        return round_to(found.double(), next(iter(self.case.dtypes.values()))).to(found.dtype) + plus


class _LastSplitLost:
    """Of the two halves along K only the first is added where K is large."""

    def matmul(self: Any, a: Any, b: Any, *rest: Any, **settings: Any) -> Any:
        half = a.shape[-1] // 2 if a.shape[-1] >= 64 else a.shape[-1]
        return super().matmul(a[..., :half], b[..., :half, :], *rest, **settings)  # type: ignore[misc]


def _ones(name: str) -> Any:
    return changed(name, torch.ones_like)


def _squared(name: str) -> Any:
    """A scale applied twice."""
    return changed(name, lambda x: x.float() * x.float())


def _first_along(name: str, axis: int) -> Any:
    """The first scale along an axis stands for all."""

    def alter(x: Tensor) -> Tensor:
        return x.narrow(axis, 0, 1).expand(x.shape) if axis < x.dim() and x.shape[axis] else x

    return changed(name, alter)


def _shifted_along(name: str, axis: int) -> Any:
    """Each block reads the scale of the block before."""
    return changed(name, lambda x: _rolled(x, axis))


def _rolled(x: Tensor, axis: int) -> Tensor:
    if not x.dim():
        return x
    order = (torch.arange(x.shape[axis]) - 1).clamp(min=0)
    return x.index_select(axis, order) if x.itemsize > 1 else x.float().index_select(axis, order)


def _float(x: Tensor) -> Tensor:
    return x.float()


def _at_most(limit: float) -> Any:
    def inputs(values: Tensors, case: Case) -> Tensors:
        codes = {name: x for name, x in values.items() if name in ("a", "b")}
        return values | {name: _float(x).clamp(-limit, limit) for name, x in codes.items()}

    return inputs


def _above_256(values: Tensors, case: Case) -> Tensors:
    """Codes above 256 become 448."""

    def alter(x: Tensor) -> Tensor:
        wide = _float(x)
        return torch.where(wide.abs() > 256, 448.0 * wide.sign(), wide)

    return values | {name: alter(values[name]) for name in ("a", "b")}


def _fnuz(values: Tensors, case: Case) -> Tensors:
    """e4m3fn codes read as e4m3fnuz: half as large, and the code of -0 is NaN."""
    return values | {name: _float(values[name]) * 0.5 for name in ("a", "b")}


def _unsigned(name: str) -> Any:
    """int8 codes read as uint8."""
    return changed(name, lambda x: torch.where(x < 0, x.to(torch.int32) + 256, x.to(torch.int32)))


def _scale_by_row(values: Tensors, case: Case) -> Tensors:
    """The columns' scales read by the row's number."""
    a, b = values["scale_a"], values["scale_b"]
    if case.spec == "gemm_fp8" and case.options["granularity"] != "row":
        return values
    rows = torch.arange(case.sizes["M"]) % max(case.sizes["N"], 1)
    return values | {"scale_a": b[0, rows][:, None] if b.shape[1] else a}


def _in_groups_of(size: int) -> Any:
    """Scales along K counted in groups of another size."""

    def groups(values: Tensors, case: Case) -> Tensors:
        x, block = values["scale_a"], 32 if case.spec == "gemm_mxfp8" else 16
        index = (torch.arange(x.shape[1]) * block // size).clamp(max=max(x.shape[1] - 1, 0))
        other = values["scale_b"]
        axis = 0 if case.spec == "gemm_mxfp8" else 1
        return values | {"scale_a": x.float()[:, index], "scale_b": other.float().index_select(axis, index)}

    return groups


def _high_first(values: Tensors, case: Case) -> Tensors:
    """The high nibble taken first."""
    names = ("a",) if case.spec == "gemm_nvfp4" else ("qweight",)  # both swapped is the same product
    return values | {name: ((values[name] & 15) << 4) | (values[name] >> 4) for name in names}


def _nvfp4(table: Any) -> Any:
    def definition(xp: Any, a: Any, b: Any, scale_a: Any, scale_b: Any, global_a: Any, global_b: Any) -> Any:
        numbers = xp.native.asarray([table(code) for code in range(16)])
        left, right = (
            xp.exact(numbers[nibbles(xp, codes, (0, 1), axis=1)])
            * repeat(xp, scale, 2 * codes.shape[1], axis=1, group=16)
            for codes, scale in ((a, scale_a), (b, scale_b))
        )
        return xp.scaled_matmul(left, xp.swap(right), global_a, global_b)

    return definition


def _int4(*, code: Any = None, point: Any = None, order: Any = None, group: Any = None) -> Any:
    """The product with codes, zero-points, the order of nibbles or the groups altered."""

    def definition(xp: Any, x: Any, qweight: Any, scales: Any, zeros: Any, *, packing: str) -> Any:
        codes, points = _unpacked(xp, qweight, zeros, packing, order)
        inner = codes.shape[0]
        size = inner // max(scales.shape[0], 1) or 1
        codes = code(codes) if code else codes
        points = point(points, packing) if point else points
        if group:
            index = xp.integers([min(group(k, size), scales.shape[0] - 1) for k in range(inner)])
            return xp.quantized_matmul(x, codes, points[index], scales[index])
        points = repeat(xp, points, inner, axis=0, group=size)
        return xp.quantized_matmul(x, codes, points, repeat(xp, scales, inner, axis=0, group=size))

    return definition


def _unpacked(xp: Any, qweight: Any, zeros: Any, packing: str, order: Any) -> tuple[Any, Any]:
    if packing == "plain":
        return nibbles(xp, qweight, (0, 1), axis=0), zeros
    if packing == "awq":
        right = tuple(AWQ_ORDER.index(column) for column in range(8))
        used = order or right
        return nibbles(xp, qweight, used, axis=1), nibbles(xp, zeros, used, axis=1)
    return nibbles(xp, qweight, order or range(8), axis=0), nibbles(xp, zeros, range(8), axis=1) + 1


def _signed(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, codes - 16, codes)


def _borrowed(codes: Tensor) -> Tensor:
    """A negative low nibble takes one from the high one beside it."""
    signed = _signed(codes)
    high = signed[1::2] - (signed[0::2][: signed[1::2].shape[0]] < 0).to(signed.dtype)
    out = codes.clone()
    out[1::2] = high & 15
    return out


def _index(alter: Any) -> Any:
    return changed("index", alter)


def _group_ignored(xp: Any, values: Any, index: Any, b: Any) -> Any:
    """The place in the group taken for the place in the row of pairs."""
    place = xp.integers(range(values.shape[1])) // 2 * 2 + index
    return xp.sparse_matmul(values, place.clamp(max=max(b.shape[0] - 1, 0)), b)


_BLOCKS = asked("granularity", "block")
_NOT_BLOCKS = asked("granularity", "row")

SUSPECTS = (
    Suspect("operand_transposed", "layout", "a square right operand is read as its transpose", ("gemm",),
            needs="a square right operand", inputs=_square_transposed("b")),
    Suspect("weight_transposed", "layout", "a square weight is read as its transpose", ("linear",),
            needs="a square weight", inputs=_square_transposed("weight")),
    Suspect("bias_twice", "formula", "the bias is added by each part of a split K", ("linear",), arithmetic=_BiasTwice),
    Suspect("rounded_before_bias", "precision", "the product is rounded to the input dtype before the bias is added",
            ("linear",), arithmetic=_RoundedBeforeBias, emulated=True, applies=is_narrow),
    Suspect("split_lost", "tail", "of two halves along K one is lost", _SPLIT, origin="rocm-libraries#9055",
            needs="K of at least 64", arithmetic=_LastSplitLost),
    Suspect("last_of_odd_k_dropped", "tail", "the last of an odd number of terms is dropped", _DENSE,
            needs="an odd K", arithmetic=tail_dropped(2)),
    Suspect("tail_of_k_dropped_128", "tail", "products leave out what is beyond the last whole 128 of K",
            (*_FP8, *_INT8, *_DENSE), origin="aiter#2900", needs="K above 128, no multiple of it",
            arithmetic=tail_dropped(128)),
    Suspect("rows_beyond_tile_zero", "tail", "rows beyond the last whole tile of 16 are zero", MATRICES,
            needs="more than 16 rows, no multiple of 16", results=one(0, zero_where(
             lambda shape: (torch.arange(shape[0])[:, None] >= shape[0] // 16 * 16) & (shape[0] >= 16)))),
    Suspect("scale_a_dropped", "scale", "scale_a is left out", _SCALED, inputs=_ones("scale_a")),
    Suspect("scale_b_dropped", "scale", "scale_b is left out", _SCALED, inputs=_ones("scale_b")),
    Suspect("scale_a_twice", "scale", "scale_a is applied twice", (*_FP8, *_INT8), inputs=_squared("scale_a")),
    Suspect("scale_b_twice", "scale", "scale_b is applied twice", (*_FP8, *_INT8), inputs=_squared("scale_b")),
    Suspect("row_scale_of_first", "scale", "every row takes the scale of the first", _SCALED,
            inputs=_first_along("scale_a", 0), needs="more than one row"),
    Suspect("column_scale_of_first", "scale", "every column takes the scale of the first", _INT8,
            inputs=_first_along("scale_b", 1), needs="more than one column"),
    Suspect("row_scale_of_row_before", "scale", "each row takes the scale of the row before", _SCALED,
            inputs=_shifted_along("scale_a", 0), needs="more than one row"),
    Suspect("scale_by_column_number", "scale", "a row's scale is read from the columns' scales", (*_FP8, *_INT8),
            inputs=_scale_by_row, applies=lambda case: case.spec == "gemm_int8" or _NOT_BLOCKS(case)),
    Suspect("block_scale_of_first", "scale", "every block along K takes the scale of the first", (*_FP8, *_MX, *_NV),
            inputs=_first_along("scale_a", 1), origin="aiter#2900", needs="more than one block along K",
            applies=lambda case: case.spec != "gemm_fp8" or _BLOCKS(case)),
    Suspect("block_scale_of_block_before", "scale", "each block along K takes the scale of the block before",
            (*_FP8, *_MX, *_NV), inputs=_shifted_along("scale_a", 1), needs="more than one block along K",
            applies=lambda case: case.spec != "gemm_fp8" or _BLOCKS(case)),
    Suspect("block_scale_transposed", "scale", "scale_b is read transposed", _FP8, origin="aiter#4506",
            applies=_BLOCKS, inputs=_square_transposed("scale_b"),
            needs="as many blocks along N as along K, two or more"),
    Suspect("blocks_twice_as_long", "scale", "scales are counted in blocks twice as long", _MX,
            inputs=_in_groups_of(64), needs="more than one block along K"),
    Suspect("nvfp4_blocks_of_32", "scale", "scales are counted in blocks of 32 instead of 16", _NV,
            inputs=_in_groups_of(32), needs="more than one block along K"),
    Suspect("e4m3_saturates_at_240", "precision", "e4m3 codes saturate at 240, as e4m3fnuz does", (*_FP8, *_MX),
            origin="vllm#50467, #45681", inputs=_at_most(240.0), needs="codes beyond 240",
            applies=lambda case: case.dtypes["a"] == "float8_e4m3fn"),
    Suspect("e4m3_above_256_is_448", "precision", "e4m3 codes above 256 become 448", (*_FP8, *_MX),
            origin="sglang#37140", inputs=_above_256, needs="codes beyond 256",
            applies=lambda case: case.dtypes["a"] == "float8_e4m3fn"),
    Suspect("e4m3_as_fnuz", "packing", "e4m3fn codes are read as e4m3fnuz: a quarter of the product",
            (*_FP8, *_MX), origin="vllm#50467, #45681", inputs=_fnuz),
    Suspect("int8_a_unsigned", "packing", "negative codes of a are read as unsigned", _INT8,
            inputs=_unsigned("a"), origin="vllm#48905"),
    Suspect("int8_b_unsigned", "packing", "negative codes of b are read as unsigned", _INT8, inputs=_unsigned("b"),
            origin="vllm#48905"),
    Suspect("int8_at_least_minus_127", "packing", "the code -128 is read as -127", _INT8, needs="a code of -128",
            inputs=lambda values, case: values | {name: values[name].clamp(min=-127) for name in ("a", "b")}),
    Suspect("nibbles_swapped", "packing", "the high nibble of a byte is taken first", (*_NV, *_INT4), origin="Quark#30",
            inputs=_high_first, applies=lambda case: case.spec == "gemm_nvfp4" or case.options["packing"] == "plain"),
    Suspect("e2m1_sign_dropped", "packing", "the sign of an e2m1 code is dropped", _NV, origin="sparkinfer#761",
            definition=_nvfp4(lambda code: abs(E2M1[code]))),
    Suspect("e2m1_read_as_int4", "packing", "e2m1 codes are read as four-bit integers", _NV,
            definition=_nvfp4(lambda code: float(code - 16 if code >= 8 else code))),
    Suspect("e2m1_halves_dropped", "packing", "the e2m1 codes 0.5 and 1.5 are read as whole numbers", _NV,
            definition=_nvfp4(lambda code: float(int(E2M1[code])))),
    Suspect("global_scale_dropped", "scale", "global_a is left out", _NV, inputs=_ones("global_a")),
    Suspect("global_scale_b_dropped", "scale", "global_b is left out", _NV, inputs=_ones("global_b")),
    Suspect("global_scale_twice", "scale", "global_a is applied twice", _NV, inputs=_squared("global_a")),
    Suspect("global_scale_divides", "scale", "global_a divides instead of multiplying", _NV,
            inputs=changed("global_a", lambda x: 1 / x)),
    Suspect("nvfp4_block_scale_dropped", "scale", "scale_a is left out", _NV, inputs=_ones("scale_a")),
    Suspect("zero_point_one_less", "packing", "zero-points are one too small", _INT4,
            origin="vllm#26092", definition=_int4(point=lambda points, packing: points - 1)),
    Suspect("zero_point_one_more", "packing", "zero-points are one too large", _INT4,
            origin="vllm#26092", definition=_int4(point=lambda points, packing: points + 1)),
    Suspect("zero_point_wraps", "packing", "a stored zero-point of 15, which means 16, becomes 0", _INT4,
            origin="GPTQModel#2351", applies=asked("packing", "gptq"), needs="a stored zero-point of 15",
            definition=_int4(point=lambda points, packing: points & 15)),
    Suspect("zero_point_eight", "packing", "zero-points are taken to be 8", _INT4,
            definition=_int4(point=lambda points, packing: points * 0 + 8)),
    Suspect("zero_point_dropped", "packing", "zero-points are left out", _INT4,
            definition=_int4(point=lambda points, packing: points * 0)),
    Suspect("zero_point_as_weight", "packing", "the zero-point is subtracted after the scale", _INT4,
            definition=lambda xp, x, qweight, scales, zeros, *, packing: _zero_after_scale(
             xp, x, qweight, scales, zeros, packing)),
    Suspect("nibble_signed", "packing", "nibbles of 8 and more are read as negative", _INT4, origin="sparkinfer#761",
            definition=_int4(code=_signed)),
    Suspect("nibble_borrows", "packing", "a low nibble of 8 or more takes one from its neighbour", _INT4,
            origin="sparkinfer#761", definition=_int4(code=_borrowed)),
    Suspect("awq_order_ignored", "packing", "AWQ's nibbles are taken in order 0 to 7", _INT4, origin="Quark#30",
            applies=asked("packing", "awq"), definition=_int4(order=tuple(range(8)))),
    Suspect("gptq_order_of_awq", "packing", "GPTQ's nibbles are taken in AWQ's order", _INT4, origin="Quark#30",
            applies=asked("packing", "gptq"), definition=_int4(order=AWQ_ORDER)),
    Suspect("group_of_first", "scale", "every group along K takes the scale and zero-point of the first", _INT4,
            needs="more than one group along K", definition=_int4(group=lambda k, size: 0)),
    Suspect("group_size_128", "scale", "groups are counted as 128 long, whatever their length", _INT4,
            origin="torch-xpu-ops#5001", needs="groups of 32 or 64, more than one",
            definition=_int4(group=lambda k, size: k // 128)),
    Suspect("group_size_32", "scale", "groups are counted as 32 long, whatever their length", _INT4,
            origin="torch-xpu-ops#5001", needs="groups of 64 or 128, more than one",
            definition=_int4(group=lambda k, size: k // 32)),
    Suspect("index_ignored", "packing", "the two values of a group are taken for its first two places", _SPARSE,
            inputs=_index(lambda x: torch.arange(x.shape[1]).to(x.dtype).expand(x.shape) % 2)),
    Suspect("index_pair_swapped", "packing", "the two indices of a group are swapped", _SPARSE,
            inputs=_index(lambda x: x.unflatten(1, (-1, 2)).flip(2).flatten(1) if x.shape[1] else x)),
    Suspect("index_of_group_before", "packing", "each group takes the indices of the group before", _SPARSE,
            inputs=_index(lambda x: torch.cat([x[:, :2], x[:, :-2]], 1)), needs="more than one group along K"),
    Suspect("index_low_bit_only", "packing", "only the low bit of an index is read", _SPARSE,
            inputs=_index(lambda x: x & 1)),
    Suspect("index_group_of_two", "packing", "groups are counted as two places, not four", _SPARSE,
            needs="more than one group along K", definition=_group_ignored),
    Suspect("sparse_operands_of_first_row", "packing", "every row takes the indices of the first", _SPARSE,
            inputs=_index(lambda x: x[:1].expand(x.shape)), needs="more than one row"),
)  # fmt: skip


def _zero_after_scale(xp: Any, x: Any, qweight: Any, scales: Any, zeros: Any, packing: str) -> Any:
    """x (q s - z)."""
    codes, points = _unpacked(xp, qweight, zeros, packing, None)
    inner = codes.shape[0]
    group = inner // max(scales.shape[0], 1) or 1
    weights = xp.exact(codes) * repeat(xp, scales, inner, axis=0, group=group)
    return xp.matmul(x, weights - xp.exact(repeat(xp, points, inner, axis=0, group=group)))
