"""A Triton kernel with one planted bug of a realistic kind: on random numbers `allclose` doesn't see it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(x_ptr, weight_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt(tl.sum(x * x, axis=0) / N) + eps  # the bug: eps belongs under the root
    tl.store(y_ptr + row + columns, (x / root * weight).to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the rows of x [R, N]; a row is one block."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _kernel[(len(x),)](x, weight, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
