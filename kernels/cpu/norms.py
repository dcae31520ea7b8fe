"""RMS norm, of a sum too, and layer norm, over the rows of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.arguments import FLOATING, check, check_numbers


@composed
def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, least=0.0)
    check_numbers(offset=offset)
    return _rmsnorm(x, weight, eps, offset)


@composed
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + residual (both [R,N]) times weight[N], and x + residual itself; computed in float32.

    The norm is that of the sum in float32, before it is rounded. Dtypes and errors as in `rmsnorm`.
    """
    check(x=(x, FLOATING, "R N"), residual=(residual, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, least=0.0)
    return _add_rmsnorm(x, residual, weight, eps)


@composed
def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of each row of x[R,N], in float32; weight[N], bias[N].

    The variance is the biased one, of the differences. Dtypes and errors as in `rmsnorm`.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), bias=(bias, FLOATING, "N"))
    check_numbers(eps=eps, least=0.0)
    return _layernorm(x, weight, bias, eps)


@compiled
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return (_normalized(x.float(), eps) * (weight.float() + offset)).to(x.dtype)


@compiled
def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return (_normalized(total, eps) * weight.float()).to(x.dtype), total.to(x.dtype)


@compiled
def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (_normalized(centred, eps) * weight.float() + bias.float()).to(x.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
