"""Products with a matrix that is two-to-four sparse along K: of each four neighbours only two are stored."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.registry import Reduction, define


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
    """c[m,n] = sum_j values[m,j] b[4 (j // 2) + index[m,j], n]; of two values at one place both count."""
    if b.shape[0] % 4:
        raise ShapeError(f"gemm_2to4: K must be a multiple of 4, got {b.shape[0]}")
    place = xp.integers(range(values.shape[1])) // 2 * 4 + index
    return xp.sparse_matmul(values, place, b)
