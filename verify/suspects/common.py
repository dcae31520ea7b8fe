"""Faults that kernels of any kind have: stores, tails, layouts, narrow formats, special values."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.definitions.unary import FUNCTIONS
from assay.golden.inputs.values import torch_dtype
from assay.precision.rounding import round_to
from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import (
    all_but,
    columns_beyond,
    every,
    last_row,
    out_dtype,
    tail_dropped,
    zero_where,
)
from assay.verify.suspects.single import unwritten
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor

QUANTIZERS = ("quantize_fp8", "quantize_int8", "quantize_int4")
NUMBERS = all_but(*QUANTIZERS)
CODES_IN = ("gemm_fp8", "gemm_int8", "gemm_mxfp8", "gemm_nvfp4")
PLAIN = all_but(*QUANTIZERS, *CODES_IN)
ELEMENTWISE = (*FUNCTIONS, "gelu", "silu", "swiglu", "swiglu_backward")
MATRICES = ("gemm", "linear", "gemm_2to4", "gemm_fp8", "gemm_int8", "gemm_mxfp8", "gemm_nvfp4", "gemm_int4", "moe")
SUMS = tuple(name for name in PLAIN if name not in (*ELEMENTWISE, "rope", "moe_route", "merge_states"))
WIDE = ("gemm", "linear", "gemm_2to4", "all_reduce", "swiglu", "rope", "add_rmsnorm", "exp", "exp2", "expm1")
PRODUCTS = ("gemm", "linear", "gemm_2to4", "gemm_int4")
ROUNDED_ONCE = (*PRODUCTS, "all_reduce", *FUNCTIONS)  # whatever the elements are kept in
NEVER_SUBNORMAL = (
    "cos", "sigmoid", "softplus", "log", "log2", "rsqrt", "sqrt", "log_softmax", "logsumexp", "cross_entropy",
)  # fmt: skip
LIMITLESS = ("log", "log2", "log1p", "sqrt", "softplus", "rsqrt", "reciprocal", "sin", "cos")  # unlike exp and tanh
HEADS = ("attention_varlen", "attention_decode", "attention_backward")  # head sizes are multiples of 8
EVEN = (*HEADS, "attention", "rope")
ROUND_TIES = ("gemm", "linear", "all_reduce", "rope", "gemm_2to4")


def _truncated(result: Tensor, dtype: str) -> Tensor:
    return _specials(result, round_to(result.double(), dtype, "toward_zero", "inf"), dtype)


def _away(result: Tensor, dtype: str) -> Tensor:
    return _specials(result, round_to(result.double(), dtype, "nearest_away", "inf"), dtype)


def _saturated(result: Tensor, dtype: str) -> Tensor:
    return _specials(result, round_to(result.double(), dtype, "nearest", "saturate"), dtype, infinite=False)


def _specials(result: Tensor, stored: Tensor, dtype: str, *, infinite: bool = True) -> Tensor:
    kept = result.isnan() | (result.isinf() & infinite)
    return torch.where(kept, result.double(), stored).to(torch_dtype(dtype))


def _dense(values: Tensors, case: Case) -> Tensors:
    """Every tensor read as if it were contiguous."""
    read = {}
    for name, x in values.items():
        strides = torch.empty(x.shape, device="meta").stride()
        fits = x.dim() and x.storage_offset() + _span(x.shape, strides) <= x.untyped_storage().nbytes() // x.itemsize
        read[name] = x.as_strided(x.shape, strides) if fits and _is_plain(case, name) else x
    return read


def _last_stride_one(values: Tensors, case: Case) -> Tensors:
    """Every tensor read as if neighbours in a row were neighbours in memory."""
    return {
        name: x.as_strided(x.shape, (*x.stride()[:-1], 1)) if x.dim() and _is_plain(case, name) else x
        for name, x in values.items()
    }


def _is_plain(case: Case, name: str) -> bool:
    return any(tensor.name == name and tensor.role in ("real", "bits") for tensor in case.signature.tensors)


def _span(shape: Any, strides: Any) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0


def _into_next_row(xp: Any, x: Any) -> Any:
    """Each row's first element overwritten by the last of the row before, where rows have an odd number."""
    if len(x.shape) < 2 or x.shape[-1] % 2 == 0 or x.shape[-1] < 3 or x.shape[-2] < 2:
        return x
    head = xp.concatenate([x[..., :1, :1], x[..., :-1, -1:]], len(x.shape) - 2)
    return xp.concatenate([head, x[..., 1:]], len(x.shape) - 1)


def _second_tile(shape: tuple[int, ...]) -> Tensor:
    columns = torch.arange(shape[-1])
    return (columns >= 16) & (columns < 32)


