"""Faults of matrix products: layouts and tails, scales of quantised operands, packings, sparse indices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.definitions.gemm import AWQ_ORDER, E2M1, nibbles, repeat
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import (
    changed,
    has,
    in_input_dtype,
    is_narrow,
    one,
    operations,
    tail_dropped,
    zero_where,
)

Tensor = torch.Tensor
_DENSE = ("gemm", "linear")
_FP8, _INT8, _MX, _NV, _INT4, _SPARSE = (
    ("gemm_fp8",), ("gemm_int8",), ("gemm_mxfp8",), ("gemm_nvfp4",), ("gemm_int4",), ("gemm_2to4",),
)  # fmt: skip
_ROWS = (*_FP8, *_INT8)
_SCALED = (*_ROWS, *_MX)
_MATRICES = ("gemm", "linear", "gemm_2to4", "gemm_fp8", "gemm_int8", "gemm_mxfp8", "gemm_nvfp4", "gemm_int4", "moe")
_SPLIT = tuple(name for name in _MATRICES if name != "gemm_2to4")


def _square_transposed(name: str) -> Any:
    """Read a square operand transposed."""

    def inputs(values: Tensors, case: Case) -> Tensors:
        x = values[name]
        return values | ({name: x.T} if x.dim() == 2 and x.shape[0] == x.shape[1] else {})

    return inputs


def _bias_twice(xp: Any, right: Any, a: Any, b: Any, plus: Any = None) -> Any:
    result = right(a, b, plus)
    return result if plus is None else result + plus


def _rounded_before_bias(xp: Any, right: Any, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Any:
    result = right(a, b)
    return result if plus is None else in_input_dtype(xp, result) + plus


def _last_split_lost(xp: Any, right: Any, a: Any, b: Any, *rest: Any, **settings: Any) -> Any:
    """Add only the first half of K if K is large."""
    half = a.shape[-1] // 2 if a.shape[-1] >= 64 else a.shape[-1]
    return right(a[..., :half], b[..., :half, :], *rest, **settings)


def _square(x: Tensor) -> Tensor:
    return x.float() * x.float()


def _first_along(name: str, axis: int) -> Any:
    """Use the first scale along an axis for all."""

    def alter(x: Tensor) -> Tensor:
        return x.narrow(axis, 0, 1).expand(x.shape) if axis < x.dim() and x.shape[axis] else x

    return changed(name, alter)


def _shifted_along(name: str, axis: int) -> Any:
    """Use the previous block's scale for each block."""

    def alter(x: Tensor) -> Tensor:
        return x.float().index_select(axis, (torch.arange(x.shape[axis]) - 1).clamp(min=0)) if x.dim() else x

    return changed(name, alter)


def _codes(alter: Callable[[Tensor], Tensor]) -> Any:
    """Alter the codes of both operands."""
    return lambda values, case: values | {name: alter(values[name]) for name in ("a", "b")}


def _scale_by_row(values: Tensors, case: Case) -> Tensors:
    a, b = values["scale_a"], values["scale_b"]
    if case.spec == "gemm_fp8" and case.options["granularity"] != "row":
        return values
    rows = torch.arange(case.sizes["M"]) % max(case.sizes["N"], 1)
    return values | {"scale_a": b[0, rows][:, None] if b.shape[1] else a}


