"""Matrix products of microscaled operands (OCP MX 1.0; NVFP4): a scale for each 32 or 16 neighbours along K."""

from __future__ import annotations

import torch

from assay.formats.codes import decode
from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.quantized import nibbles, repeat
from assay.golden.registry import Reduction, define

_MX_BLOCK, _NV_BLOCK = 32, 16
E2M1 = decode(torch.arange(16), "float4_e2m1fn").tolist()


@define(
    "gemm_mxfp8",
    "a:float8_e4m3fn[M,K], b:float8_e4m3fn[K,N], scale_a:float8_e8m0fnu[M,K/32]=scale, "
    "scale_b:float8_e8m0fnu[K/32,N]=scale -> c:bfloat16[M,N]",
    rows="M",
    columns="N",
    reduction=Reduction("K"),
)
def gemm_mxfp8(xp: Arithmetic[N], a: N, b: N, scale_a: N, scale_b: N) -> N:
    """(a scale_a) (b scale_b), the scales powers of two for each 32 along K."""
    scale_a = repeat(xp, scale_a, a.shape[1], axis=1, group=_MX_BLOCK)
    scale_b = repeat(xp, scale_b, a.shape[1], axis=0, group=_MX_BLOCK)
    return xp.scaled_matmul(a, b, scale_a, scale_b)


@define(
    "gemm_nvfp4",
    "a:uint8[M,K/2]=bits, b:uint8[N,K/2]=bits, scale_a:float8_e4m3fn[M,K/16]=scale, "
    "scale_b:float8_e4m3fn[N,K/16]=scale, global_a:float32[]=scale, global_b:float32[]=scale -> c:bfloat16[M,N]",
    rows="M",
    columns="N",
    work="M*K*N",
    reduction=Reduction("K"),
)
def gemm_nvfp4(xp: Arithmetic[N], a: N, b: N, scale_a: N, scale_b: N, global_a: N, global_b: N) -> N:
    """(a scale_a global_a) (b scale_b global_b)^T; a byte holds two e2m1 codes, the even k's in its low nibble."""
    left, right = (_represented(xp, codes, scale) for codes, scale in ((a, scale_a), (b, scale_b)))
    return xp.scaled_matmul(left, xp.swap(right), global_a, global_b)


def _represented(xp: Arithmetic[N, Idx], packed: Idx, scale: N) -> N:
    """The numbers [rows, K] of packed codes [rows, K/2], times their block's scale."""
    codes = nibbles(xp, packed, (0, 1), axis=1)
    numbers = xp.exact(xp.native.asarray(E2M1)[codes])
    return numbers * repeat(xp, scale, codes.shape[1], axis=1, group=_NV_BLOCK)
