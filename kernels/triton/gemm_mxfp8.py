"""Matrix product of two matrices in MXFP8 (OCP MX 1.0): codes of e4m3, and a power of two for each 32 along K."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.triton.arguments import check, check_shape
from assay.kernels.triton.gemm_scaled import scaled_product, tuned
from assay.kernels.triton.operators import custom_op

_CODES = (torch.float8_e4m3fn,)
_SCALES = (torch.float8_e8m0fnu,)
_BLOCK = 32  # elements along K that share a scale

_gemm_mxfp8_kernel = tuned(
    *((128, 128, 128, 8, 2), (128, 128, 64, 8, 3), (128, 64, 128, 8, 3), (64, 64, 128, 8, 3)),
    *((128, 32, 128, 4, 3), (128, 32, 64, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)),
)


@custom_op("assay::gemm_mxfp8", lambda a, b, *scales: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16))
def _gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    scales = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
    return scaled_product(_gemm_mxfp8_kernel, a, b, scales, (None, None), format="e4m3", share=_BLOCK)


def gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """(a scale_a) (b scale_b) as bfloat16 [M,N], of float8_e4m3fn a[M,K] and b[K,N].

    Scales are float8_e8m0fnu, scale_a[M,K/32] and scale_b[K/32,N]; sums are float32. Raises TypeError or ValueError,
    naming the argument, for another dtype, shape or device, and if 32 doesn't divide K.
    """
    scales = {"scale_a": (scale_a, _SCALES, "M blocks_a"), "scale_b": (scale_b, _SCALES, "blocks_b N")}
    check(a=(a, _CODES, "M K"), b=(b, _CODES, "K N"), **scales)
    blocks, rest = divmod(a.shape[1], _BLOCK)
    if rest:
        raise ValueError(f"a: expected K to be a multiple of {_BLOCK}, got K={a.shape[1]}")
    check_shape("scale_a", scale_a, (a.shape[0], blocks))
    check_shape("scale_b", scale_b, (blocks, b.shape[1]))
    return _gemm_mxfp8(a, b, scale_a, scale_b)
