"""Softmax over the rows of a matrix, and its logarithm."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.arguments import FLOATING, check


@composed
def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) of each row of x[R,N], computed in float32; x is float32, bfloat16 or float16.

    Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check(x=(x, FLOATING, "R N"))
    return _softmax(x) if x.numel() else torch.empty_like(x)


@composed
def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(exp(x))) of each row of x[R,N], computed in float32. Dtypes and errors as in `softmax`."""
    check(x=(x, FLOATING, "R N"))
    return _log_softmax(x) if x.numel() else torch.empty_like(x)


@compiled
def _softmax(x: Tensor) -> Tensor:
    wide = x.float()
    weights = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


@compiled
def _log_softmax(x: Tensor) -> Tensor:
    wide = x.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))).to(x.dtype)
