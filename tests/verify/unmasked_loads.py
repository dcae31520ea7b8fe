"""Softmax kernels in Triton: one whose load is masked, one without a mask, and one that loads an element too many."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, loaded, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * N + columns
    if MASKED:
        x = tl.load(x_ptr + row, mask=columns < loaded, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row).to(tl.float32)
    x = tl.where(columns < N, x, float("-inf"))
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row, (weights / tl.sum(weights, 0)).to(y_ptr.dtype.element_ty), mask=columns < N)


def _launched(x, more, masked):
    y = torch.empty_like(x)
    rows, columns = x.shape
    if y.numel():
        _softmax[(rows,)](x, y, columns, columns + more, masked, triton.next_power_of_2(columns + more))
    return y


def masked_softmax(x):
    """Loads what there is."""
    return _launched(x, 0, True)


def unmasked_softmax(x):
    """Loads whole tiles."""
    return _launched(x, 0, False)


def clamped_softmax(x):
    """Loads one element too many, whatever the size."""
    return _launched(x, 1, True)
