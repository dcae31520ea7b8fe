"""Faulty merging of partial attention, and faulty sums over ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_merge import MERGE, Steps, all_reduce, forward, merge_states, ring
from .numerics import keep, load, rounded_to, store_saturated, store_truncated

plant = planter(MERGE)


def as_it_is(o: Tensor, lse: Tensor) -> Tensor:
    """An empty state's output is multiplied by its weight of zero."""
    return o


def no_shift(largest: Tensor) -> Tensor:
    """The maximum is forgotten."""
    return torch.zeros_like(largest)


def half_shift(largest: Tensor) -> Tensor:
    """An infinite maximum is subtracted too: -inf - -inf."""
    return largest


def swapped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Each output gets the other's weight."""
    return b, a


def alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both states count alike."""
    return torch.ones_like(a), torch.ones_like(b)


def only_sum(total: Tensor) -> Tensor:
    """Outputs are added, not averaged."""
    return torch.ones_like(total)


def with_sentinel(lse: Tensor) -> Tensor:
    """-inf is kept as a large negative number."""
    return lse.clamp(min=-1e30)


def empty_below(lse: Tensor) -> Tensor:
    """A log-sum-exp below -5e4 is taken for that of an empty state."""
    return torch.where(lse < -5e4, -math.inf, lse)


MERGE_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nan_of_empty": ("bfloat16", {"output": as_it_is}),
    "maximum_forgotten": ("float32", {"shift": no_shift}),
    "two_empty_nan": ("bfloat16", {"shift": half_shift}),
    "base_two_given": ("bfloat16", {"exp": torch.exp2, "log": torch.log2}),
    "lse_in_base_two": ("float16", {"lse": lambda lse: lse / math.log(2)}),
    "lse_of_larger": ("bfloat16", {"log": torch.zeros_like}),
    "weights_swapped": ("bfloat16", {"weights": swapped}),
    "alike": ("float32", {"weights": alike}),
    "not_normalised": ("bfloat16", {"divisor": only_sum}),
    "zero_by_zero": ("float32", {"divisor": keep}),
    "sentinel": ("bfloat16", {"lse": with_sentinel}),
    "empty_below": ("bfloat16", {"lse": empty_below}),
    "bfloat16_terms": ("bfloat16", {"term": partial(rounded_to, torch.bfloat16)}),
    "bfloat16_lse": ("float32", {"lse": partial(rounded_to, torch.bfloat16)}),
    "truncated_store": ("bfloat16", {"store": store_truncated}),
}


def without_last(shards: Tensor) -> Tensor:
    """The last rank is left out."""
    return forward(shards[:-1])


def first_twice(shards: Tensor) -> Tensor:
    """The first rank counts twice."""
    return forward(shards) + load(shards[0])


def mean(shards: Tensor) -> Tensor:
    """The average."""
    return forward(shards) / shards.shape[0]


def only_first(shards: Tensor) -> Tensor:
    """The first rank keeps what it has."""
    return load(shards[0])


def tail_forgotten(shards: Tensor) -> Tensor:
    """Columns beyond the last whole vector of four are those of the first rank."""
    total = forward(shards)
    whole = shards.shape[1] // 4 * 4
    total[whole:] = load(shards[0, whole:])
    return total


def magnitudes(shards: Tensor) -> Tensor:
    """Signs are lost."""
    return forward(shards.abs())


def rounded_hops(dtype: torch.dtype) -> Any:
    """A ring that rounds at each hop."""
    return partial(ring, hop=partial(rounded_to, dtype))


def power_of_two_ranks(shards: Tensor) -> Tensor:
    """Ranks beyond the largest power of two are left out."""
    return forward(shards[: 1 << (shards.shape[0].bit_length() - 1)])


SUM_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "last_dropped": ("bfloat16", {"total": without_last}),
    "first_twice": ("float16", {"total": first_twice}),
    "mean": ("bfloat16", {"total": mean}),
    "only_first": ("float32", {"total": only_first}),
    "tail_forgotten": ("bfloat16", {"total": tail_forgotten}),
    "magnitudes": ("float32", {"total": magnitudes}),
    "bfloat16_hops": ("bfloat16", {"total": rounded_hops(torch.bfloat16)}),
    "float16_hops": ("float16", {"total": rounded_hops(torch.float16)}),
    "bfloat16_hops_of_float32": ("float32", {"total": rounded_hops(torch.bfloat16)}),
    "power_of_two_ranks": ("bfloat16", {"total": power_of_two_ranks}),
    "truncated": ("bfloat16", {"store": store_truncated}),
    "saturated": ("float16", {"store": store_saturated}),
}

FAULTY_MERGE: tuple[Faulty, ...] = (
    *(
        plant(f"merge_states_{name}", f"merge_states-{dtype}", partial(merge_states, steps=Steps(**step)))
        for name, (dtype, step) in MERGE_FAULTS.items()
    ),
    *(
        plant(f"all_reduce_{name}", f"all_reduce-{dtype}", partial(all_reduce, **step))
        for name, (dtype, step) in SUM_FAULTS.items()
    ),
)
