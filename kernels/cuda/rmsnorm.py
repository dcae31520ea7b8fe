"""RMS norm in CUDA C++."""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong

from torch import Tensor

from assay.kernels.cuda.compiler import launch
from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.operators import custom_op

_WARP, _MAX_THREADS = 32, 256
_LOAD_BYTES = 16


@custom_op("assay::cuda_rmsnorm", lambda x, *rest: x.new_empty(x.shape))
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    rows, columns = x.shape
    y = x.new_empty(x.shape)
    if not x.numel():
        return y
    size = x.element_size()
    offsets = (columns * size, x.stride(0) * size, x.data_ptr(), y.data_ptr())
    packed = x.stride(1) == 1 and all(offset % _LOAD_BYTES == 0 for offset in offsets)
    loads = -(-columns * size // _LOAD_BYTES) if packed else columns
    launch(
        "rmsnorm",
        (rows, 1),
        min(-(-loads // _WARP) * _WARP, _MAX_THREADS),
        [
            *(x, weight, y),
            *map(c_longlong, (columns, *x.stride(), *weight.stride())),
            *map(c_float, (eps, offset)),
            c_int(packed),
        ],
        ELEMENT=x.dtype,
        WEIGHT=weight.dtype,
    )
    return y


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype and no
    gradient. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    check_numbers(offset=offset)
    return _rmsnorm(x, weight, eps, offset)
