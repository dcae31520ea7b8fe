"""Double-double arithmetic with certified radii: 25 to 30 digits at the speed of float64 vectors and BLAS."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.arithmetic.base import Arithmetic
from assay.golden.arithmetic.double_double import DoubleDouble, filled, lift, square_root
from assay.golden.arithmetic.exact_arb import through_arb
from assay.golden.arithmetic.exact_exponential import exponential
from assay.golden.arithmetic.exact_functions import FUNCTIONS
from assay.golden.arithmetic.ozaki import exact_matmul, exact_sum
from assay.golden.arithmetic.real import Real, torch_function, weighted_values

Tensor = torch.Tensor

_REAL = Real()


class Exact(Arithmetic):
    """Numbers are pairs of float64 with a radius; an operation without a fast way goes through Arb, element by element.

    Numbers beyond float64's comfort (products below 2^-900, factors above 2^996) get a wide or infinite radius.
    """

    def exact(self, values: Any) -> DoubleDouble:
        return DoubleDouble(torch.as_tensor(values).to(torch.float64))

    def integers(self, values: Any) -> Tensor:
        return torch.as_tensor(values).to(torch.int64)

    def constant(self, formula: Callable[[Callable[[Any], Any], Any], Any]) -> DoubleDouble:
        return through_arb("constant", formula)

    def exp(self, x: DoubleDouble) -> DoubleDouble:
        return exponential(x)

    def log(self, x: DoubleDouble) -> DoubleDouble:
        return FUNCTIONS["log"](x)

    def erf(self, x: DoubleDouble, *, absolute: bool = False) -> DoubleDouble:
        return FUNCTIONS["erf"](x)

    def tanh(self, x: DoubleDouble, *, absolute: bool = False) -> DoubleDouble:
        return FUNCTIONS["tanh"](x)

    def sigmoid(self, x: DoubleDouble) -> DoubleDouble:
        return FUNCTIONS["sigmoid"](x)

    def rsqrt(self, x: DoubleDouble) -> DoubleDouble:
        return lift(1.0) / square_root(x)

    def function(self, name: str, x: DoubleDouble) -> DoubleDouble:
        """Limits at the infinities as Arb's arithmetic states them, poles and undefined values as IEEE 754 does.

        Of an exact number such a value is known: its radius is zero.
        """
        special = ~torch.isfinite(x.high)
        if name not in FUNCTIONS or not x.high.numel():
            return through_arb("function", name, x)
        y = FUNCTIONS[name](self.where(special, lift(1.0), x))
        special |= ~torch.isfinite(y.high)
        if not bool(special.any()):
            return y
        exceptions, plain = through_arb("function", name, x[special]), torch_function(name, x.high[special])
        known = exceptions.high.isnan() & (x[special].radius == 0) & ~torch.isfinite(plain)
        high = torch.where(known, plain, exceptions.high)
        return _put(y, special, DoubleDouble(high, exceptions.low, exceptions.radius.masked_fill(known, 0.0)))

    def minimum(self, x: DoubleDouble, bound: float) -> DoubleDouble:
        return -self.maximum(-x, lift(-bound))

    def maximum(self, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
        """The larger; where the balls overlap it may be the other one, which is no farther off than their radii."""
        larger = (x.high > y.high) | ((x.high == y.high) & (x.rest >= y.rest)) | x.high.isnan()
        chosen = self.where(larger, x, y)
        if x.rad is None and y.rad is None:
            return chosen
        return DoubleDouble(chosen.high, chosen.low, torch.maximum(x.radius, y.radius).expand(chosen.shape))

    def where(self, mask: Any, x: DoubleDouble, y: DoubleDouble | float) -> DoubleDouble:
        other = lift(y)
        low = None if x.low is None and other.low is None else torch.where(mask, x.rest, other.rest)
        rad = None if x.rad is None and other.rad is None else torch.where(mask, x.radius, other.radius)
        return DoubleDouble(torch.where(mask, x.high, other.high), low, rad)

    def sum(self, x: DoubleDouble, axis: int = -1, *, rescaled: bool = False) -> DoubleDouble:
        finite, special = _finite(x)
        if special is None:
            return exact_sum(x, axis)
        return _spoil(exact_sum(finite, axis), x.high.sum(axis, keepdim=True), special.any(axis, keepdim=True))

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
        return _spoil(product, _REAL.matmul(a.high, b.high, None if plus is None else plus.high), lost)

    def swap(self, x: DoubleDouble) -> DoubleDouble:
        return x.map(lambda part: part.transpose(-1, -2))

    def concatenate(self, parts: Sequence[DoubleDouble], axis: int = 0) -> DoubleDouble:
        return _join(torch.cat, parts, axis)

    def stack(self, parts: Sequence[DoubleDouble], axis: int = -1) -> DoubleDouble:
        return _join(torch.stack, parts, axis)

    def top(self, x: DoubleDouble, k: int) -> Tensor:
        order = torch.argsort(x.rest, dim=-1, descending=True, stable=True)
        places = torch.argsort(torch.gather(x.high, -1, order), dim=-1, descending=True, stable=True)
        return torch.gather(order, -1, places)[..., :k]

    def take(self, x: DoubleDouble, index: Any) -> DoubleDouble:
        return x.map(lambda part: torch.gather(part, -1, index))

    def exp_shifted(self, x: DoubleDouble, shift: DoubleDouble) -> DoubleDouble:
        if not x.high.numel() or x.high.amin().item() > -math.inf:
            return exponential(x - shift)
        hidden = (x.high == -math.inf) & torch.isfinite(shift.high)
        return self.where(~hidden, exponential(self.where(hidden, shift, x) - shift), 0.0)

    def logsumexp(self, x: DoubleDouble) -> DoubleDouble:
        largest = self.max(x)
        infinite = torch.isinf(largest.high)
        shift = self.where(infinite, lift(0.0), largest)
        total = self.where(infinite, lift(1.0), self.sum(self.exp_shifted(x, shift)))
        return self.where(infinite, largest, shift + self.log(total))

    def gated(self, x: DoubleDouble, gate: DoubleDouble) -> DoubleDouble:
        infinite = torch.isinf(x.high)
        if not bool(infinite.any()):
            return x * gate
        return self.where(infinite, DoubleDouble(x.high.clamp(min=0)), x * gate)

    def attend(
        self, scores: DoubleDouble, visible: Any, values: DoubleDouble, sinks: DoubleDouble | None
    ) -> tuple[DoubleDouble, DoubleDouble]:
        """The sum of weights divides once, after the product with the values."""
        visible = torch.broadcast_to(torch.as_tensor(visible), scores.shape)
        largest = self.max(self.where(visible, scores, -math.inf))
        if sinks is not None:
            largest = self.maximum(largest, sinks)
        shift = self.where(largest.high == -math.inf, lift(0.0), largest)
        weights = self.where(visible, exponential(self.where(visible, scores, shift) - shift), 0.0)
        total = self.sum(weights)
        if sinks is not None:
            total = total + exponential(sinks - shift)
        empty = ~visible.any(-1, keepdim=True) if sinks is None else torch.zeros((1,) * len(scores.shape)).bool()
        safe = self.where(empty, lift(1.0), total)
        lse = self.where(~empty, shift + self.log(safe), -math.inf)
        finite, special = _finite(values)
        out = self.matmul(weights, finite) / safe
        if special is not None:
            reached = weighted_values((weights / safe).high, visible, values.high)
            out = _spoil(out, reached, (visible.double() @ special.double()) > 0)
        return out, lse


def _finite(x: DoubleDouble) -> tuple[DoubleDouble, Tensor | None]:
    """x with zeros in place of infinities and NaN, and where those are (None: nowhere)."""
    if math.isfinite(x.high.sum().item()):
        return x, None
    special = ~torch.isfinite(x.high)
    return DoubleDouble(torch.where(special, 0.0, x.high), x.low, x.rad), special


def _spoil(x: DoubleDouble, high: Tensor, where: Tensor) -> DoubleDouble:
    """x, but float64's own infinity or NaN, of which nothing is claimed, where an operand was one."""
    where = torch.broadcast_to(where, x.high.shape)
    return DoubleDouble(
        torch.where(where, high, x.high), torch.where(where, 0.0, x.rest), x.radius + filled(where, math.inf)
    )


def _put(x: DoubleDouble, mask: Tensor, y: DoubleDouble) -> DoubleDouble:
    """x with the numbers of y where the mask holds."""
    high, low, rad = x.high.clone(), x.rest.clone(), x.radius.clone()
    high[mask], low[mask], rad[mask] = y.high, y.rest, y.radius
    return DoubleDouble(high, low, rad)


def _join(join: Any, parts: Sequence[DoubleDouble], axis: int) -> DoubleDouble:
    low = None if all(part.low is None for part in parts) else join([part.rest for part in parts], axis)
    rad = None if all(part.rad is None for part in parts) else join([part.radius for part in parts], axis)
    return DoubleDouble(join([part.high for part in parts], axis), low, rad)


def _by_arb(name: str) -> Callable[..., Any]:
    def method(self: Exact, *arguments: Any, **keywords: Any) -> Any:
        return through_arb(name, *arguments, **keywords)

    method.__doc__ = f"{name}, through Arb."
    return method


_exact: Any = Exact
for _name in _exact.__abstractmethods__:  # what the interface has and this class has no fast way for
    setattr(Exact, _name, _by_arb(_name))
abc.update_abstractmethods(_exact)
