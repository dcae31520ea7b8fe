"""Matrix products of floating-point matrices."""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define


@define("gemm", "a[M,K], b[K,N] -> c[M,N]", rows="M", columns="N", empty=("M", "N", "K"))
def gemm(xp: Any, a: Any, b: Any) -> Any:
    """a b."""
    return xp.matmul(a, b)


@define("linear", "x[M,K], weight[N,K], bias[N] -> y[M,N]", rows="M", columns="N", empty=("M", "N", "K"))
def linear(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    """x weight^T + bias."""
    return xp.matmul(x, xp.swap(weight), plus=bias)
