"""Faults of any kind of kernel: stores, tails, layouts, narrow formats, special values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.formats.rounding import Mode, Overflow, round_to
from assay.golden.inputs.values import torch_dtype
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import (
    TF32,
    Inputs,
    Results,
    columns_beyond,
    every,
    first_dtype,
    is_wide,
    last_row,
    narrow_accumulator,
    out_dtype,
    real_inputs,
    rounded,
    tail_dropped,
    zero_where,
)
from assay.verify.explanation.fault_models.ops import (
    gives_numbers,
    has_columns,
    has_odd_rows,
    has_ragged_columns,
    keeps_intermediates,
    stores_freely,
    sums,
    sums_nothing,
    sums_tails,
    takes_numbers,
)
from assay.verify.explanation.fault_models.single import unwritten

Tensor = torch.Tensor
_BLOCKS = (1, 4, 128)  # terms between two roundings of a sum, besides the usual 16


def _stored(mode: Mode, overflow: Overflow = "inf") -> Callable[[Tensor, str], Tensor]:
    """Return a store that rounds in another mode; NaN is kept, and so are infinities unless results saturate."""

    def store(result: Tensor, dtype: str) -> Tensor:
        kept = result.isnan() | (result.isinf() & (overflow == "inf"))
        stored = round_to(result.double(), dtype, mode, overflow)
        return torch.where(kept, result.double(), stored).to(torch_dtype(dtype))

    return store


def _flushed(result: Tensor, dtype: str) -> Tensor:
    stored = result.to(torch_dtype(dtype))
    return torch.where(stored.abs() < torch.finfo(stored.dtype).tiny, 0.0, stored)


def _read_by(strides: Callable[[Tensor], Sequence[int]]) -> Inputs:
    """Read every tensor of numbers or packed codes with other strides, if its memory is large enough."""

    def read(x: Tensor) -> Tensor:
        taken = strides(x)
        span = sum((size - 1) * stride for size, stride in zip(x.shape, taken, strict=True)) + 1 if x.numel() else 0
        fits = x.storage_offset() + span <= x.untyped_storage().nbytes() // x.itemsize
        return x.as_strided(x.shape, taken) if fits else x

    def inputs(values: Tensors, case: Case) -> Tensors:
        plain = [tensor.name for tensor in case.signature.tensors if tensor.role in ("real", "bits")]
        return values | {name: read(values[name]) for name in plain if values[name].dim()}

    return inputs


def _left(mask: Callable[[tuple[int, ...]], Tensor]) -> Results:
    """Leave results unwritten where ``mask(shape)`` holds."""
    return every(lambda xp, x: unwritten(xp, mask(tuple(x.shape)), x) if len(x.shape) else x)


def _into_next_row(xp: Any, x: Any) -> Any:
    """Overwrite each row's first element with the last of the row before, for rows of an odd length."""
    if len(x.shape) < 2 or x.shape[-1] % 2 == 0 or x.shape[-1] < 3 or x.shape[-2] < 2:
        return x
    head = xp.concatenate([x[..., :1, :1], x[..., :-1, -1:]], len(x.shape) - 2)
    return xp.concatenate([head, x[..., 1:]], len(x.shape) - 1)