def _in_groups_of(size: int) -> Any:
    """Index the scales along K by groups of another size."""

    def groups(values: Tensors, case: Case) -> Tensors:
        x, block = values["scale_a"], 32 if case.spec == "gemm_mxfp8" else 16
        index = (torch.arange(x.shape[1]) * block // size).clamp(max=max(x.shape[1] - 1, 0))
        other = values["scale_b"]
        axis = 0 if case.spec == "gemm_mxfp8" else 1
        return values | {"scale_a": x.float()[:, index], "scale_b": other.float().index_select(axis, index)}

    return groups


def _high_first(values: Tensors, case: Case) -> Tensors:
    names = ("a",) if case.spec == "gemm_nvfp4" else ("qweight",)  # swapping both is the same product
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


def _weights(alter: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> type:
    """Compute the product with ``alter(codes, zero-points, scales)``, each [K, N]."""
    return operations(quantized_matmul=lambda xp, right, x, *weights: right(x, *alter(*weights)))


def _groups_of(size: int) -> type:
    """Use scales and zero-points of groups of ``size`` along K, whatever the call's group size."""

    def quantized_matmul(xp: Any, right: Any, x: Any, codes: Any, points: Any, scales: Any) -> Any:
        own, inner = xp.case.sizes["g"], codes.shape[0]
        rows = xp.integers([min(k // size * own, max(inner - own, 0)) for k in range(inner)])
        return right(x, codes, points[rows], scales[rows])

    return operations(quantized_matmul=quantized_matmul)


def _nibbles_moved(taken: Sequence[int], right: Sequence[int], *names: str) -> Any:
    """Read words of eight nibbles in the order ``taken`` instead of ``right``."""

    def moved(words: Tensor) -> Tensor:
        parts = [((words >> 4 * old) & 15) << 4 * new for old, new in zip(taken, right, strict=True)]
        return torch.stack(parts).sum(0, dtype=words.dtype)

    return lambda values, case: values | {name: moved(values[name]) for name in names}


def _signed(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, codes - 16, codes)


def _borrowed(codes: Tensor) -> Tensor:
    signed = _signed(codes)
    high = signed[1::2] - (signed[0::2][: signed[1::2].shape[0]] < 0).to(signed.dtype)
    out = codes.clone()
    out[1::2] = high & 15
    return out


def _group_ignored(xp: Any, values: Any, index: Any, b: Any) -> Any:
    position = xp.integers(range(values.shape[1])) // 2 * 2 + index
    return xp.sparse_matmul(values, position.clamp(max=max(b.shape[0] - 1, 0)), b)


_AWQ_POSITIONS = tuple(AWQ_ORDER.index(column) for column in range(8))
_BLOCKS = has("granularity", "block")
_NOT_BLOCKS = has("granularity", "row")

FAULT_MODELS = (
    FaultModel("operand_transposed", "layout", "a square right operand is read as its transpose", ("gemm",),
        needs="a square right operand", inputs=_square_transposed("b")),
    FaultModel("weight_transposed", "layout", "a square weight is read as its transpose", ("linear",),
        needs="a square weight", inputs=_square_transposed("weight")),
    FaultModel("bias_twice", "formula", "the bias is added by each part of a split K", ("linear",),
        arithmetic=operations(matmul=_bias_twice)),
    FaultModel("rounded_before_bias", "precision", "the product is rounded to the input dtype before the bias is added",
        ("linear",), arithmetic=operations(matmul=_rounded_before_bias), emulated=True, applies=is_narrow),
    FaultModel("split_lost", "tail", "of two halves along K one is lost", _SPLIT, origin="rocm-libraries#9055",
        needs="K of at least 64", arithmetic=operations(matmul=_last_split_lost)),
    FaultModel("last_of_odd_k_dropped", "tail", "the last of an odd number of terms is dropped", _DENSE,
        needs="an odd K", arithmetic=tail_dropped(2)),
    FaultModel("only_whole_blocks_of_k", "tail", "only whole blocks of 16 along K are multiplied: none of fewer terms",
        _DENSE, needs="K that is no multiple of 16", arithmetic=tail_dropped(16, of_fewer=False)),
    FaultModel("tail_of_k_dropped_128", "tail", "products leave out what is beyond the last whole 128 of K",
        (*_FP8, *_INT8, *_DENSE), origin="aiter#2900", needs="K above 128, no multiple of it",
        arithmetic=tail_dropped(128)),
    FaultModel("rows_beyond_tile_zero", "tail", "rows beyond the last whole tile of 16 are zero", _MATRICES,
        needs="more than 16 rows, no multiple of 16", results=one(0, zero_where(
         lambda shape: (torch.arange(shape[0])[:, None] >= shape[0] // 16 * 16) & (shape[0] >= 16)))),
    FaultModel("scale_a_dropped", "scale", "scale_a is left out", _SCALED, inputs=changed("scale_a", torch.ones_like)),
    FaultModel("scale_b_dropped", "scale", "scale_b is left out", _SCALED, inputs=changed("scale_b", torch.ones_like)),
    FaultModel("scale_a_twice", "scale", "scale_a is applied twice", _ROWS, inputs=changed("scale_a", _square)),
    FaultModel("scale_b_twice", "scale", "scale_b is applied twice", _ROWS, inputs=changed("scale_b", _square)),
    FaultModel("row_scale_of_first", "scale", "every row takes the scale of the first", _SCALED,
        inputs=_first_along("scale_a", 0), needs="more than one row"),
    FaultModel("column_scale_of_first", "scale", "every column takes the scale of the first", _INT8,
        inputs=_first_along("scale_b", 1), needs="more than one column"),
    FaultModel("row_scale_of_row_before", "scale", "each row takes the scale of the row before", _SCALED,
        inputs=_shifted_along("scale_a", 0), needs="more than one row"),
    FaultModel("scale_by_column_number", "scale", "a row's scale is read from the columns' scales", _ROWS,
        inputs=_scale_by_row, applies=lambda case: case.spec == "gemm_int8" or _NOT_BLOCKS(case)),
    FaultModel("block_scale_of_first", "scale", "every block along K takes the scale of the first", (*_FP8, *_MX, *_NV),
        inputs=_first_along("scale_a", 1), origin="aiter#2900", needs="more than one block along K",
        applies=lambda case: case.spec != "gemm_fp8" or _BLOCKS(case)),
    FaultModel("block_scale_of_block_before", "scale", "each block along K takes the scale of the block before",
        (*_FP8, *_MX, *_NV), inputs=_shifted_along("scale_a", 1), needs="more than one block along K",
        applies=lambda case: case.spec != "gemm_fp8" or _BLOCKS(case)),
    FaultModel("block_scale_transposed", "scale", "scale_b is read transposed", _FP8, origin="aiter#4506",
        applies=_BLOCKS, inputs=_square_transposed("scale_b"),
        needs="as many blocks along N as along K, two or more"),
    FaultModel("blocks_twice_as_long", "scale", "scales are counted in blocks twice as long", _MX,
        inputs=_in_groups_of(64), needs="more than one block along K"),
    FaultModel("nvfp4_blocks_of_32", "scale", "scales are counted in blocks of 32 instead of 16", _NV,
        inputs=_in_groups_of(32), needs="more than one block along K"),
    FaultModel("e4m3_saturates_at_240", "precision", "e4m3 codes saturate at 240, as e4m3fnuz does", (*_FP8, *_MX),
        origin="vllm#50467, #45681", inputs=_codes(lambda x: x.float().clamp(-240.0, 240.0)), needs="codes beyond 240",
        applies=lambda case: case.dtypes["a"] == "float8_e4m3fn"),
    FaultModel("e4m3_above_256_is_448", "precision", "e4m3 codes above 256 become 448", (*_FP8, *_MX),
        origin="sglang#37140", inputs=_codes(
         lambda x: torch.where(x.float().abs() > 256, 448.0 * x.float().sign(), x.float())), needs="codes beyond 256",
        applies=lambda case: case.dtypes["a"] == "float8_e4m3fn"),
    FaultModel("e4m3_as_fnuz", "packing", "e4m3fn codes are read as e4m3fnuz: a quarter of the product",
        (*_FP8, *_MX), origin="vllm#50467, #45681",
        inputs=_codes(lambda x: x.float() * 0.5)),
    FaultModel("int8_a_unsigned", "packing", "negative codes of a are read as unsigned", _INT8,
        inputs=changed("a", lambda x: x.to(torch.int32) & 255), origin="vllm#48905"),
    FaultModel("int8_b_unsigned", "packing", "negative codes of b are read as unsigned", _INT8,
        inputs=changed("b", lambda x: x.to(torch.int32) & 255), origin="vllm#48905"),
    FaultModel("int8_at_least_minus_127", "packing", "the code -128 is read as -127", _INT8, needs="a code of -128",
        inputs=_codes(lambda x: x.clamp(min=-127))),
    FaultModel("nibbles_swapped", "packing", "the high nibble of a byte is taken first", (*_NV, *_INT4),
        origin="Quark#30",
        inputs=_high_first, applies=lambda case: case.spec == "gemm_nvfp4" or case.options["packing"] == "plain"),
    FaultModel("e2m1_sign_dropped", "packing", "the sign of an e2m1 code is dropped", _NV, origin="sparkinfer#761",
        definition=_nvfp4(lambda code: abs(E2M1[code]))),
    FaultModel("e2m1_read_as_int4", "packing", "e2m1 codes are read as four-bit integers", _NV,
        definition=_nvfp4(lambda code: float(code - 16 if code >= 8 else code))),
    FaultModel("e2m1_halves_dropped", "packing", "the e2m1 codes 0.5 and 1.5 are read as whole numbers", _NV,
        definition=_nvfp4(lambda code: float(int(E2M1[code])))),
    FaultModel("global_scale_dropped", "scale", "global_a is left out", _NV,
        inputs=changed("global_a", torch.ones_like)),
    FaultModel("global_scale_b_dropped", "scale", "global_b is left out", _NV,
        inputs=changed("global_b", torch.ones_like)),
    FaultModel("global_scale_twice", "scale", "global_a is applied twice", _NV, inputs=changed("global_a", _square)),
    FaultModel("global_scale_divides", "scale", "global_a divides instead of multiplying", _NV,
        inputs=changed("global_a", lambda x: 1 / x)),
    FaultModel("nvfp4_block_scale_dropped", "scale", "scale_a is left out", _NV,
        inputs=changed("scale_a", torch.ones_like)),
    FaultModel("zero_point_one_less", "packing", "zero-points are one too small", _INT4,
        origin="vllm#26092", arithmetic=_weights(lambda q, z, s: (q, z - 1, s))),
    FaultModel("zero_point_one_more", "packing", "zero-points are one too large", _INT4,
        origin="vllm#26092", arithmetic=_weights(lambda q, z, s: (q, z + 1, s))),
    FaultModel("zero_point_wraps", "packing", "a stored zero-point of 15, which means 16, becomes 0", _INT4,
        origin="GPTQModel#2351", applies=has("packing", "gptq"), needs="a stored zero-point of 15",
        arithmetic=_weights(lambda q, z, s: (q, z & 15, s))),
    FaultModel("zero_point_eight", "packing", "zero-points are taken to be 8", _INT4,
        arithmetic=_weights(lambda q, z, s: (q, z * 0 + 8, s))),
    FaultModel("zero_point_dropped", "packing", "zero-points are left out", _INT4,
        arithmetic=_weights(lambda q, z, s: (q, z * 0, s))),
    FaultModel("zero_point_as_weight", "packing", "the zero-point is subtracted after the scale", _INT4,
        arithmetic=operations(
         quantized_matmul=lambda xp, right, x, q, z, s: xp.matmul(x, xp.exact(q) * s - xp.exact(z)))),
    FaultModel("nibble_signed", "packing", "nibbles of 8 and more are read as negative", _INT4, origin="sparkinfer#761",
        arithmetic=_weights(lambda q, z, s: (_signed(q), z, s))),
    FaultModel("nibble_borrows", "packing", "a low nibble of 8 or more takes one from its neighbour", _INT4,
        origin="sparkinfer#761", arithmetic=_weights(lambda q, z, s: (_borrowed(q), z, s))),
    FaultModel("awq_order_ignored", "packing", "AWQ's nibbles are taken in order 0 to 7", _INT4, origin="Quark#30",
        applies=has("packing", "awq"), inputs=_nibbles_moved(range(8), _AWQ_POSITIONS, "qweight", "zeros")),
    FaultModel("gptq_order_of_awq", "packing", "GPTQ's nibbles are taken in AWQ's order", _INT4, origin="Quark#30",
        applies=has("packing", "gptq"), inputs=_nibbles_moved(AWQ_ORDER, range(8), "qweight")),
    FaultModel("group_of_first", "scale", "every group along K takes the scale and zero-point of the first", _INT4,
        needs="more than one group along K", arithmetic=_groups_of(1 << 30)),
    FaultModel("group_size_128", "scale", "groups are counted as 128 long, whatever their length", _INT4,
        origin="torch-xpu-ops#5001", needs="groups of 32 or 64, more than one",
        arithmetic=_groups_of(128)),
    FaultModel("group_size_32", "scale", "groups are counted as 32 long, whatever their length", _INT4,
        origin="torch-xpu-ops#5001", needs="groups of 64 or 128, more than one",
        arithmetic=_groups_of(32)),
    FaultModel("index_ignored", "packing", "the two values of a group are taken for its first two places", _SPARSE,
        inputs=changed("index", lambda x: torch.arange(x.shape[1]).to(x.dtype).expand(x.shape) % 2)),
    FaultModel("index_pair_swapped", "packing", "the two indices of a group are swapped", _SPARSE,
        inputs=changed("index", lambda x: x.reshape(len(x), -1, 2).flip(2).flatten(1) if x.numel() else x)),
    FaultModel("index_of_group_before", "packing", "each group takes the indices of the group before", _SPARSE,
        inputs=changed("index", lambda x: torch.cat([x[:, :2], x[:, :-2]], 1)), needs="more than one group along K"),
    FaultModel("index_low_bit_only", "packing", "only the low bit of an index is read", _SPARSE,
        inputs=changed("index", lambda x: x & 1)),
    FaultModel("index_group_of_two", "packing", "groups are counted as two places, not four", _SPARSE,
        needs="more than one group along K", definition=_group_ignored),
    FaultModel("sparse_operands_of_first_row", "packing", "every row takes the indices of the first", _SPARSE,
        inputs=changed("index", lambda x: x[:1].expand(x.shape)), needs="more than one row"),
)  # fmt: skip
