"""Faulty GEMM kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_gemm import GEMM, gemm, gemm_blocked, linear
from .numerics import (
    load,
    round_bits,
    round_via,
    store_saturated,
    store_truncated,
    store_via_12_bits,
    store_via_float16,
)

plant = planter(GEMM)
NUMBERS = ("float32", "bfloat16", "float16")


def whole_blocks_of_32(length: int) -> int:
    """The tail of K is dropped."""
    return length // 32 * 32


def gemm_splits_add_to_rounded_output(a: Tensor, b: Tensor) -> Tensor:
    """Split-K whose second half is added to an output that the first half already rounded."""
    middle = a.shape[1] // 2
    first = gemm(a[:, :middle], b[:middle])
    return (load(first) + load(a[:, middle:]) @ load(b[middle:])).to(a.dtype)


def gemm_rows_and_columns_confused(a: Tensor, b: Tensor) -> Tensor:
    """A square b is read by columns."""
    return gemm(a, b.T if b.shape[0] == b.shape[1] else b)


def linear_rounds_before_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product is rounded to the output dtype before the bias is added."""
    return (load((load(x) @ load(weight).T).to(x.dtype)) + load(bias)).to(x.dtype)


FAULTY_GEMM: tuple[Faulty, ...] = (
    *(
        plant(
            "gemm_float16_accumulator",
            f"gemm_blocked-{dtype}",
            partial(gemm_blocked, block=16, accumulator_stage=round_via(torch.float16)),
        )
        for dtype in NUMBERS
    ),
    *(
        plant(
            "gemm_bfloat16_accumulator",
            f"gemm_blocked-{dtype}",
            partial(gemm_blocked, block=32, accumulator_stage=round_via(torch.bfloat16)),
        )
        for dtype in NUMBERS
    ),
    *(
        plant(
            "gemm_14_bit_accumulator",
            f"gemm_blocked-{dtype}",
            partial(gemm_blocked, block=32, accumulator_stage=partial(round_bits, bits=14)),
        )
        for dtype in NUMBERS
    ),
    plant("gemm_tf32", "gemm-float32", partial(gemm, operand_stage=partial(round_bits, bits=11))),
    plant("gemm_bfloat16_operands", "gemm-float32", partial(gemm, operand_stage=round_via(torch.bfloat16))),
    *(
        plant("gemm_truncating_store", f"gemm-{dtype}", partial(gemm, store=store_truncated))
        for dtype in ("bfloat16", "float16")
    ),
    plant("gemm_rounds_via_float16", "gemm-bfloat16", partial(gemm, store=store_via_float16)),
    plant("gemm_rounds_via_12_bits", "gemm-bfloat16", partial(gemm, store=store_via_12_bits)),
    plant("gemm_saturates", "gemm-float16", partial(gemm, store=store_saturated)),
    *(
        plant("gemm_tail_dropped", f"gemm_blocked-{dtype}", partial(gemm_blocked, block=32, length=whole_blocks_of_32))
        for dtype in NUMBERS
    ),
    plant("gemm_splits_add_to_rounded_output", "gemm_split_k-bfloat16", gemm_splits_add_to_rounded_output),
    plant("gemm_square_transposed", "gemm-float32", gemm_rows_and_columns_confused),
    *(plant("linear_bias_ignored", f"linear-{dtype}", partial(linear, bias_count=0)) for dtype in NUMBERS),
    plant("linear_bias_twice", "linear-bfloat16", partial(linear, bias_count=2)),
    plant("linear_rounds_before_bias", "linear-float16", linear_rounds_before_bias),
)