def _nothing_summed(xp: Any, result: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    """Leave the results unwritten if there is nothing to sum."""
    reduction = case.definition.reduction
    if reduction is None or case.sizes[reduction.over]:
        return result
    return tuple(unwritten(xp, torch.ones(x.shape, dtype=torch.bool), x) for x in result)


def _stored_by_way_of(format: str, other: str, what_else: str = "") -> FaultModel:
    dtype = torch_dtype(format)
    return FaultModel(f"stored_by_way_of_{format}", "store",
        f"results pass through {format} on the way to the output{what_else}", takes_numbers, emulated=True,
        applies=out_dtype("float32", other),
        store=lambda result, out: result.to(dtype).to(torch_dtype(out)))  # fmt: skip


def _computed_in(format: str, origin: str) -> FaultModel:
    return FaultModel(f"computed_in_{format}", "precision",
        f"intermediates are kept in {format} rather than float32", keeps_intermediates, origin,
        applies=first_dtype(format), arithmetic=type("InFormat", (), {"dtype": torch_dtype(format)}),
        contract={"compute": format})  # fmt: skip


def _accumulated_in(format: str, origin: str, needs: str) -> FaultModel:
    return FaultModel(f"accumulated_in_{format}", "accumulator", f"sums are kept in {format}", sums, origin, needs,
        arithmetic=narrow_accumulator(format), contract={"accumulate": format},
        like=tuple(narrow_accumulator(format, block) for block in _BLOCKS))  # fmt: skip


FAULT_MODELS = (
    FaultModel("truncating_store", "store", "the store truncates instead of rounding to nearest", stores_freely,
        "tt-metal#57408", applies=out_dtype("bfloat16", "float16"), store=_stored("toward_zero"),
        contract={"rounding": "toward_zero"}),
    FaultModel("store_rounds_ties_away", "store", "the store rounds ties away from zero instead of to even", (),
        needs="results halfway between two numbers of the format", applies=out_dtype("bfloat16", "float16"),
        store=_stored("nearest_away"), emulated=True),
    FaultModel("saturating_store", "store",
        "the store saturates: results beyond the format's range become its largest number", (),
        needs="results beyond the range of the format", applies=out_dtype("float16", "bfloat16"),
        store=_stored("nearest", "saturate"), contract={"overflow": "saturate"}),
    _stored_by_way_of("float16", "bfloat16", ": overflow at 65504, and another rounding"),
    _stored_by_way_of("bfloat16", "float16"),
    FaultModel("last_row_unwritten", "unwritten", "the last row is never written", gives_numbers,
        "vllm-ascend#9992, sglang#24850", "fresh memory that doesn't hold zeros, nor the last call's answer",
        results=_left(last_row)),
    FaultModel("last_columns_unwritten", "unwritten",
        "the columns beyond the last whole vector of 8 are never written", has_ragged_columns, "Megatron#132",
        "a number of columns that is no multiple of 8, and memory that is not zero", results=_left(columns_beyond(8))),
    FaultModel("columns_beyond_tile_zero", "tail", "the columns beyond the last whole tile of 16 are zero", has_columns,
        needs="more than 16 columns, no multiple of 16", results=every(zero_where(columns_beyond(16)))),
    FaultModel("last_row_zero", "tail", "the last row is zero", gives_numbers, needs="more than one row",
        results=every(zero_where(last_row))),
    FaultModel("tile_dropped", "tail", "the second tile of 16 columns is never computed, and zero", has_columns,
        "KernelBench#165", "more than 16 columns",
        results=every(zero_where(lambda shape: torch.arange(shape[-1]) // 16 == 1))),
    FaultModel("written_into_next_row", "store",
        "vectorised stores run over the end of a row and overwrite the start of the next", has_odd_rows, "aiter#5290",
        "an odd number of columns, and two rows or more", results=every(_into_next_row)),
    FaultModel("strides_ignored", "layout", "inputs are read as if they were contiguous", gives_numbers,
        "flash-attention#2541, #355, xformers#282", "an input that is a transposed, sliced or expanded view",
        inputs=_read_by(lambda x: torch.empty(x.shape, device="meta").stride())),
    FaultModel("last_stride_taken_for_one", "layout", "the stride of the last axis is taken to be one", gives_numbers,
        "LightLLM#1467", "an input whose last stride is not one", inputs=_read_by(lambda x: (*x.stride()[:-1], 1))),
    FaultModel("tail_of_sum_dropped", "tail",
        "sums and products leave out what is beyond the last whole block of 16", sums_tails, "tilelang#2381",
        "more than 16 terms, no multiple of 16", arithmetic=tail_dropped(16)),
    FaultModel("nothing_to_sum_unwritten", "unwritten", "with K = 0 the output is left as it was", sums_nothing,
        "cutlass#2674, flashinfer#4724", "K = 0, and memory that is not zero", results=_nothing_summed),
    FaultModel("flushed_subnormals", "special values", "subnormal results are flushed to zero", takes_numbers,
        "pytorch#125557", "results below the least normal number", store=_flushed, contract={"subnormals": "flush"}),
    FaultModel("nan_read_as_zero", "special values", "NaN in an input is dropped, as fmax and fmin do", takes_numbers,
        "tilelang#3024, tvm#19518", "one NaN among the inputs",
        inputs=real_inputs(lambda x: torch.where(x.isnan(), 0.0, x))),
    FaultModel("inputs_in_bfloat16", "precision", "inputs are rounded to bfloat16 before anything is computed",
        takes_numbers, applies=is_wide, inputs=real_inputs(rounded("bfloat16"))),
    FaultModel("inputs_in_tf32", "precision", f"float32 inputs go through the tensor cores as TF32: {TF32}", (),
        "triton#10176, jax#23182", applies=first_dtype("float32"), inputs=real_inputs(rounded("tf32"))),
    _computed_in("bfloat16", "mlir-air#1679"),
    _computed_in("float16", "onnxruntime#29034"),
    _accumulated_in("float16", "llama.cpp#17746, #13991, jax#26134", "sums of many terms, or beyond 65504"),
    _accumulated_in("bfloat16", "Liger#950, TRT-LLM#16753", "sums of many terms"),
    FaultModel("infinity_read_as_largest", "special values", "infinities are clamped to the largest number", (),
        needs="an infinity among the inputs",
        inputs=real_inputs(lambda x: torch.where(x.isinf(), x.sign() * torch.finfo(x.dtype).max, x))),
)  # fmt: skip
