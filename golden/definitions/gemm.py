"""Matrix products of floating-point matrices."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
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
