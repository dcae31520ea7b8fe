"""One ``[[golden]]`` table of a campaign: every combination of what it lists, each found by its number.

Nothing is expanded in advance: 10^9 combinations take as little memory as ten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.registry import Spec, spec
from assay.golden.signature import Signature

_LEAST, _PER_ELEMENT, _PER_STEP = 8.0, 2e-4, 2e-6  # milliseconds: a record written, drawn, evaluated
_ARB, _FLOAT64 = 100.0, 15  # beyond so many digits, Arb evaluates
_REMEMBERED = 256  # recipes whose seeds are being gone through
_TURNS = 6  # of the Feistel network; four make a pseudo-random permutation (Luby and Rackoff, 1988)


@dataclass(frozen=True)
class Task:
    """A golden to make: its inputs' recipe, and how many digits (None: as many as float64 certifies)."""

    recipe: Recipe
    digits: int | None = None

    def __str__(self) -> str:
        return f"{self.recipe}" + (f"; {self.digits} digits" if self.digits else "")


@dataclass(frozen=True)
class Entry:
    """A spec and the lists to combine.

    ``cells`` are the pairs of options and sizes; ``dtypes`` and ``distributions`` name one for all tensors that can
    have it, or one per tensor. ``sample``: only that many of the combinations, always the same.
    """

    spec: str
    cells: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]]
    dtypes: Sequence[str | Mapping[str, str]]
    distributions: Sequence[str | Mapping[str, str]]
    digits: Sequence[int | None]
    seeds: Sequence[int]
    sample: int | None = None

    @cached_property
    def combinations(self) -> int:
        """How many there are."""
        return prod(map(len, (self.cells, self.dtypes, self.distributions, self.digits, self.seeds)))

    @cached_property
    def count(self) -> int:
        """How many of them are tasks."""
        return self.combinations if self.sample is None else min(self.sample, self.combinations)

    @cached_property
    def effort(self) -> float:
        """About how many milliseconds a task takes, to tell the time left; measured in docs/scale.md."""
        signatures = [(spec(self.spec).signature(options), sizes) for options, sizes in self.cells]
        each = [_effort(spec(self.spec), signature, sizes) for signature, sizes in signatures]
        slow = [_ARB if digits is not None and digits > _FLOAT64 else 1.0 for digits in self.digits]
        return sum(each) / len(each) * sum(slow) / len(slow)

    def task(self, place: int) -> Task:
        """The task number ``place``; neighbours differ in the seed first."""
        if self.sample is not None:
            place = shuffled(place, self.combinations, self.spec)
        place, seed = divmod(place, len(self.seeds))
        place, digits = divmod(place, len(self.digits))
        return Task(replace(self._recipe(place), seed=self.seeds[seed]), self.digits[digits])

    def _recipe(self, place: int) -> Recipe:
        """The recipe that tasks which differ only in seed and digits have in common."""
        if place not in self._recipes:
            if len(self._recipes) >= _REMEMBERED:
                self._recipes.clear()
            rest, distribution = divmod(place, len(self.distributions))
            cell, dtype = divmod(rest, len(self.dtypes))
            options, sizes = self.cells[cell]
            values = self.distributions[distribution]
            self._recipes[place] = recipe(self.spec, sizes, self.dtypes[dtype], options=options, values=values)
        return self._recipes[place]

    @cached_property
    def _recipes(self) -> dict[int, Recipe]:
        return {}


def _effort(definition: Spec, signature: Signature, sizes: Mapping[str, int]) -> float:
    elements = sum(prod(tensor.shape(sizes)) for tensor in signature.tensors)
    return _LEAST + _PER_ELEMENT * elements + _PER_STEP * definition.cost(sizes)


def shuffled(place: int, count: int, salt: str) -> int:
    """Where a permutation of 0..count-1, chosen by ``salt``, sends ``place``: a sample needs no memory.

    A Feistel network over the next even number of bits, repeated until it lands below ``count`` (J. Black and
    P. Rogaway, *Ciphers with arbitrary finite domains*, 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(_TURNS):
            digest = hashlib.blake2b(f"{salt}:{turn}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = left << half | right
        if place < count:
            return place
