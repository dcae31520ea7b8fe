"""What ranks exchange, with gradients: a collective's gradient is another collective.

M. Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (f and g: `copied` and `reduced`); V. Korthikanti et al.,
*Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198, section 4.2.2 (`gathered` and
`scattered`, for parts of a sequence). All ranks must call each, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

WIRES = (torch.float32, torch.bfloat16, torch.float16)


def shard(tensor: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of a whole tensor along ``dim``, in the order of the ranks.

    Raises ValueError unless the ranks divide it evenly.
    """
    check_divides("tensor", tensor.shape[dim], group)
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)] if tensor.shape[dim] else tensor


def copied(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """x, which is the same on every rank; its gradient is the sum of all ranks' gradients."""
    return _Copied.apply(x, group)  # type: ignore[no-untyped-call]


def reduced(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' x, in its dtype, on every rank; the gradient of the sum is that of each rank's x."""
    return _Reduced.apply(x, group)  # type: ignore[no-untyped-call]


def gathered(x: Tensor, dim: int, group: ProcessGroup | None = None, *, summed: bool) -> Tensor:
    """All ranks' x one after the other along ``dim``; all must have one shape.

    ``summed``: each rank uses the whole for itself, and its gradients are added over ranks; otherwise all ranks use it
    for the same, and each keeps its part of the one gradient that they have.
    """
    return _Gathered.apply(x, dim, group, summed)  # type: ignore[no-untyped-call]


def scattered(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's rows of the sum of all ranks' x, in its dtype; the gradient of x is gathered from all ranks.

    Raises ValueError unless the ranks divide x's rows evenly.
    """
    check_divides("x", len(x), group)
    return _Scattered.apply(x, group)  # type: ignore[no-untyped-call]


def exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """The rows that each rank has sent here, by rank: the first ``sent[0]`` of x go to rank 0, and so on."""
    return _Exchanged.apply(x, list(sent), list(received), group)  # type: ignore[no-untyped-call]


def check_divides(name: str, size: int, group: ProcessGroup | None) -> None:
    """Raise ValueError unless the ranks divide ``size`` evenly."""
    if size % (ranks := dist.get_world_size(group)):
        raise ValueError(f"{name}: expected a size that {ranks} ranks divide evenly, got {size}")


def check_even(name: str, part: Tensor, group: ProcessGroup | None) -> None:
    """Raise ValueError on every rank unless ``part`` is as long on all: the ranks tell each other their lengths."""
    lengths = [torch.empty(1, dtype=torch.int64, device=part.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(part)], device=part.device), group=group)
    found = [int(length) for length in lengths]
    if min(found) < max(found):
        raise ValueError(f"{name}: expected the same length on each of {len(found)} ranks, got {found}")


def check_wire(wire: torch.dtype) -> None:
    """Raise ValueError unless ranks can add in the dtype ``wire``."""
    if wire not in WIRES:
        raise ValueError(f"wire: expected one of {', '.join(map(str, WIRES))}, got {wire}")


def _sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _rows_of_sum(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)] if x.shape[dim] else []
    if not parts:
        return x
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


def _exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sum(gradients[0], ctx.group), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None, summed: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.summed = dim, group, summed
        return _all(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        part = _rows_of_sum if ctx.summed else shard
        return part(gradients[0], ctx.dim, ctx.group), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _rows_of_sum(x, 0, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all(gradients[0], 0, ctx.group), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None
