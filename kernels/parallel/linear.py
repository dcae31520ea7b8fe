"""Linear layers whose weight is divided among ranks, by columns of the result or by rows of the sum.

M. Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3; with ``sequence``, V. Korthikanti et al., arXiv
2205.05198.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.parallel.collectives import check_even, check_wire, copied, gathered, reduced, scattered
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
    """x weight^T + bias of x[M,K], and this rank's outputs of weight[N/ranks,K] and bias[N/ranks], in float32.

    The result, rounded once to x's dtype, is this rank's columns [M,N/ranks], or with ``gather`` all [M,N], on every
    rank. With ``sequence`` x is this rank's rows [M/ranks,K]. Gradients of x are added over ranks in float32.

    All are of one dtype, float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape, and where a part that is gathered is not as large on every rank.
    """
    check(x=(x, FLOATING, "M K"), weight=(weight, ("x",), "N K"), bias=(bias, ("x",), "N"))
    if sequence:
        check_even("x", x, group)
        rows = gathered(x.float(), 0, group, summed=True)
    else:
        rows = copied(x.float(), group)
    y = torch.addmm(bias.float(), rows, weight.float().T).to(x.dtype)
    if not gather:
        return y
    check_even("weight", weight, group)
    return gathered(y, 1, group, summed=False)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    wire: torch.dtype = torch.float32,
    sequence: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """x weight^T + bias of this rank's terms of the sum, x[M,K/ranks] and weight[N,K/ranks], and the whole bias[N].

    A rank's partial sum is float32; it is rounded to ``wire``, in which ranks add. The bias is added once, in float32,
    and the result rounded to x's dtype: y[M,N], the same bits on every rank, or with ``sequence`` this rank's rows
    [M/ranks,N] of it. Ranks may have different numbers of terms.

    All are of one dtype, float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape, and where rows are to be shared out that the ranks don't divide evenly.
    """
    check(x=(x, FLOATING, "M K"), weight=(weight, ("x",), "N K"), bias=(bias, ("x",), "N"))
    check_wire(wire)
    partial = (x.float() @ weight.float().T).to(wire)
    total = scattered(partial, group) if sequence else reduced(partial, group)
    whole = copied(bias.float(), group) if sequence else bias.float()
    return torch.add(total.float(), whole).to(x.dtype)
