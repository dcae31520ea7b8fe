"""Honest products of microscaled and of two-to-four sparse operands."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import keep, load

MX, NV = 32, 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Out = Callable[[Tensor], Tensor]


def spread(scale: Tensor, block: int) -> Tensor:
    """Each scale of the last axis for as many neighbours."""
    return scale.repeat_interleave(block, dim=-1)


def unpack(packed: Tensor) -> Tensor:
    """Codes [rows, K]: the low nibble is that of the even place."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], 2 * packed.shape[1])


def value_of_e2m1(codes: Tensor) -> Tensor:
    """The numbers that the codes stand for."""
    magnitude = E2M1[(codes & 7).long()]
    return torch.where(codes > 7, -magnitude, magnitude)


@dataclass(frozen=True)
class Steps:
    """What the kernels are made of; a fault replaces one."""

    value: Callable[[Tensor], Tensor] = load
    scale: Callable[[Tensor], Tensor] = load
    scale_a: Callable[[Tensor], Tensor] = keep
    scale_b: Callable[[Tensor], Tensor] = keep
    spread: Callable[[Tensor, int], Tensor] = spread
    unpack: Callable[[Tensor], Tensor] = unpack
    number: Callable[[Tensor], Tensor] = value_of_e2m1
    blocks: Callable[[int], int] = int


HONEST_STEPS = Steps()


def dequantised(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], block: int, steps: Steps) -> Tensor:
    """left[M,K] right[N,K]^T, both times their scales first."""
    left, right = (x * steps.spread(s, block)[:, : x.shape[1]] for x, s in zip((left, right), scales, strict=True))
    return left @ right.T


def by_blocks(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], block: int, steps: Steps) -> Tensor:
    """A product of codes for each block along K, times the block's scales, added to a float32 accumulator."""
    total = torch.zeros(left.shape[0], right.shape[0])
    for number in range(steps.blocks(scales[0].shape[1])):
        places = slice(number * block, (number + 1) * block)
        part = left[:, places] @ right[:, places].T
        total = total + part * (scales[0][:, number, None] * scales[1][:, number])
    return total


Product = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], int, Steps], Tensor]


def gemm_mxfp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    product: Product = dequantised,
    steps: Steps = HONEST_STEPS,
) -> Tensor:
    """(a scale_a) (b scale_b)."""
    scales = steps.scale_a(steps.scale(scale_a)), steps.scale_b(steps.scale(scale_b).T.contiguous())
    return product(steps.value(a), steps.value(b).T.contiguous(), scales, MX, steps).to(torch.bfloat16)


def gemm_mxfp8_in_bfloat16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Numbers times their scales are numbers of bfloat16, as its tensor cores take them."""
    left = (load(a) * spread(load(scale_a), MX)).to(torch.bfloat16)
    right = (load(b).T * spread(load(scale_b).T, MX)).to(torch.bfloat16)
    return (load(left) @ load(right).T).to(torch.bfloat16)


def gemm_nvfp4(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    global_a: Tensor,
    global_b: Tensor,
    *,
    product: Product = dequantised,
    steps: Steps = HONEST_STEPS,
) -> Tensor:
    """Codes times the scales of their blocks; the result times both multipliers."""
    left, right = steps.number(steps.unpack(a)), steps.number(steps.unpack(b))
    scales = steps.scale_a(load(scale_a)), steps.scale_b(load(scale_b))
    return (product(left, right, scales, NV, steps) * (global_a * global_b)).to(torch.bfloat16)


def gemm_nvfp4_early(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor
) -> Tensor:
    """The multipliers are taken into the scales of the blocks."""
    scales = load(scale_a) * global_a, load(scale_b) * global_b
    left, right = (value_of_e2m1(unpack(x)) for x in (a, b))
    return dequantised(left, right, scales, NV, HONEST_STEPS).to(torch.bfloat16)


def places_of(index: Tensor) -> Tensor:
    """The row of b that each stored value meets."""
    return torch.arange(index.shape[1]) // 2 * 4 + index.long()


def filled_in(values: Tensor, places: Tensor, b: Tensor) -> Tensor:
    """A dense product, zeros put where nothing is stored."""
    dense = torch.zeros(values.shape[0], b.shape[0]).scatter_add_(1, places, values)
    return dense @ b


def gathered(values: Tensor, places: Tensor, b: Tensor) -> Tensor:
    """For each row of values its rows of b."""
    return torch.stack([row @ b[place] for row, place in zip(values, places, strict=True)])


def in_slices(values: Tensor, places: Tensor, b: Tensor, width: int = 32) -> Tensor:
    """A dense product for each slice of K, added to a float32 accumulator."""
    total = torch.zeros(values.shape[0], b.shape[1])
    for start in range(0, b.shape[0], width):
        stored = slice(start // 2, (start + width) // 2)
        total = total + filled_in(values[:, stored], places[:, stored] - start, b[start : start + width])
    return total


@dataclass(frozen=True)
class SparseSteps:
    """What the sparse kernels are made of; a fault replaces one."""

    places: Callable[[Tensor], Tensor] = places_of
    values: Callable[[Tensor], Tensor] = keep
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = filled_in


def gemm_2to4(values: Tensor, index: Tensor, b: Tensor, *, steps: SparseSteps = SparseSteps()) -> Tensor:
    """The product of a two-to-four sparse matrix."""
    if not values.shape[0]:
        return torch.zeros(0, b.shape[1], dtype=values.dtype)
    return steps.product(steps.values(load(values)), steps.places(index), load(b)).to(values.dtype)


ALL = ("float32", "bfloat16", "float16")
MICROSCALING: tuple[Entry, ...] = (
    Entry("gemm_mxfp8", "gemm_mxfp8", gemm_mxfp8, {}),
    Entry("gemm_mxfp8_by_blocks", "gemm_mxfp8", partial(gemm_mxfp8, product=by_blocks), {}),
    Entry("gemm_mxfp8_in_bfloat16", "gemm_mxfp8", gemm_mxfp8_in_bfloat16, {}),
    Entry("gemm_nvfp4", "gemm_nvfp4", gemm_nvfp4, {}),
    Entry("gemm_nvfp4_by_blocks", "gemm_nvfp4", partial(gemm_nvfp4, product=by_blocks), {}),
    Entry("gemm_nvfp4_early", "gemm_nvfp4", gemm_nvfp4_early, {}),
    *family("gemm_2to4", "gemm_2to4", gemm_2to4, ALL),
    *family("gemm_2to4_gathered", "gemm_2to4", partial(gemm_2to4, steps=SparseSteps(product=gathered)), ALL),
    *family("gemm_2to4_in_slices", "gemm_2to4", partial(gemm_2to4, steps=SparseSteps(product=in_slices)), ALL),
)
