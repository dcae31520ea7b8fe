"""Matrix product of two matrices in NVFP4: pairs of e2m1 in bytes, an e4m3 scale for each 16 along K, and a multiplier
of each matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, check, check_shape
from assay.kernels.triton.gemm_scaled import scaled_product, tuned
from assay.kernels.triton.operators import custom_op

_CODES = (torch.uint8,)
_SCALES = (torch.float8_e4m3fn,)
_BLOCK = 16  # elements along K that share a scale

_gemm_nvfp4_kernel = tuned(
    *((128, 128, 128, 8, 3), (128, 128, 64, 8, 3), (128, 64, 128, 8, 3), (64, 64, 128, 8, 3)),
    *((128, 32, 128, 4, 3), (128, 32, 64, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)),
)


@custom_op("assay::gemm_nvfp4", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16))
def _gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Tensor:
    scales, multipliers = (scale_a, scale_b.t()), (global_a, global_b)
    return scaled_product(_gemm_nvfp4_kernel, a, b.t(), scales, multipliers, format="e2m1", share=_BLOCK // 2)


def gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Tensor:
    """(a scale_a global_a) (b scale_b global_b)^T as bfloat16 [M,N], of two e2m1 codes in each byte of a and b.

    a is uint8[M,K/2] and b uint8[N,K/2], even k's in the low nibbles; scale_a[M,K/16] and scale_b[N,K/16] are
    float8_e4m3fn, global_a[] and global_b[] float32. Sums are float32, and take both multipliers at the end. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape or device, and if 16 doesn't divide K.
    """
    check(
        a=(a, _CODES, "M K/2"),
        b=(b, _CODES, "N K/2"),
        scale_a=(scale_a, _SCALES, "M blocks_a"),
        scale_b=(scale_b, _SCALES, "N blocks_b"),
        global_a=(global_a, FLOAT32, ""),
        global_b=(global_b, FLOAT32, ""),
    )
    blocks, rest = divmod(2 * a.shape[1], _BLOCK)
    if rest:
        raise ValueError(f"a: expected K to be a multiple of {_BLOCK}, got K={2 * a.shape[1]}")
    check_shape("scale_a", scale_a, (a.shape[0], blocks))
    check_shape("scale_b", scale_b, (b.shape[0], blocks))
    return _gemm_nvfp4(a, b, scale_a, scale_b, global_a, global_b)
