"""Matrix products of quantised matrices: what the codes and scales represent is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.options import choice
from assay.golden.registry import Reduction, define

_BLOCK = 128
_FP8_SCALES = {
    "tensor": "scale_a:float32[]=scale, scale_b:float32[]=scale",
    "row": "scale_a:float32[M,1]=scale, scale_b:float32[1,N]=scale",
    "block": "scale_a:float32[M,ceil(K/128)]=scale, scale_b:float32[ceil(K/128),ceil(N/128)]=scale",
}


def _fp8_signature(options: Mapping[str, Any]) -> str:
    scales = _FP8_SCALES[options["granularity"]]
    return f"a:fp8[M,K], b:fp8[K,N], {scales} -> c:bfloat16[M,N]"


@define(
    "gemm_fp8",
    _fp8_signature,
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


def _int4_signature(options: Mapping[str, Any]) -> str:
    return f"x[M,K], {INT4[options['packing']]} -> y[M,N]"


@define(
    "gemm_int4",
    _int4_signature,
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
    """x ((q - zero) scale), group by group along K."""
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
    parts = [(words >> (4 * place)) & 15 for place in order]
    if axis == 0:
        return xp.native.stack(parts, 1).reshape(rows * len(parts), columns)
    return xp.native.stack(parts, 2).reshape(rows, columns * len(parts))
