"""Matrix product of few rows with a matrix of 4-bit codes, in CUDA C++."""

from __future__ import annotations

from ctypes import c_int, c_longlong

import torch
from torch import Tensor

from assay.kernels.cuda.compiler import launch
from assay.kernels.triton.arguments import check_int4
from assay.kernels.triton.operators import custom_op

_MOST_ROWS = 8
_SIDE, _TURNS = 32, 8  # threads of a block along N, 8 columns each, and along K
_SUMMING = 256
_BLOCKS = 264  # two for each of the 132 multiprocessors of an H100 or H200
_LEAST_TURNS = 4  # steps of a thread: fewer are done sooner than summed
_PACKINGS = {"plain": (0, 2), "awq": (1, 1), "gptq": (2, 8)}  # as the source calls it, and rows of K in a step


@custom_op("assay::cuda_gemm_int4", lambda x, qweight, scales, *rest: x.new_empty((x.shape[0], scales.shape[1])))
def _gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> Tensor:
    (m, k), (groups, n) = x.shape, scales.shape
    y = x.new_empty((m, n))
    if not y.numel():
        return y
    number, each = _PACKINGS[packing]
    blocks, steps = -(-n // (8 * _SIDE)), k // each
    splits = max(1, min(_BLOCKS // blocks, steps // (_TURNS * _LEAST_TURNS)))
    parts = torch.empty((splits, m, n), dtype=torch.float32, device=x.device) if splits > 1 else None
    at_once = 8 if packing == "plain" else 16  # bytes
    aligned = all(each % at_once == 0 for each in (qweight.data_ptr(), qweight.stride(0) * qweight.element_size()))
    packed = packing != "awq" and qweight.stride(1) == 1 and n % 8 == 0 and aligned
    strides = (*x.stride(), *qweight.stride(), *scales.stride(), *zeros.stride())
    launch(
        "gemm_int4",
        (blocks, splits),
        _SIDE * _TURNS,
        [
            *(x, qweight, scales, zeros, y, parts),
            *map(c_int, (m, k, n, max(k // max(groups, 1), 1), splits, packed)),
            *map(c_longlong, strides),
        ],
        ELEMENT=x.dtype,
        ROWS=next(rows for rows in (1, 2, 4, 8) if m <= rows),
        PACKING=number,
    )
    if parts is not None:
        tail = [c_int(splits), c_longlong(m * n)]
        launch("sum", (-(-(m * n) // _SUMMING), 1), _SUMMING, [parts, y, *tail], ELEMENT=x.dtype)
    return y


def gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """x ((q - zero) scale) [M,N] of x[M,K] with M <= 8, 4-bit codes q[K,N], a scale and a zero-point for g along K.

    As `assay.kernels.triton.gemm_int4`, with the same arguments and errors, and ValueError for more rows; a weight
    isn't rounded. There is no gradient.
    """
    check_int4(x, qweight, scales, zeros, packing)
    if (m := len(x)) > _MOST_ROWS:
        raise ValueError(f"x: expected at most {_MOST_ROWS} rows, got M={m}; assay.kernels.triton.gemm_int4 takes more")
    return _gemm_int4(x, qweight, scales, zeros, packing)
