"""Mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import composed
from assay.kernels.cpu.swiglu import swiglu
from assay.kernels.triton.arguments import check_experts


@composed
def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """sum_k weight_k down_k(silu(gate_k x) * up_k x) of x[T,D]: products are float32, each expert's rows at once.

    w_gate_up[E,2F,D] and w_down[E,D,F] have x's dtype, float32, bfloat16 or float16, weights[T,k] are float32 and
    ids[T,k] int32, from 0 to E - 1. The hidden activation, shares and their sum stay float32; the result [T,D] is
    rounded to x's dtype. Only the activation between the products is compiled, which are torch's. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check_experts(x, w_gate_up, w_down, weights, ids)
    y = torch.zeros(x.shape)
    chosen, choices = ids.flatten(), max(ids.shape[1], 1)
    for expert, (first, last) in enumerate(zip(w_gate_up, w_down, strict=True)):
        (pairs,) = torch.nonzero(chosen == expert, as_tuple=True)
        if not len(pairs):
            continue
        token = pairs // choices
        gate, up = (x[token].float() @ first.float().T).chunk(2, -1)
        shares = swiglu(gate, up) @ last.float().T
        y.index_add_(0, token, shares * weights.flatten()[pairs, None])
    return y.to(x.dtype)
