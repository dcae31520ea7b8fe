"""Functions that ranks call, importable in their processes; each but the first of a kind has one fault."""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor


def in_place(shards: Tensor) -> Tensor:
    """Honest: the rank's own copy is overwritten."""
    total = shards.float().sum(0)
    dist.all_reduce(total)
    shards.zero_()
    return total.to(shards.dtype)


def only_rank_0(shards: Tensor) -> Tensor:
    """The sum reaches rank 0 alone (FasterTransformer#672)."""
    total = shards.float().sum(0)
    dist.reduce(total, 0)
    own = shards.float().sum(0)
    return (total if dist.get_rank() == 0 else own).to(shards.dtype)


def in_input_dtype(shards: Tensor) -> Tensor:
    """Rows are added, and ranks reduced, in the dtype of the shards (TensorRT-LLM#16753)."""
    total = torch.zeros_like(shards[0]) if len(shards) else shards.new_zeros(shards.shape[1])
    for row in shards:
        total = total + row
    dist.all_reduce(total)
    return total


def average(shards: Tensor) -> Tensor:
    total = shards.float().sum(0)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(shards.dtype)


def raises_on_rank_1(shards: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    return in_place(shards)


def ends_on_rank_1(shards: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        os._exit(3)
    return in_place(shards)


def never_joins_on_rank_1(shards: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        time.sleep(600)
    return in_place(shards)


def partial_sums_rounded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each rank rounds its part of the product to the input's dtype before it is reduced."""
    total = (x.float() @ weight.float().T).to(x.dtype).float()
    dist.all_reduce(total)
    return (total + bias.float()).to(x.dtype)


def bias_on_every_rank(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias is added as often as there are ranks."""
    total = x.float() @ weight.float().T + bias.float()
    dist.all_reduce(total)
    return total.to(x.dtype)


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()
