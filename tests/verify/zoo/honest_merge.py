"""Honest merging of partial attention, and honest sums over ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_softmax import LOG2_E, shift_of
from .numerics import keep, load, nonzero

LN_2 = math.log(2.0)


def zero_if_empty(o: Tensor, lse: Tensor) -> Tensor:
    """The output of an empty state counts for nothing, whatever it holds."""
    return torch.where((lse == -math.inf)[..., None], torch.zeros_like(o), o)


@dataclass(frozen=True)
class Steps:
    """What merging is made of; a fault replaces one."""

    output: Callable[[Tensor, Tensor], Tensor] = zero_if_empty
    weights: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda a, b: (a, b)
    divisor: Callable[[Tensor], Tensor] = nonzero
    term: Callable[[Tensor], Tensor] = keep
    lse: Callable[[Tensor], Tensor] = keep


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, steps: Steps = Steps()
) -> tuple[Tensor, Tensor]:
    """Weights relative to the larger log-sum-exp."""
    a, b = load(lse_a), load(lse_b)
    shift = shift_of(torch.maximum(a, b))
    left, right = steps.weights(torch.exp(a - shift), torch.exp(b - shift))
    total = left + right
    out = steps.term(left[..., None] * steps.output(load(o_a), a))
    out = steps.term(out + right[..., None] * steps.output(load(o_b), b))
    lse = steps.lse(shift + torch.log(total))
    return (out / steps.divisor(total)[..., None]).to(o_a.dtype), lse


def merge_in_base_two(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Everything in powers of two."""
    a, b = load(lse_a) * LOG2_E, load(lse_b) * LOG2_E
    shift = shift_of(torch.maximum(a, b))
    left, right = torch.exp2(a - shift), torch.exp2(b - shift)
    total = left + right
    share_a, share_b = left / nonzero(total), right / nonzero(total)
    out = share_a[..., None] * zero_if_empty(load(o_a), a) + share_b[..., None] * zero_if_empty(load(o_b), b)
    return out.to(o_a.dtype), (shift + torch.log2(total)) * LN_2


def merge_by_lse(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The new log-sum-exp first; each output by the exponential of what its own lacks."""
    a, b = load(lse_a), load(lse_b)
    largest, least = shift_of(torch.maximum(a, b)), torch.minimum(a, b)
    lse = torch.where(torch.maximum(a, b) == -math.inf, -math.inf, largest + torch.log1p(torch.exp(least - largest)))
    known = shift_of(lse)
    out = torch.exp(a - known)[..., None] * zero_if_empty(load(o_a), a)
    return (out + torch.exp(b - known)[..., None] * zero_if_empty(load(o_b), b)).to(o_a.dtype), lse


def merge_by_difference(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """a - s (a - b), s the logistic function of the scores' difference, as ring attention has it."""
    a, b = load(lse_a), load(lse_b)
    left, right = zero_if_empty(load(o_a), a), zero_if_empty(load(o_b), b)
    none = torch.maximum(a, b) == -math.inf
    share = torch.where(none, torch.zeros_like(a), torch.sigmoid(b - a))
    largest, least = shift_of(torch.maximum(a, b)), torch.minimum(a, b)
    lse = torch.where(none, -math.inf, largest + torch.log1p(torch.exp(least - largest)))
    return (left - share[..., None] * (left - right)).to(o_a.dtype), lse


def forward(shards: Tensor) -> Tensor:
    """One rank after the other, in float32."""
    total = torch.zeros(shards.shape[1])
    for shard in load(shards):
        total = total + shard
    return total


def tree(shards: Tensor) -> Tensor:
    """Pairs of ranks, and pairs of those."""
    rest = load(shards)
    while rest.shape[0] > 1:
        rest = torch.nn.functional.pad(rest, (0, 0, 0, rest.shape[0] % 2))
        rest = rest[0::2] + rest[1::2]
    return rest[0]


def ring(shards: Tensor, hop: Callable[[Tensor], Tensor] = keep) -> Tensor:
    """Each rank owns a share of the columns, whose sum begins at the next rank and goes round."""
    ranks, columns = shards.shape
    width = -(-columns // ranks)
    total = torch.empty(columns)
    for owner in range(ranks):
        part = load(shards[:, owner * width : (owner + 1) * width])
        share = part[(owner + 1) % ranks]
        for step in range(2, ranks + 1):
            share = hop(share + part[(owner + step) % ranks])
        total[owner * width : (owner + 1) * width] = share
    return total


def all_reduce(shards: Tensor, *, total: Callable[[Tensor], Tensor] = forward) -> Tensor:
    """The sum over the ranks, rounded once."""
    return total(shards).to(shards.dtype)


ALL = ("float32", "bfloat16", "float16")
RANKS = {"R": [1, 2, 3, 4, 7, 8, 16]}
MERGE: tuple[Entry, ...] = (
    *family("merge_states", "merge_states", merge_states, ALL),
    *family("merge_states_in_base_two", "merge_states", merge_in_base_two, ALL),
    *family("merge_states_by_lse", "merge_states", merge_by_lse, ALL),
    *family("merge_states_by_difference", "merge_states", merge_by_difference, ALL[:2]),
    *family("all_reduce", "all_reduce", all_reduce, ALL, shapes=RANKS),
    *family("all_reduce_tree", "all_reduce", partial(all_reduce, total=tree), ALL, shapes=RANKS),
    *family("all_reduce_ring", "all_reduce", partial(all_reduce, total=ring), ALL, shapes=RANKS),
)
