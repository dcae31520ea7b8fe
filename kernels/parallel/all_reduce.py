"""The sum of rows that lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.parallel.collectives import check_wire, reduced
from assay.kernels.triton.arguments import FLOATING, check


def all_reduce(shards: Tensor, *, wire: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> Tensor:
    """The sum y[N] of all rows of all ranks, of shards[R/ranks,N] on each; ranks may have different numbers of rows.

    A rank's rows are added in float32 and rounded to ``wire``, in which ranks add; the result has the shards' dtype,
    float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument.
    """
    check(shards=(shards, FLOATING, "R N"))
    check_wire(wire)
    return reduced(shards.float().sum(0).to(wire), group).to(shards.dtype)
