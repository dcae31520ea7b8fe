"""What a number is known to be: ends, order, and what follows where a radius leaves a choice open.

Masks here are torch's; where numbers leave an order open, three-valued logic has a mask of what is certain and one of
what is possible, and as a number 0, 1, or what lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch

from assay.golden.arithmetic.number import Idx, N

Tensor = torch.Tensor


@dataclass(frozen=True)
class Order:
    """Where x is certainly less than y, more, the same, or unordered (one is NaN)."""

    less: Tensor
    more: Tensor
    same: Tensor
    unordered: Tensor

    @property
    def open(self) -> Tensor:
        """Where it is none of these for certain."""
        return ~(self.less | self.more | self.same | self.unordered)


class Decisions(Generic[N, Idx]):
    """Ends and order of numbers; an arithmetic has at least `enclosure`, `interval` and `hull` of its own."""

    def enclosure(self, x: N) -> tuple[Tensor, Tensor]:
        """The least and the largest float64 that numbers may be, equal where they are known; NaN is its own end."""
        raise NotImplementedError

    def interval(self, least: Tensor, most: Tensor) -> N:
        """Numbers between ends."""
        raise NotImplementedError

    def hull(self, x: N, y: N) -> N:
        """Numbers that may be those of x or those of y."""
        raise NotImplementedError

    def compare(self, x: N, y: N) -> Order:
        """The order of two numbers, element by element; by default that of their difference and zero."""
        apart: Any = x - y
        (low, high), (least, most) = self.enclosure(apart), self.enclosure(x)
        below, above = self.enclosure(y)
        less, more = (most < below) | (high < 0), (least > above) | (low > 0)
        same = ((low == 0) & (high == 0)) | ((least == most) & (below == above) & (least == below))
        unordered = (least.isnan() & most.isnan()) | (below.isnan() & above.isnan())
        return Order(less, more, same, unordered)

    def held(self, y: N, x: N) -> tuple[N, bool]:
        """y, which a function without poles gives of x, as a kernel holds it; whether here it overflows."""
        return y, False

    def open_beyond(self, x: N) -> N:
        """x, of which nothing is known where it is infinite or NaN: an overflow that is none in truth led to it."""
        return x

    def select(self, certain: Tensor, possible: Tensor, x: N, y: N) -> N:
        """x where ``certain``, y where not ``possible``, either between."""
        chosen = self.chosen(certain, x, y)
        unsure = possible & ~certain
        return self.chosen(unsure, self.hull(x, y), chosen) if bool(unsure.any()) else chosen

    def chosen(self: Any, mask: Tensor, x: N, y: N) -> N:
        """x where a mask of torch's holds, else y."""
        found: N = self.where(self.integers(mask).astype(bool) if self.native is not torch else mask, x, y)
        return found

    def larger_of(self: Any, x: N, y: N) -> N:
        """The larger of two numbers, no farther off than the one that it is; NaN where either is."""
        found: N = self.maximum(x, y)
        return found

    def smaller_of(self, x: N, y: N) -> N:
        return -self.larger_of(-x, -y)

    def step(self, function: Callable[[Tensor], Tensor], x: N) -> N:
        """A function that rises in steps (floor, ceil, trunc, round): where x lies about a step, what is between."""
        return self.interval(*map(function, self.enclosure(x)))

    def power(self: Any, x: N, y: N | float) -> N:
        """x^y; of whole small y by products."""
        if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 64:
            count = int(abs(y))
            product: Any = self.exact(torch.ones(tuple(map(int, x.shape)), dtype=torch.float64))
            for _ in range(count):
                product = product * x
            return 1.0 / product if y < 0 else product
        zero = self.compare(x, x * 0.0)
        safe = self.chosen(zero.same, x * 0.0 + 1.0, x)
        found: N = self.exp(self.apply("log", safe) * y)
        if not bool(zero.same.any()):
            return found
        rises = isinstance(y, (int, float)) and y > 0
        return self.chosen(zero.same, x if rises else 1.0 / x, found)

    def root(self: Any, x: N) -> N:
        """The square root of a sum of squares, which is zero at least, whatever its radius says."""
        found: N = self.function("sqrt", x)
        return found

    def special(self, function: Callable[..., Any], *numbers: N) -> N:
        """A function of Arb's numbers, element by element, that only Arb encloses."""
        raise NotImplementedError

    def settled(self: Any, x: N) -> N:
        """The number, of which nothing is open where it is infinite."""
        return x

    def prod(self: Any, x: N) -> N:
        """The product along the last axis, which is kept; in any order."""
        total: Any = self.exact(torch.ones((*map(int, x.shape[:-1]), 1), dtype=torch.float64))
        for place in range(x.shape[-1]):
            total = total * x[..., place : place + 1]
        found: N = total
        return found

    def largest_of(self: Any, x: N) -> N:
        """The largest along the last axis, which is kept; off by no more than may become the largest."""
        found: N = self.max(x)
        return found

    def variance(self: Any, x: N, correction: float = 0.0) -> N:
        """sum (x - mean)^2 / (n - correction) along the last axis, which is kept."""
        centred = x - self.mean(x)
        found: N = self.sum(centred * centred) / float(x.shape[-1] - correction)
        return found

    def ordered(self, x: N) -> N:
        """The numbers of the last axis in ascending order: the k-th smallest of the ends holds the k-th smallest."""
        least, most = self.enclosure(x)
        return self.interval(least.sort(-1).values, most.sort(-1).values)

    def cummax(self: Any, x: N) -> N:
        """The largest so far along the last axis."""
        parts = [x[..., :1]]
        for place in range(1, x.shape[-1]):
            parts.append(self.larger_of(parts[-1], x[..., place : place + 1]))
        found: N = self.concatenate(parts, -1)
        return found
