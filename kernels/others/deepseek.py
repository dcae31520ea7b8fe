"""DeepSeek-V3's kernels (inference/kernel.py), which return torch's default dtype: bfloat16 in its model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from kernel import fp8_gemm as _fp8_gemm
from kernel import weight_dequant as _weight_dequant
from torch import Tensor


@contextmanager
def _default_bfloat16() -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def weight_dequant(codes: Tensor, scale: Tensor) -> Tensor:
    with _default_bfloat16():
        return _weight_dequant(codes, scale)


def fp8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str) -> Tensor:
    """The kernel takes b and its scales transposed."""
    with _default_bfloat16():
        return _fp8_gemm(a, scale_a, b.T.contiguous(), scale_b.T.contiguous())
