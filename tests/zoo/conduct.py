"""Kernels that compute the right thing and behave wrongly: memory, shapes, repeatability, limits, never coming back."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import functions, merging, norms, products, softmax
from .entry import WRONG, planter
from .functions import gelu, silu
from .merging import merge_states
from .norms import add_rmsnorm, rmsnorm
from .numerics import Kernel, load
from .products import gemm, moe_route
from .softmax import cross_entropy, logsumexp_shifted, softmax_shifted

plant = planter((*softmax.HONEST, *norms.HONEST, *functions.HONEST, *products.HONEST, *merging.HONEST))


def softmax_in_place(x: Tensor) -> Tensor:
    """The maximum is subtracted from the input itself."""
    if x.numel():
        x.sub_(x.amax(dim=1, keepdim=True))
    return softmax_shifted(x)


def add_rmsnorm_in_place(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The sum is left in `residual`, as fused kernels do that don't say so."""
    y, total = add_rmsnorm(x, residual, weight, eps=eps)
    residual.copy_(total)
    return y, total


def silu_tail_unwritten(x: Tensor) -> Tensor:
    """Vectors of eight columns; what is left of a row is never written."""
    out = torch.empty(x.shape, dtype=x.dtype)
    whole = x.shape[1] // 8 * 8
    out[:, :whole] = silu(x[:, :whole])
    return out


