"""Faults of narrow formats and special values, which kernels of any kind have."""

from __future__ import annotations

import torch

from assay.golden.inputs.values import torch_dtype
from assay.verify.suspects.common import CODES_IN, LIMITLESS, NEVER_SUBNORMAL, PLAIN, ROUNDED_ONCE, SUMS
from assay.verify.suspects.mechanisms import (
    first_dtype,
    is_wide,
    narrow_accumulator,
    real_inputs,
    rounded,
)
from assay.verify.suspects.suspect import Suspect

Tensor = torch.Tensor


def _flushed(result: Tensor, dtype: str) -> Tensor:
    stored = result.to(torch_dtype(dtype))
    return torch.where(stored.abs() < torch.finfo(stored.dtype).tiny, 0.0, stored)


_BLOCKS = (1, 4, 128)  # of terms between two roundings of a sum, beside the usual 16


class _InBfloat16:
    dtype = torch.bfloat16


class _InFloat16:
    dtype = torch.float16


SUSPECTS = (
    Suspect(
        "flushed_subnormals",
        "special values",
        "subnormal results are flushed to zero",
        tuple(name for name in PLAIN if name not in NEVER_SUBNORMAL),
        "pytorch#125557",
        "results below the least normal number",
        store=_flushed,
        contract={"subnormals": "flush"},
    ),
    Suspect(
        "nan_read_as_zero",
        "special values",
        "NaN in an input is dropped, as fmax and fmin do",
        PLAIN,
        "tilelang#3024, tvm#19518",
        "one NaN among the inputs",
        inputs=real_inputs(lambda x: torch.where(x.isnan(), 0.0, x)),
    ),
    Suspect(
        "inputs_in_bfloat16",
        "precision",
        "inputs are rounded to bfloat16 before anything is computed",
        PLAIN,
        "common slip",
        applies=is_wide,
        inputs=real_inputs(rounded("bfloat16")),
    ),
    Suspect(
        "inputs_in_tf32",
        "precision",
        "float32 inputs go through the tensor cores as TF32",
        ("gemm", "linear", "gemm_2to4", "gemm_int4", "moe", "attention", "attention_varlen", "attention_decode"),
        "triton#10176, jax#23182",
        applies=first_dtype("float32"),
        inputs=real_inputs(rounded("tf32")),
    ),
    Suspect(
        "computed_in_bfloat16",
        "precision",
        "intermediates are kept in bfloat16 rather than float32",
        tuple(name for name in PLAIN if name not in ROUNDED_ONCE),
        "mlir-air#1679",
        applies=first_dtype("bfloat16"),
        arithmetic=_InBfloat16,
        contract={"compute": "bfloat16"},
    ),
    Suspect(
        "computed_in_float16",
        "precision",
        "intermediates are kept in float16 rather than float32",
        tuple(name for name in PLAIN if name not in ROUNDED_ONCE),
        "onnxruntime#29034",
        applies=first_dtype("float16"),
        arithmetic=_InFloat16,
        contract={"compute": "float16"},
    ),
    Suspect(
        "accumulated_in_float16",
        "accumulator",
        "sums are kept in float16",
        (*SUMS, *CODES_IN),
        "llama.cpp#17746, #13991, jax#26134",
        "sums of many terms, or beyond 65504",
        arithmetic=narrow_accumulator("float16"),
        like=tuple(narrow_accumulator("float16", block) for block in _BLOCKS),
        contract={"accumulate": "float16"},
    ),
    Suspect(
        "accumulated_in_bfloat16",
        "accumulator",
        "sums are kept in bfloat16",
        (*SUMS, *CODES_IN),
        "Liger#950, TRT-LLM#16753",
        "sums of many terms",
        arithmetic=narrow_accumulator("bfloat16"),
        like=tuple(narrow_accumulator("bfloat16", block) for block in _BLOCKS),
        contract={"accumulate": "bfloat16"},
    ),
    Suspect(
        "infinity_read_as_largest",
        "special values",
        "infinities are clamped to the largest number",
        ("gemm", "linear", *LIMITLESS),
        "common slip",
        "an infinity among the inputs",
        inputs=real_inputs(lambda x: torch.where(x.isinf(), x.sign() * torch.finfo(x.dtype).max, x)),
    ),
)
