"""Partial attention merged, and sums over ranks, in several orders; with one fault each."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import ALL, honest, planter
from .numerics import LN_2, LOG2_E, Stage, keep, load, nonzero, shift_of, to_bfloat16, to_float16

Merged = tuple[Tensor, Tensor]


def zero_if_empty(o: Tensor, lse: Tensor) -> Tensor:
    """The output of an empty state counts for nothing, whatever it holds."""
    return torch.where((lse == -math.inf)[..., None], 0.0, o)


def merge_states(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    *,
    output: Callable[[Tensor, Tensor], Tensor] = zero_if_empty,
    weights: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda a, b: (a, b),
    divisor: Stage = nonzero,
    term: Stage = keep,
    lse_stage: Stage = keep,
) -> Merged:
    """Weights relative to the larger log-sum-exp."""
    a, b = load(lse_a), load(lse_b)
    shift = shift_of(torch.maximum(a, b))
    left, right = weights(torch.exp(a - shift), torch.exp(b - shift))
    total = left + right
    out = term(left[..., None] * output(load(o_a), a))
    out = term(out + right[..., None] * output(load(o_b), b))
    return (out / divisor(total)[..., None]).to(o_a.dtype), lse_stage(shift + torch.log(total))


def merge_in_base_two(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Merged:
    """Everything in powers of two."""
    a, b = load(lse_a) * LOG2_E, load(lse_b) * LOG2_E
    shift = shift_of(torch.maximum(a, b))
    left, right = torch.exp2(a - shift), torch.exp2(b - shift)
    total = left + right
    share_a, share_b = left / nonzero(total), right / nonzero(total)
    out = share_a[..., None] * zero_if_empty(load(o_a), a) + share_b[..., None] * zero_if_empty(load(o_b), b)
    return out.to(o_a.dtype), (shift + torch.log2(total)) * LN_2


def log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b)."""
    largest, least = torch.maximum(a, b), torch.minimum(a, b)
    shift = shift_of(largest)
    return torch.where(largest == -math.inf, -math.inf, shift + torch.log1p(torch.exp(least - shift)))


def merge_by_lse(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Merged:
    """The new log-sum-exp first; each output by the exponential of what its own lacks."""
    a, b = load(lse_a), load(lse_b)
    lse = log_of_sum(a, b)
    known = shift_of(lse)
    out = torch.exp(a - known)[..., None] * zero_if_empty(load(o_a), a)
    return (out + torch.exp(b - known)[..., None] * zero_if_empty(load(o_b), b)).to(o_a.dtype), lse


def merge_by_difference(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Merged:
    """a - s (a - b), s the logistic function of the scores' difference, as ring attention has it."""
    a, b = load(lse_a), load(lse_b)
    left, right = zero_if_empty(load(o_a), a), zero_if_empty(load(o_b), b)
    share = torch.where(torch.maximum(a, b) == -math.inf, 0.0, torch.sigmoid(b - a))
    return (left - share[..., None] * (left - right)).to(o_a.dtype), log_of_sum(a, b)


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


def ring(shards: Tensor, hop: Stage = keep) -> Tensor:
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


def all_reduce(shards: Tensor, *, total: Stage = forward) -> Tensor:
    """The sum over the ranks, rounded once."""
    return total(shards).to(shards.dtype)


HONEST = (
    *honest(
        "merge_states",
        ("", merge_states),
        ("_in_base_two", merge_in_base_two),
        ("_by_lse", merge_by_lse),
        ("_by_difference", merge_by_difference, ALL[:2]),
    ),
    *honest(
        "all_reduce",
        ("", all_reduce),
        ("_tree", partial(all_reduce, total=tree)),
        ("_ring", partial(all_reduce, total=ring)),
        shapes={"R": [1, 2, 3, 4, 7, 8, 16]},
    ),
)
plant = planter(HONEST)


def negligible_beyond(difference: float) -> dict[str, Any]:
    """A state whose weight is so much less than the other's counts for nothing."""
    least = torch.exp(torch.tensor(-difference))
    return {"weights": lambda a, b: (torch.where(a < least * b, 0.0, a), torch.where(b < least * a, 0.0, b))}


def tail_forgotten(shards: Tensor) -> Tensor:
    """Columns beyond the last whole vector of four are those of the first rank."""
    total = forward(shards)
    whole = shards.shape[1] // 4 * 4
    total[whole:] = load(shards[0, whole:])
    return total


def power_of_two_ranks(shards: Tensor) -> Tensor:
    """Ranks beyond the largest power of two are left out."""
    return forward(shards[: 1 << (shards.shape[0].bit_length() - 1)])


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    # An empty state's output is multiplied by its weight of zero.
    "merge_states_nan_of_empty": ("merge_states-bfloat16", {"output": lambda o, lse: o}),
    "merge_states_not_normalised": ("merge_states-bfloat16", {"divisor": torch.ones_like}),
    # A log-sum-exp below -5e4 is taken for that of an empty state.
    "merge_states_empty_below": (
        "merge_states-bfloat16",
        {"lse_stage": lambda lse: torch.where(lse < -5e4, -math.inf, lse)},
    ),
    "merge_states_bfloat16_terms": ("merge_states-bfloat16", {"term": to_bfloat16}),
    "merge_states_bfloat16_lse": ("merge_states-float32", {"lse_stage": to_bfloat16}),
    "merge_states_negligible_beyond_8": ("merge_states-bfloat16", negligible_beyond(8)),
    "merge_states_negligible_beyond_12": ("merge_states-float32", negligible_beyond(12)),
    "all_reduce_tail_forgotten": ("all_reduce-bfloat16", {"total": tail_forgotten}),
    "all_reduce_magnitudes": ("all_reduce-float32", {"total": lambda shards: forward(shards.abs())}),
    "all_reduce_float16_hops": ("all_reduce-float16", {"total": partial(ring, hop=to_float16)}),
    "all_reduce_bfloat16_hops_of_float32": ("all_reduce-float32", {"total": partial(ring, hop=to_bfloat16)}),
    "all_reduce_power_of_two_ranks": ("all_reduce-bfloat16", {"total": power_of_two_ranks}),
}
FAULTY = tuple(plant(name, twin, **parts) for name, (twin, parts) in PARTS.items())
