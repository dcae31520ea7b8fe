"""Faults that wait for one thing: a row or a label beyond a limit, a second block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest import HONEST
from .honest_elementwise import gelu
from .honest_gemm import gemm
from .honest_loss import cross_entropy
from .honest_merge import merge_states
from .honest_moe import moe_route
from .honest_norm import rmsnorm
from .honest_softmax import softmax_shifted
from .numerics import rounded_to

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


def carried_in(dtype: torch.dtype, block: int, weights: Tensor) -> Tensor:
    """What one block of columns hands to the next is rounded to ``dtype``; a row of one block is right."""
    total = torch.zeros(weights.shape[0], 1)
    for part in weights.split(block, dim=1):
        total = rounded_to(dtype, total) + part.sum(dim=1, keepdim=True)
    return total


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
            f"softmax_carries_{str(dtype)[6:]}",
            f"softmax_shifted-{twin}",
            sum_rows=partial(carried_in, dtype, 512),
        )
        for dtype, twin in ((torch.float16, "bfloat16"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16"))
    ),
)
