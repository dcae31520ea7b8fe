"""Double-double arithmetic with certified radii: 25 to 30 digits at the speed of float64 vectors and BLAS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.arithmetic.base import Arithmetic, Formula
from assay.golden.arithmetic.double_double import DoubleDouble, as_pair, full_where, scattered, where
from assay.golden.arithmetic.exact_arb import through_arb
from assay.golden.arithmetic.exact_exponential import exp
from assay.golden.arithmetic.exact_functions import FUNCTIONS
from assay.golden.arithmetic.ozaki import exact_matmul, exact_sum
from assay.golden.arithmetic.real import Real, torch_function, weighted_values

Tensor = torch.Tensor

_REAL = Real()


class Exact(Arithmetic[DoubleDouble, Tensor]):
    """Numbers are pairs of float64 with a radius; an operation without a fast way goes through Arb, element by element.

    Numbers beyond float64's comfort (products below 2^-900, factors above 2^996) get a wide or infinite radius.
    """

    def exact(self, values: object) -> DoubleDouble:
        return DoubleDouble(torch.as_tensor(values).to(torch.float64))

    def constant(self, formula: Formula) -> DoubleDouble:
        return through_arb("constant", formula)

    def apply(self, name: str, x: DoubleDouble) -> DoubleDouble:
        return FUNCTIONS[name](x) if name in FUNCTIONS else through_arb("apply", name, x)

    def function(self, name: str, x: DoubleDouble) -> DoubleDouble:
        """Limits at the infinities as Arb's arithmetic states them, poles and undefined values as IEEE 754 does.

        Of an exact number such a value is known: its radius is zero.
        """
        special = ~torch.isfinite(x.high)
        if not x.high.numel():
            return through_arb("function", name, x)
        y = self.apply(name, self.where(special, as_pair(1.0), x))
        special |= ~torch.isfinite(y.high)
        if not bool(special.any()):
            return y
        exceptions, plain = through_arb("function", name, x[special]), torch_function(name, x.high[special])
        known = exceptions.high.isnan() & (x[special].radius == 0) & ~torch.isfinite(plain)
        high = torch.where(known, plain, exceptions.high)
        return scattered(y, special, DoubleDouble(high, exceptions.low, exceptions.radius.masked_fill(known, 0.0)))

    def maximum(self, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
        """The larger; where the balls overlap it may be the other one, which is no farther off than their radii."""
        larger = (x.high > y.high) | ((x.high == y.high) & (x.rest >= y.rest)) | x.high.isnan()
        chosen = self.where(larger, x, y)
        if x.rad is None and y.rad is None:
            return chosen
        return DoubleDouble(chosen.high, chosen.low, torch.maximum(x.radius, y.radius).expand(chosen.shape))

    def where(self, mask: Tensor, x: DoubleDouble, y: DoubleDouble | float) -> DoubleDouble:
        return where(mask, x, as_pair(y))

    def above(self, x: DoubleDouble, bound: float) -> Tensor:
        return (x.high > bound) | ((x.high == bound) & (x.rest > 0))

    def power_of_two(self, x: DoubleDouble, *, above: bool) -> DoubleDouble:
        """Exact fractions of Arb's balls."""
        return through_arb("power_of_two", x, above=above)

    def quantize(
        self,
        x: DoubleDouble,
        scale: DoubleDouble,
        format: str,
        zero: DoubleDouble | Tensor | None = None,
        stored: DoubleDouble | None = None,
    ) -> DoubleDouble:
        """Exact fractions of Arb's balls, which tell a tie."""
        return through_arb("quantize", x, scale, format, zero, stored)

    def sum(self, x: DoubleDouble, axis: int = -1, *, rescaled: bool = False) -> DoubleDouble:
        finite, special = _finite(x)
        if special is None:
            return exact_sum(x, axis)
        return _propagate_nonfinite(
            exact_sum(finite, axis), x.high.sum(axis, keepdim=True), special.any(axis, keepdim=True)
        )

    def max(self, x: DoubleDouble) -> DoubleDouble:
        if x.shape[-1] == 0:
            return DoubleDouble(x.high.new_full((*x.shape[:-1], 1), -math.inf))
        high = x.high.amax(-1, keepdim=True)
        low = None
        if x.low is not None:
            low = torch.where(x.high == high, x.rest, -math.inf).amax(-1, keepdim=True)
            low = torch.where(torch.isfinite(low), low, 0.0)
        return DoubleDouble(high, low, None if x.rad is None else x.radius.amax(-1, keepdim=True))

    def matmul(self, a: DoubleDouble, b: DoubleDouble, plus: DoubleDouble | None = None) -> DoubleDouble:
        (left, bad_rows), (right, bad_columns) = _finite(a), _finite(b)
        added, bad = (None, None) if plus is None else _finite(plus)
        product = exact_matmul(left, right, added)
        if bad_rows is None and bad_columns is None and bad is None:
            return product
        lost = torch.zeros(product.shape, dtype=torch.bool)
        if bad_rows is not None:
            lost |= bad_rows.any(-1, keepdim=True)
        if bad_columns is not None:
            lost |= bad_columns.any(-2, keepdim=True)
        if bad is not None:
            lost |= bad
        return _propagate_nonfinite(product, _REAL.matmul(a.high, b.high, None if plus is None else plus.high), lost)

    def rearranged(self, change: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[DoubleDouble]) -> DoubleDouble:
        low = None if all(part.low is None for part in parts) else change([part.rest for part in parts])
        rad = None if all(part.rad is None for part in parts) else change([part.radius for part in parts])
        return DoubleDouble(change([part.high for part in parts]), low, rad)

    def enclosure(self, x: DoubleDouble) -> tuple[Tensor, Tensor]:
        if x.low is None and x.rad is None:
            return x.high, x.high
        off = x.rest.abs() + x.radius
        off = torch.where(off == 0, 0.0, off * (1 + 2.0**-30) + x.high.abs() * 2.0**-52)
        return x.high - off, x.high + off

    def interval(self, least: Tensor, most: Tensor) -> DoubleDouble:
        if torch.equal(least, most):
            return DoubleDouble(least)
        open_end = (least.isinf() | most.isinf()) & (least != most)
        mid = torch.where(least == most, least, torch.where(open_end, 0.0, least / 2 + most / 2))
        radius = torch.maximum(most - mid, mid - least) * (1 + 2.0**-30)
        return DoubleDouble(mid, None, torch.where(least == most, 0.0, torch.where(open_end, math.inf, radius)))

    def hull(self, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
        (a, b), (c, d) = self.enclosure(x), self.enclosure(y)
        return self.interval(torch.minimum(a, c), torch.maximum(b, d))

    def special(self, function: Callable[..., Any], *numbers: DoubleDouble) -> DoubleDouble:
        found: DoubleDouble = through_arb("special", function, *numbers)
        return found

    def topk_index(self, x: DoubleDouble, k: int) -> Tensor:
        order = torch.argsort(x.rest, dim=-1, descending=True, stable=True)
        places = torch.argsort(torch.gather(x.high, -1, order), dim=-1, descending=True, stable=True)
        return torch.gather(order, -1, places)[..., :k]

    def exp_shifted(self, x: DoubleDouble, shift: DoubleDouble) -> DoubleDouble:
        if not x.high.numel() or x.high.amin().item() > -math.inf:
            return exp(x - shift)
        hidden = (x.high == -math.inf) & torch.isfinite(shift.high)
        return self.where(~hidden, exp(self.where(hidden, shift, x) - shift), 0.0)

    def logsumexp(self, x: DoubleDouble) -> DoubleDouble:
        largest = self.max(x)
        infinite = torch.isinf(largest.high)
        shift = self.where(infinite, as_pair(0.0), largest)
        total = self.where(infinite, as_pair(1.0), self.sum(self.exp_shifted(x, shift)))
        return self.where(infinite, largest, shift + self.log(total))

    def gate_mul(self, x: DoubleDouble, gate: DoubleDouble) -> DoubleDouble:
        infinite = torch.isinf(x.high)
        if not bool(infinite.any()):
            return x * gate
        return self.where(infinite, DoubleDouble(x.high.clamp(min=0)), x * gate)

    def attend(
        self, scores: DoubleDouble, visible: Tensor, values: DoubleDouble, sinks: DoubleDouble | None
    ) -> tuple[DoubleDouble, DoubleDouble]:
        """The sum of weights divides once, after the product with the values."""
        visible = torch.broadcast_to(torch.as_tensor(visible), scores.shape)
        largest = self.max(self.where(visible, scores, -math.inf))
        if sinks is not None:
            largest = self.maximum(largest, sinks)
        shift = self.where(largest.high == -math.inf, as_pair(0.0), largest)
        weights = self.where(visible, exp(self.where(visible, scores, shift) - shift), 0.0)
        total = self.sum(weights)
        if sinks is not None:
            total = total + exp(sinks - shift)
        empty = ~visible.any(-1, keepdim=True) if sinks is None else torch.zeros((1,) * len(scores.shape)).bool()
        safe = self.where(empty, as_pair(1.0), total)
        lse = self.where(~empty, shift + self.log(safe), -math.inf)
        finite, special = _finite(values)
        out = self.matmul(weights, finite) / safe
        if special is not None:
            reached = weighted_values((weights / safe).high, visible, values.high)
            out = _propagate_nonfinite(out, reached, (visible.double() @ special.double()) > 0)
        return out, lse


def _finite(x: DoubleDouble) -> tuple[DoubleDouble, Tensor | None]:
    """x with zeros in place of infinities and NaN, and where those are (None: nowhere)."""
    if math.isfinite(x.high.sum().item()):
        return x, None
    special = ~torch.isfinite(x.high)
    return DoubleDouble(torch.where(special, 0.0, x.high), x.low, x.rad), special


def _propagate_nonfinite(x: DoubleDouble, high: Tensor, lost: Tensor) -> DoubleDouble:
    """x, but float64's own infinity or NaN, of which nothing is claimed, where an operand was one."""
    lost = torch.broadcast_to(lost, x.high.shape)
    return DoubleDouble(
        torch.where(lost, high, x.high), torch.where(lost, 0.0, x.rest), x.radius + full_where(lost, math.inf)
    )
