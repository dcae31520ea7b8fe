"""Faults that wait for one thing: a row, a label or a scale beyond a limit, numbers of a size, a second block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest import HONEST
from .honest_elementwise import gelu
from .honest_gemm import gemm
from .honest_loss import cross_entropy
from .honest_merge import Steps as MergeSteps
from .honest_merge import merge_states
from .honest_microscaling import HONEST_STEPS, gemm_mxfp8
from .honest_moe import moe_route
from .honest_norm import rmsnorm
from .honest_quantized import gemm_int4_rounded_weights, group_of, round_weights, unpack
from .honest_softmax import softmax_shifted
from .honest_varlen import HONEST_STEPS as VARLEN_STEPS
from .honest_varlen import attention_varlen, bounds
from .numerics import load, round_via, rounded_to

plant = planter(HONEST)


def wrapped_rows(kernel: Callable[..., Any], bits: int) -> Callable[..., Any]:
    """``kernel`` with a row's number kept in so many bits: further rows read from the first on."""

    def wrapping(*tensors: Tensor, **options: Any) -> Any:
        results = kernel(*tensors, **options)
        several = isinstance(results, tuple)
        read = [y[torch.arange(len(y)) % 2**bits] for y in (results if several else (results,))]
        return tuple(read) if several else read[0]

    return wrapping


def grid_of_16_bits(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    """A row for each program along a grid's second dimension, which ends at 65,535."""
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    y[:65535] = rmsnorm(x[:65535], weight, **options)
    return y


def label_of(bits: int) -> Callable[..., Tensor]:
    """Labels are kept in so many bits."""

    def wrapping(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        return cross_entropy(logits, torch.where(target < 0, target, target % 2**bits), **options)

    return wrapping


def negligible_beyond(difference: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A state whose weight is so much less than the other's counts for nothing."""
    least = torch.exp(torch.tensor(-difference))

    def weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(a < least * b, 0.0, a), torch.where(b < least * a, 0.0, b)

    return weights


def code_zero_is_zero(scale: Tensor) -> Tensor:
    """Codes are moved into a float32's exponent: zero becomes the number zero."""
    exponent = scale.contiguous().view(torch.uint8).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def flushed(x: Tensor) -> Tensor:
    """Subnormal float32 numbers are taken for zero."""
    values = load(x)
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0.0, values)


def rmsnorm_flushes_input(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    """Subnormal numbers are read as zero."""
    return rmsnorm(flushed(x), weight.float(), **options).to(x.dtype)


def rmsnorm_flushes_weight(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    """Subnormal weights are read as zero."""
    return rmsnorm(x.float(), flushed(weight), **options).to(x.dtype)


def carried_in(dtype: torch.dtype, block: int, weights: Tensor) -> Tensor:
    """What one block of columns hands to the next is rounded to ``dtype``; a row of one block is right."""
    total = torch.zeros(weights.shape[0], 1)
    for part in weights.split(block, dim=1):
        total = rounded_to(dtype, total) + part.sum(dim=1, keepdim=True)
    return total


def int4_partial_sums(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """The sum of each group is rounded to x's dtype before it is added."""
    if x.shape[1] == 0:
        return gemm_int4_rounded_weights(x, qweight, scales, zeros, packing=packing)
    codes, zero_points = unpack(qweight, zeros, packing)
    group, width = group_of(x.shape[1], scales.shape[0]), x.shape[1] // scales.shape[0]
    weight = round_weights((codes - zero_points[group]) * load(scales)[group], x.dtype)
    total = torch.zeros(x.shape[0], scales.shape[1])
    for start in range(0, x.shape[1], width):
        part = load(x[:, start : start + width]) @ weight[start : start + width]
        total = total + rounded_to(x.dtype, part)
    return total.to(x.dtype)


def first_512_keys(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Keys beyond a sequence's 512th are never visited."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last, first + 512)


FAULTY_LIMITS: tuple[Faulty, ...] = (
    plant("softmax_rows_of_16_bits", "softmax_shifted-bfloat16", wrapped_rows(softmax_shifted, 16)),
    plant("softmax_rows_of_15_bits", "softmax_shifted-float32", wrapped_rows(softmax_shifted, 15)),
    plant("gelu_rows_of_16_bits", "gelu-float32", wrapped_rows(gelu, 16)),
    plant("gemm_rows_of_16_bits", "gemm-bfloat16", wrapped_rows(gemm, 16)),
    plant("moe_route_rows_of_16_bits", "moe_route-bfloat16", wrapped_rows(moe_route, 16)),
    plant("merge_states_rows_of_16_bits", "merge_states-bfloat16", wrapped_rows(merge_states, 16)),
    plant("rmsnorm_grid_of_16_bits", "rmsnorm-bfloat16", grid_of_16_bits),
    plant("cross_entropy_label_of_16_bits", "cross_entropy-float32", label_of(16)),
    plant("cross_entropy_label_of_15_bits", "cross_entropy-bfloat16", label_of(15)),
    *(
        plant(
            f"merge_states_negligible_beyond_{difference}",
            f"merge_states-{dtype}",
            partial(merge_states, steps=MergeSteps(weights=negligible_beyond(difference))),
        )
        for difference in (8, 12)
        for dtype in ("float32", "bfloat16")
    ),
    plant(
        "gemm_mxfp8_code_zero", "gemm_mxfp8", partial(gemm_mxfp8, steps=replace(HONEST_STEPS, scale=code_zero_is_zero))
    ),
    *(
        plant(f"rmsnorm_flushes_{what}", f"rmsnorm-{dtype}", kernel)
        for what, kernel in (("input", rmsnorm_flushes_input), ("weight", rmsnorm_flushes_weight))
        for dtype in ("float32", "bfloat16")
    ),
    plant("softmax_by_float16", "softmax_shifted-bfloat16", partial(softmax_shifted, prepare=round_via(torch.float16))),
    *(
        plant(
            f"softmax_carries_{str(dtype)[6:]}",
            f"softmax_shifted-{twin}",
            partial(softmax_shifted, sum_rows=partial(carried_in, dtype, 512)),
        )
        for dtype, twin in ((torch.float16, "bfloat16"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16"))
    ),
    plant("gemm_int4_partial_sums", "gemm_int4_rounded_weights-bfloat16", int4_partial_sums),
    plant(
        "attention_varlen_512_keys",
        "attention_varlen-bfloat16",
        partial(attention_varlen, steps=replace(VARLEN_STEPS, key_bounds=first_512_keys)),
    ),
)
