"""GEMM of few rows with 4-bit weights, in CUDA C++, with split-K."""

from __future__ import annotations

from ctypes import c_int, c_longlong

import torch
from torch import Tensor

from assay.kernels.cuda.compiler import launch
from assay.kernels.triton.arguments import check_int4
from assay.kernels.triton.operators import custom_op

_MAX_ROWS = 8
_THREADS_N, _THREADS_K = 32, 8  # of a block; each has 8 columns
_SUM_THREADS = 256
_TARGET_BLOCKS = 264  # two for each of the 132 multiprocessors of an H100 or H200
_MIN_STEPS = 4  # of a thread: adding up the splits costs more than doing fewer
_PACKINGS = {"plain": (0, 2), "awq": (1, 1), "gptq": (2, 8)}  # PACKING of the source, and rows of K in a step


@custom_op("assay::cuda_gemm_int4", lambda x, qweight, scales, *rest: x.new_empty((x.shape[0], scales.shape[1])))
def _gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> Tensor:
    (m, k), (groups, n) = x.shape, scales.shape
    y = x.new_empty((m, n))
    if not y.numel():
        return y
    packing_id, pack_factor = _PACKINGS[packing]
    blocks, steps = -(-n // (8 * _THREADS_N)), k // pack_factor
    splits = max(1, min(_TARGET_BLOCKS // blocks, steps // (_THREADS_K * _MIN_STEPS)))
    partials = torch.empty((splits, m, n), dtype=torch.float32, device=x.device) if splits > 1 else None
    load_bytes = 8 if packing == "plain" else 16
    offsets = (qweight.data_ptr(), qweight.stride(0) * qweight.element_size())
    aligned = all(offset % load_bytes == 0 for offset in offsets)
    packed = packing != "awq" and qweight.stride(1) == 1 and n % 8 == 0 and aligned
    strides = (*x.stride(), *qweight.stride(), *scales.stride(), *zeros.stride())
    launch(
        "gemm_int4",
        (blocks, splits),
        _THREADS_N * _THREADS_K,
        [
            *(x, qweight, scales, zeros, y, partials),
            *map(c_int, (m, k, n, max(k // max(groups, 1), 1), splits, packed)),
            *map(c_longlong, strides),
        ],
        ELEMENT=x.dtype,
        ROWS=next(rows for rows in (1, 2, 4, 8) if m <= rows),
        PACKING=packing_id,
    )
    if partials is not None:
        sizes = [c_int(splits), c_longlong(m * n)]
        launch("sum", (-(-(m * n) // _SUM_THREADS), 1), _SUM_THREADS, [partials, y, *sizes], ELEMENT=x.dtype)
    return y


def gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """Return x ((q - zero) scale) [M,N] of x[M,K], M <= 8, 4-bit codes q[K,N], a scale and zero-point for g along K.

    As `assay.kernels.triton.gemm_int4`, with the same arguments and errors, and ValueError for more rows; a weight
    isn't rounded. There is no gradient.
    """
    check_int4(x, qweight, scales, zeros, packing)
    if (m := len(x)) > _MAX_ROWS:
        raise ValueError(f"x: expected at most {_MAX_ROWS} rows, got M={m}; assay.kernels.triton.gemm_int4 takes more")
    return _gemm_int4(x, qweight, scales, zeros, packing)
