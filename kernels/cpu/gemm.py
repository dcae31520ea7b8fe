"""Matrix product."""

from __future__ import annotations

from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a b of a[M,K] and b[K,N], both float32, bfloat16 or float16: torch's float32 product, rounded once.

    Nothing is compiled here: torch.compile too calls the library's product. Of 16-bit matrices torch's own product is
    several times faster on a CPU that multiplies them as they are. Raises TypeError or ValueError, naming the argument,
    for another dtype or shape.
    """
    check(a=(a, FLOATING, "M K"), b=(b, ("a",), "K N"))
    return (a.float() @ b.float()).to(a.dtype)
