"""DeepSeek-V3's kernels (inference/kernel.py), which return torch's default dtype: bfloat16 where its model runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from kernel import fp8_gemm as _fp8_gemm
from kernel import weight_dequant as _weight_dequant
from torch import Tensor


@contextmanager
def _in_bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def weight_dequant(codes: Tensor, scale: Tensor) -> Tensor:
    with _in_bfloat16():
        return _weight_dequant(codes, scale)


def fp8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str) -> Tensor:
    """The second factor lies transposed there."""
    with _in_bfloat16():
        return _fp8_gemm(a, scale_a, b.T.contiguous(), scale_b.T.contiguous())