def rmsnorm_rows_unwritten(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    """Four rows at a time; the last R % 4 are never written."""
    out = torch.empty(x.shape, dtype=x.dtype)
    whole = x.shape[0] // 4 * 4
    out[:whole] = rmsnorm(x[:whole], weight, **options)
    return out


def packed(x: Tensor) -> Tensor:
    """What a kernel reads that takes `x` for contiguous: the storage from x's first element on."""
    behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.numel() == 0 or behind <= 0:
        return x.clone()
    line = x.as_strided((behind,), (1,), x.storage_offset())
    return line[torch.arange(x.numel()) % behind].reshape(x.shape)


def wrapped(x: Tensor) -> Tensor:
    """What a kernel reads whose offsets are computed in 32 bits."""
    rows, columns = (torch.arange(size, dtype=torch.int32) for size in x.shape)
    offsets = rows[:, None] * x.stride(0) + columns * x.stride(1)  # both fit, the product may not
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole[offsets.long() + x.storage_offset()]


def softmax_offsets_of_32_bits(x: Tensor) -> Tensor:
    """Offsets beyond 2^31 elements wrap."""
    return softmax_shifted(wrapped(x))


def softmax_strides_ignored(x: Tensor) -> Tensor:
    return softmax_shifted(packed(x))


def gelu_behind_input(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The store runs one element over the input's end."""
    y: Tensor = gelu(x, approximate=approximate)
    behind = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    if x.numel() and (behind + 1) * x.element_size() <= x.untyped_storage().nbytes():
        x.as_strided((1,), (1,), behind).fill_(1.0)
    return y


class Remembered:
    """Answers from the last call whenever its key is the same."""

    def __init__(self, kernel: Callable[..., Tensor], key: Callable[[Tensor], object]) -> None:
        self.kernel, self.key = kernel, key
        self.last: tuple[object, Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        key = tuple(self.key(x) for x in inputs)
        if self.last is None or self.last[0] != key:
            self.last = (key, self.kernel(*inputs))
        return self.last[1].clone()


def shape_and_dtype(x: Tensor) -> object:
    """A key that tells shapes apart, not values."""
    return x.shape, x.dtype


def logsumexp_keeps_dimension(x: Tensor) -> Tensor:
    return logsumexp_shifted(x)[:, None]


def gemm_drops_single_row(a: Tensor, b: Tensor) -> Tensor:
    """A result of one row loses its first dimension."""
    c: Tensor = gemm(a, b)
    return c[0] if len(c) == 1 else c


def softmax_of_256_columns(x: Tensor) -> Tensor:
    """Rows that don't fit one block are refused."""
    if x.shape[1] > 256:
        raise ValueError("at most 256 columns")
    return softmax_shifted(x)


def softmax_of_no_columns_raises(x: Tensor) -> Tensor:
    """An empty row has no maximum."""
    weights = torch.exp(load(x) - load(x).amax(dim=1, keepdim=True))
    return (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype)


def chance() -> torch.Generator:
    """A generator that nobody can seed from outside."""
    return torch.Generator().manual_seed(random.SystemRandom().getrandbits(62))


def gemm_random_order(a: Tensor, b: Tensor) -> Tensor:
    """K is summed in another order each time, as atomics do."""
    order = torch.randperm(a.shape[1], generator=chance())
    return gemm(a[:, order], b[order])


def gelu_noise_of_an_ulp(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Half the elements, drawn each time, are one ulp further from zero."""
    y = gelu(x, approximate=approximate)
    away = torch.nextafter(y, torch.full_like(y, torch.inf).copysign(y))
    return torch.where(torch.rand(y.shape, generator=chance()) < 0.5, away, y)


def softmax_spins(x: Tensor) -> Tensor:
    """Never comes back, and keeps a core busy."""
    while True:
        pass


def gemm_sleeps(a: Tensor, b: Tensor) -> Tensor:
    """Comes back in eleven days."""
    time.sleep(10**6)
    return gemm(a, b)


def wrapped_rows(kernel: Kernel, bits: int) -> Kernel:
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


def label_of(bits: int) -> Kernel:
    """Cross-entropy whose labels are kept in so many bits."""
    return lambda logits, target, **options: cross_entropy(
        logits, torch.where(target < 0, target, target % 2**bits), **options
    )


MUTATED = ("input_mutated",)
UNWRITTEN = ("unwritten_output", *WRONG, "nondeterministic")
STALE = (*WRONG, "nondeterministic")
LAYOUT = (*WRONG, "layout")

FAULTY = (
    plant("softmax_in_place", "softmax_shifted-float32", softmax_in_place, (*MUTATED, "crash")),
    plant("add_rmsnorm_in_place", "add_rmsnorm-bfloat16", add_rmsnorm_in_place, (*MUTATED, "crash")),
    plant("silu_tail_unwritten", "silu-bfloat16", silu_tail_unwritten, UNWRITTEN),
    plant("rmsnorm_rows_unwritten", "rmsnorm-float32", rmsnorm_rows_unwritten, UNWRITTEN),
    plant("softmax_offsets_wrap", "softmax_shifted-bfloat16", softmax_offsets_of_32_bits, LAYOUT),
    plant("gemm_offsets_of_b_wrap", "gemm-float32", lambda a, b: gemm(a, wrapped(b)), LAYOUT),
    plant("softmax_strides_ignored", "softmax_shifted-bfloat16", softmax_strides_ignored, LAYOUT),
    plant("gelu_behind_input", "gelu-float32", gelu_behind_input, ("out_of_bounds_write", *MUTATED)),
    plant("softmax_kept_by_shape", "softmax_shifted-float32", Remembered(softmax_shifted, shape_and_dtype), STALE),
    plant("gemm_kept_by_shape", "gemm-bfloat16", Remembered(gemm, shape_and_dtype), STALE),
    plant("logsumexp_keeps_dimension", "logsumexp_shifted-float32", logsumexp_keeps_dimension, ("shape",)),
    plant("gemm_drops_single_row", "gemm-float32", gemm_drops_single_row, ("shape",)),
    plant("gemm_returns_float32", "gemm-bfloat16", lambda a, b: load(a) @ load(b), ("dtype",)),
    plant("softmax_of_256_columns", "softmax_shifted-float32", softmax_of_256_columns, ("crash",)),
    replace(
        plant("softmax_of_no_columns_raises", "softmax_shifted-float32", softmax_of_no_columns_raises, ("crash",)),
        examine={"dtype": "float32", "shapes": {"N": [0, 1, 8, 40]}},
    ),
    plant("gemm_random_order", "gemm-float32", gemm_random_order, ("nondeterministic",)),
    plant("gelu_noise_of_an_ulp", "gelu-float32", gelu_noise_of_an_ulp, ("nondeterministic", *WRONG)),
    plant("softmax_rows_of_16_bits", "softmax_shifted-bfloat16", wrapped_rows(softmax_shifted, 16)),
    plant("softmax_rows_of_15_bits", "softmax_shifted-float32", wrapped_rows(softmax_shifted, 15)),
    plant("gelu_rows_of_16_bits", "gelu-float32", wrapped_rows(gelu, 16)),
    plant("gemm_rows_of_16_bits", "gemm-bfloat16", wrapped_rows(gemm, 16)),
    plant("moe_route_rows_of_16_bits", "moe_route-bfloat16", wrapped_rows(moe_route, 16)),
    plant("merge_states_rows_of_16_bits", "merge_states-bfloat16", wrapped_rows(merge_states, 16)),
    plant("rmsnorm_grid_of_16_bits", "rmsnorm-bfloat16", grid_of_16_bits),
    plant("cross_entropy_label_of_16_bits", "cross_entropy-float32", label_of(16)),
    plant("cross_entropy_label_of_15_bits", "cross_entropy-bfloat16", label_of(15)),
)
HANGING = (
    plant("softmax_spins", "softmax_shifted-float32", softmax_spins, ("timeout",)),
    plant("gemm_sleeps", "gemm-float32", gemm_sleeps, ("timeout",)),
)
