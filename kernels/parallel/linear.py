"""Tensor-parallel linear layers: the weight is sharded by outputs (column-parallel) or by inputs (row-parallel).

M. Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3; with ``sequence``, V. Korthikanti et al., arXiv
2205.05198.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.parallel.collectives import (
    all_gather,
    check_even,
    check_wire,
    copy_to_ranks,
    reduce_scatter,
    sum_over_ranks,
)
from assay.kernels.triton.arguments import FLOATING, check


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    gather: bool = False,
    sequence: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return x weight^T + bias of x[M,K] and this rank's outputs, weight[N/ranks,K] and bias[N/ranks], in float32.

    The result, rounded once to x's dtype, is this rank's columns [M,N/ranks], or with ``gather`` all [M,N], on every
    rank. With ``sequence`` x is this rank's rows [M/ranks,K]. Gradients of x are added over ranks in float32.

    All are of one dtype, float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape, and if a part that is gathered has other sizes on other ranks.
    """
    check(x=(x, FLOATING, "M K"), weight=(weight, ("x",), "N K"), bias=(bias, ("x",), "N"))
    if sequence:
        check_even("x", x, group)
        rows = all_gather(x.float(), 0, group, summed=True)
    else:
        rows = copy_to_ranks(x.float(), group)
    y = torch.addmm(bias.float(), rows, weight.float().T).to(x.dtype)
    if not gather:
        return y
    check_even("weight", weight, group)
    return all_gather(y, 1, group, summed=False)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    wire: torch.dtype = torch.float32,
    sequence: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return x weight^T + bias of this rank's inputs, x[M,K/ranks] and weight[N,K/ranks], and the whole bias[N].

    A rank's partial sum is float32; it is rounded to ``wire``, in which ranks add. The bias is added once, in float32,
    and the result rounded to x's dtype: y[M,N], the same bits on every rank, or with ``sequence`` this rank's rows
    [M/ranks,N] of it. Ranks may have different numbers of inputs.

    All are of one dtype, float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape, and with ``sequence`` if the ranks don't divide M.
    """
    check(x=(x, FLOATING, "M K"), weight=(weight, ("x",), "N K"), bias=(bias, ("x",), "N"))
    check_wire(wire)
    partial = (x.float() @ weight.float().T).to(wire)
    total = reduce_scatter(partial, group) if sequence else sum_over_ranks(partial, group)
    bias_32 = copy_to_ranks(bias.float(), group) if sequence else bias.float()
    return torch.add(total.float(), bias_32).to(x.dtype)
