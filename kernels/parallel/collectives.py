"""Collectives with gradients, which are collectives too. All ranks must call each, in the same order.

M. Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (f and g: `copy_to_ranks` and `sum_over_ranks`);
V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198, section 4.2.2
(`all_gather` and `reduce_scatter`, for sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.triton.arguments import FLOATING, check

WIRES = (torch.float32, torch.bfloat16, torch.float16)


def shard(tensor: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of a tensor along ``dim``. Raise ValueError unless the ranks divide it evenly."""
    check_divides("tensor", tensor.shape[dim], group)
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)] if tensor.shape[dim] else tensor


def copy_to_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return x, which is the same on every rank; its gradient is the sum of all ranks' gradients."""
    return _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' x, in its dtype, on every rank; each x has the gradient of the sum."""
    return _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]


def all_gather(x: Tensor, dim: int, group: ProcessGroup | None = None, *, summed: bool) -> Tensor:
    """Return all ranks' x, of one shape, concatenated along ``dim``.

    ``summed``: ranks compute different things from the result, and its gradients are added over ranks. Otherwise all
    compute the same and have the same gradient, of which each keeps its part.
    """
    return _AllGather.apply(x, dim, group, summed)  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's rows of the sum of all ranks' x, in its dtype; x's gradient is gathered from all ranks.

    Raises ValueError unless the ranks divide x's rows evenly.
    """
    check_divides("x", len(x), group)
    return _ReduceScatter.apply(x, group)  # type: ignore[no-untyped-call]


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """Send ``sent[i]`` rows of x, in order, to each rank i; return the ``received[i]`` rows from each, in order."""
    return _AllToAll.apply(x, list(sent), list(received), group)  # type: ignore[no-untyped-call]


def all_reduce(shards: Tensor, *, wire: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum y[N] of all rows of all ranks, of shards[R/ranks,N] on each; R may differ between ranks.

    A rank's rows are added in float32 and rounded to ``wire``, in which ranks add; the result has the shards' dtype,
    float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument.
    """
    check(shards=(shards, FLOATING, "R N"))
    check_wire(wire)
    return sum_over_ranks(shards.float().sum(0).to(wire), group).to(shards.dtype)


def check_divides(name: str, size: int, group: ProcessGroup | None) -> None:
    """Raise ValueError unless the ranks divide ``size`` evenly."""
    if size % (ranks := dist.get_world_size(group)):
        raise ValueError(f"{name}: expected a size that {ranks} ranks divide evenly, got {size}")


def check_even(name: str, part: Tensor, group: ProcessGroup | None) -> None:
    """Raise ValueError on every rank unless ``part`` has the same length on all, which they exchange."""
    lengths = [torch.empty(1, dtype=torch.int64, device=part.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(part)], device=part.device), group=group)
    sizes = [int(length) for length in lengths]
    if min(sizes) < max(sizes):
        raise ValueError(f"{name}: expected the same length on each of {len(sizes)} ranks, got {sizes}")


def check_wire(wire: torch.dtype) -> None:
    """Raise ValueError unless ranks can add in the dtype ``wire``."""
    if wire not in WIRES:
        raise ValueError(f"wire: expected one of {', '.join(map(str, WIRES))}, got {wire}")


def _sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _concatenate(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _sum_and_split(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)] if x.shape[dim] else []
    if not parts:
        return x
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=group)
    return result


def _exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sum(gradients[0], ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None, summed: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.summed = dim, group, summed
        return _concatenate(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        part = _sum_and_split if ctx.summed else shard
        return part(gradients[0], ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _sum_and_split(x, 0, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _concatenate(gradients[0], 0, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None
