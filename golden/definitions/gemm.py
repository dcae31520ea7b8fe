"""Matrix products: dense, 2:4 sparse, quantised and microscaled (OCP MX 1.0; NVFP4); and the all-reduce.

A quantised operand is the exact number that its code and scale represent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from assay.formats.codes import decode
from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import choice
from assay.golden.registry import Reduction, define

_FAULTS = ("inputs_in_tf32", "saturating_store", "store_rounds_ties_away", "infinity_read_as_largest")


@define(
    "gemm",
    "a[M,K], b[K,N] -> c[M,N]",
    rows="M",
    columns="N",
    may_be_zero=("M", "N", "K"),
    reduction=Reduction("K", of=("a", "b")),
    faults=_FAULTS,
)
def gemm(xp: Arithmetic[N], a: N, b: N) -> N:
    """a b."""
    return xp.matmul(a, b)


@define(
    "linear",
    "x[M,K], weight[N,K], bias[N] -> y[M,N]",
    rows="M",
    columns="N",
    may_be_zero=("M", "N", "K"),
    sharded="K",
    reduction=Reduction("K", of=("x", "weight")),
    faults=_FAULTS,
)
def linear(xp: Arithmetic[N], x: N, weight: N, bias: N) -> N:
    """x weight^T + bias."""
    return xp.matmul(x, xp.swap(weight), plus=bias)


@define(
    "all_reduce",
    "shards[R,N] -> y[N]",
    rows="N",
    may_be_zero=("N",),
    sharded="R",
    reduction=Reduction("R", of=("shards",)),
    faults=("saturating_store", "store_rounds_ties_away"),
)
def all_reduce(xp: Arithmetic[N], shards: N) -> N:
    """The sum over the ranks, in any order."""
    return xp.sum(shards, axis=0)[0]


@define(
    "gemm_2to4",
    "values[M,K/2], index:uint8[M,K/2]=pair(4), b[K,N] -> c[M,N]",
    rows="M",
    columns="N",
    multiples={"K": "4"},
    work="M*K*N",
    reduction=Reduction("K"),
    faults=("inputs_in_tf32", "saturating_store", "store_rounds_ties_away"),
    exempt=("computed_in_bfloat16", "computed_in_float16"),
)
def gemm_2to4(xp: Arithmetic[N, Idx], values: N, index: Idx, b: N) -> N:
    """c[m,n] = sum_j values[m,j] b[4 (j // 2) + index[m,j], n]; two values with the same index add up."""
    if b.shape[0] % 4:
        raise ShapeError(f"gemm_2to4: K must be a multiple of 4, got {b.shape[0]}")
    column = xp.integers(range(values.shape[1])) // 2 * 4 + index
    return xp.sparse_matmul(values, column, b)


_BLOCK = 128
_FP8_SCALES = {
    "tensor": "scale_a:float32[]=scale, scale_b:float32[]=scale",
    "row": "scale_a:float32[M,1]=scale, scale_b:float32[1,N]=scale",
    "block": "scale_a:float32[M,ceil(K/128)]=scale, scale_b:float32[ceil(K/128),ceil(N/128)]=scale",
}


@define(
    "gemm_fp8",
    lambda options: f"a:fp8[M,K], b:fp8[K,N], {_FP8_SCALES[options['granularity']]} -> c:bfloat16[M,N]",
    options={"granularity": choice("tensor", "row", "block")},
    rows="M",
    columns="N",
    reduction=Reduction("K", of=("a", "b")),
)
def gemm_fp8(xp: Arithmetic[N], a: N, b: N, scale_a: N, scale_b: N, *, granularity: str) -> N:
    """(a scale_a) (b scale_b), with scales per tensor, per row and column, or per 128 along K (and N)."""
    if granularity == "block":
        (_, inner), (_, columns) = a.shape, b.shape
        scale_a = repeat(xp, scale_a, inner, axis=1)
        scale_b = repeat(xp, repeat(xp, scale_b, inner, axis=0), columns, axis=1)
    return xp.scaled_matmul(a, b, scale_a, scale_b)


def repeat(xp: Arithmetic[N], scale: N, size: int, *, axis: int, group: int = _BLOCK) -> N:
    """Each scale along ``axis`` repeated ``group`` times, cut to ``size``."""
    index = xp.integers([position // group for position in range(size)])
    return scale[index] if axis == 0 else scale[:, index]


@define(
    "gemm_int8",
    "a:int8[M,K], b:int8[K,N], scale_a:float32[M,1]=scale, scale_b:float32[1,N]=scale -> c:bfloat16[M,N]",
    rows="M",
    columns="N",
    reduction=Reduction("K"),
)
def gemm_int8(xp: Arithmetic[N], a: N, b: N, scale_a: N, scale_b: N) -> N:
    """(a b) scale_a scale_b."""
    return xp.scaled_matmul(a, b, scale_a, scale_b)


INT4 = {
    "plain": "qweight:uint8[K/2,N]=bits, scales[K/g,N]=scale, zeros:uint8[K/g,N]=code(16)",
    "awq": "qweight:int32[K,N/8]=bits, scales[K/g,N]=scale, zeros:int32[K/g,N/8]=bits",
    "gptq": "qweight:int32[K/8,N]=bits, scales[K/g,N]=scale, zeros:int32[K/g,N/8]=bits",
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i]


@define(
    "gemm_int4",
    lambda options: f"x[M,K], {INT4[options['packing']]} -> y[M,N]",
    options={"packing": choice("plain", "awq", "gptq")},
    stages={"weights": "input"},
    rows="M",
    columns="N",
    sizes={"g": (32, 64, 128)},
    multiples={"K": "g"},
    reduction=Reduction("K"),
    faults=("inputs_in_tf32",),
    exempt=("computed_in_bfloat16", "computed_in_float16"),
)
def gemm_int4(xp: Arithmetic[N, Idx], x: N, qweight: Idx, scales: N, zeros: Idx, *, packing: str) -> N:
    """x ((q - zero) scale), group by group along K.

    Codes are packed along K, the first in the low nibble: two in a byte ("plain"), eight in an int32 ("gptq", whose
    zero-points are stored minus one, eight columns in an int32). "awq": an int32 has eight columns, and its nibble i is
    column (0, 2, 4, 6, 1, 3, 5, 7)[i] of them; zero-points too.
    """
    codes, points = unpack_int4(xp, qweight, zeros, packing)
    inner = codes.shape[0]
    group = inner // max(scales.shape[0], 1) or 1
    points = points[xp.integers(range(inner)) // group]
    return xp.quantized_matmul(x, codes, points, repeat(xp, scales, inner, axis=0, group=group))


def unpack_int4(xp: Arithmetic[N, Idx], qweight: Idx, zeros: Idx, packing: str) -> tuple[Idx, Idx]:
    """Integer codes [K, N] and zero-points [K/g, N]; GPTQ stores a zero-point minus one."""
    if packing == "plain":
        return nibbles(xp, qweight, (0, 1), axis=0), zeros
    if packing == "awq":
        order = tuple(AWQ_ORDER.index(column) for column in range(8))
        return nibbles(xp, qweight, order, axis=1), nibbles(xp, zeros, order, axis=1)
    return nibbles(xp, qweight, range(8), axis=0), nibbles(xp, zeros, range(8), axis=1) + 1


def nibbles(xp: Arithmetic[N, Idx], words: Idx, order: Sequence[int], *, axis: int) -> Idx:
    """The nibbles of each word in ``order``, laid out along ``axis``."""
    rows, columns = words.shape
    parts = [(words >> (4 * nibble)) & 15 for nibble in order]
    if axis == 0:
        return xp.native.stack(parts, 1).reshape(rows * len(parts), columns)
    return xp.native.stack(parts, 2).reshape(rows, columns * len(parts))


_MX_BLOCK, _NV_BLOCK = 32, 16
E2M1 = decode(torch.arange(16, device="cpu"), "float4_e2m1fn").tolist()


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
