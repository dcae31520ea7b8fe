"""Softmax over rows, with a bug: lanes beyond the end of a row are loaded as 0 and counted.

At a power-of-two width, as in most tests, there are no such lanes.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, stride_xr, stride_xn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + row * stride_xr + i * stride_xn, mask=i < N, other=0.0).to(
        tl.float32
    )  # the bug: should be -inf
    weights = tl.exp(x - tl.max(x, axis=0))
    y = weights / tl.sum(weights, axis=0)
    tl.store(y_ptr + row * N + i, y.to(y_ptr.dtype.element_ty), mask=i < N)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, n = x.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if y.numel():
        _softmax[(rows,)](x, y, n, *x.stride(), BLOCK=triton.next_power_of_2(n))
    return y