def _nothing_summed(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    """What was in memory, where there is nothing to sum."""
    if case.sizes["K"]:
        return found
    return tuple(unwritten(xp, torch.ones(x.shape, dtype=torch.bool), x) for x in found)


SUSPECTS = (
    Suspect(
        "truncating_store",
        "store",
        "the store truncates instead of rounding to nearest",
        tuple(name for name in NUMBERS if name not in ("cross_entropy", "moe_route")),
        "tt-metal#57408",
        applies=out_dtype("bfloat16", "float16"),
        store=_truncated,
        contract={"rounding": "toward_zero"},
    ),
    Suspect(
        "store_rounds_ties_away",
        "store",
        "the store rounds ties away from zero instead of to even",
        ROUND_TIES,
        needs="results halfway between two numbers of the format",
        applies=out_dtype("bfloat16", "float16"),
        store=_away,
        emulated=True,
    ),
    Suspect(
        "saturating_store",
        "store",
        "the store saturates: results beyond the format's range become its largest number",
        WIDE,
        needs="results beyond the range of the format",
        applies=out_dtype("float16", "bfloat16"),
        store=_saturated,
        contract={"overflow": "saturate"},
    ),
    Suspect(
        "stored_by_way_of_float16",
        "store",
        "results pass through float16 on the way to the output: overflow at 65504, and another rounding",
        PLAIN,
        applies=out_dtype("float32", "bfloat16"),
        store=lambda result, dtype: result.to(torch.float16).to(torch_dtype(dtype)),
        emulated=True,
    ),
    Suspect(
        "stored_by_way_of_bfloat16",
        "store",
        "results pass through bfloat16 on the way to the output",
        PLAIN,
        applies=out_dtype("float32", "float16"),
        store=lambda result, dtype: result.to(torch.bfloat16).to(torch_dtype(dtype)),
        emulated=True,
    ),
    Suspect(
        "last_row_unwritten",
        "unwritten",
        "the last row is never written",
        NUMBERS,
        "vllm-ascend#9992, sglang#24850",
        "fresh memory that doesn't hold zeros, nor the last call's answer",
        results=every(lambda xp, x: unwritten(xp, last_row(tuple(x.shape)), x) if len(x.shape) else x),
    ),
    Suspect(
        "last_columns_unwritten",
        "unwritten",
        "the columns beyond the last whole vector of 8 are never written",
        tuple(name for name in NUMBERS if name not in (*HEADS, "moe_route")),
        "Megatron#132",
        "a number of columns that is no multiple of 8, and memory that is not zero",
        results=every(lambda xp, x: unwritten(xp, columns_beyond(8)(tuple(x.shape)), x) if len(x.shape) else x),
    ),
    Suspect(
        "columns_beyond_tile_zero",
        "tail",
        "the columns beyond the last whole tile of 16 are zero",
        tuple(name for name in NUMBERS if name != "moe_route"),
        "common slip",
        "more than 16 columns, no multiple of 16",
        results=every(zero_where(columns_beyond(16))),
    ),
    Suspect(
        "last_row_zero",
        "tail",
        "the last row is zero",
        NUMBERS,
        "common slip",
        "more than one row",
        results=every(zero_where(last_row)),
    ),
    Suspect(
        "tile_dropped",
        "tail",
        "the second tile of 16 columns is never computed, and zero",
        tuple(name for name in NUMBERS if name != "moe_route"),
        "KernelBench#165",
        "more than 16 columns",
        results=every(zero_where(_second_tile)),
    ),
    Suspect(
        "written_into_next_row",
        "store",
        "vectorised stores run over the end of a row and overwrite the start of the next",
        tuple(name for name in PLAIN if name not in (*EVEN, "logsumexp", "cross_entropy", "all_reduce", "moe_route")),
        "aiter#5290",
        "an odd number of columns, and two rows or more",
        results=every(_into_next_row),
    ),
    Suspect(
        "strides_ignored",
        "layout",
        "inputs are read as if they were contiguous",
        NUMBERS,
        "flash-attention#2541, #355, xformers#282",
        "an input that is a transposed, sliced or expanded view",
        inputs=_dense,
    ),
    Suspect(
        "last_stride_taken_for_one",
        "layout",
        "the stride of the last axis is taken to be one",
        NUMBERS,
        "LightLLM#1467",
        "an input whose last stride is not one",
        inputs=_last_stride_one,
    ),
    Suspect(
        "tail_of_sum_dropped",
        "tail",
        "sums and products leave out what is beyond the last whole block of 16",
        tuple(
            name
            for name in (*SUMS, *CODES_IN)
            if name not in ("layernorm", "layernorm_backward", "gemm_int4", "gemm_mxfp8", "gemm_nvfp4")
        ),
        "tilelang#2381",
        "more than 16 terms, no multiple of 16",
        arithmetic=tail_dropped(16),
    ),
    Suspect(
        "nothing_to_sum_unwritten",
        "unwritten",
        "with K = 0 the output is left as it was",
        ("gemm", "linear"),
        "cutlass#2674, flashinfer#4724",
        "K = 0, and memory that is not zero",
        results=_nothing_summed,
    ),
)
