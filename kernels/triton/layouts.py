"""Operand layouts: descriptors of tensors that TMA can load, and K-major copies for 8-bit tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.kernels.triton.tiles import NARROW

ALIGNMENT = 16  # bytes: TMA needs it of the first element and of every stride but the last, which is one element
_MIN_CAPABILITY = (9, 0)  # TMA came with Hopper
_PLACEHOLDER_COLUMNS = 16  # of a descriptor's block until a configuration's hook sets its shape
_TILE = 64  # rows and columns that a program of the transpose copies


def can_use_tma(*tensors: Tensor) -> bool:
    """Return whether TMA can load every tensor: its device has it, and `is_tma_aligned`.

    On a CPU, where kernels are interpreted, the layout alone decides.
    """
    return all(
        (not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= _MIN_CAPABILITY)
        and is_tma_aligned(tensor)
        for tensor in tensors
    )


def is_tma_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor isn't empty, has contiguous rows, positive strides, and 16-byte aligned rows."""
    return (
        tensor.numel() > 0
        and max(tensor.shape) < 2**31  # coordinates of a descriptor are int32
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride > 0 and stride * tensor.element_size() % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
    )


def make_descriptor(tensor: Tensor) -> TensorDescriptor:
    """Return a descriptor of a tensor that `can_use_tma`; a hook of each configuration sets its ``block_shape``."""
    placeholder = [1] * (tensor.dim() - 1) + [_PLACEHOLDER_COLUMNS]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), placeholder)


def set_block_shapes(**block_shapes: Sequence[int | str]) -> Callable[[Mapping[str, Any]], None]:
    """Return a ``pre_hook`` of `triton.Config` that sets the block shapes of the arguments that are descriptors.

    A size is a number or the name of one of the kernel's constants, such as "BLOCK_M".
    """

    def pre_hook(arguments: Mapping[str, Any]) -> None:
        for name, sizes in block_shapes.items():
            if isinstance(arguments[name], TensorDescriptor):
                arguments[name].block_shape = [arguments[size] if isinstance(size, str) else size for size in sizes]

    return pre_hook


def k_major(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit a[M,K] and b[K,N] with stride 1 along K, copied where they aren't: Hopper's wgmma reads 8-bit
    operands K-major only.

    Without the copy, which costs one read and one write, Triton transposes each block in registers. Products of few
    rows use no wgmma (`NARROW`) and read each operand about once, so a copy doesn't pay: they get both unchanged.
    """
    if a.shape[0] <= NARROW:
        return a, b
    a_is_k_major, b_is_k_major = a.stride(1) == 1 or a.shape[1] <= 1, b.stride(0) == 1 or b.shape[0] <= 1
    return a if a_is_k_major else _transpose(a.t()), b if b_is_k_major else _transpose(b).t()


def _transpose(x: Tensor) -> Tensor:
    y = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(x.shape[0], _TILE) * triton.cdiv(x.shape[1], _TILE)
    if tiles:
        _transpose_kernel[(tiles,)](x.view(torch.uint8), y.view(torch.uint8), *x.shape, x.stride(), TILE=_TILE)
    return y


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, M, N, x_strides, TILE: tl.constexpr):
    """y[N, M], contiguous, from x[M, N]."""
    num_pid_n = tl.cdiv(N, TILE)
    pid = tl.program_id(0).to(tl.int64)
    offs_m = (pid // num_pid_n * TILE + tl.arange(0, TILE))[:, None]
    offs_n = (pid % num_pid_n * TILE + tl.arange(0, TILE))[None, :]
    mask = (offs_m < M) & (offs_n < N)
    x = tl.load(x_ptr + offs_m * x_strides[0] + offs_n * x_strides[1], mask=mask, other=0)
    tl.store(y_ptr + offs_n * M + offs_m, x, mask=mask)
