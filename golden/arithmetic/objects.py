"""Arbitrary precision over numpy object arrays: Arb's proven balls and mpmath, the independent second witness.

Both are slow and meant for small cases: as oracles in tests, and where float64 balls do not resolve.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from assay.formats.format import format_named
from assay.golden.arithmetic.base import Arithmetic, Formula
from assay.golden.arithmetic.codes import Ends, hull_of_codes, power_of_two
from assay.golden.arithmetic.object_arrays import IntegerArray, Numbers, ObjectArray, each, float_below
from assay.golden.arithmetic.object_functions import BY_OTHERS, LIMITS
from assay.golden.arithmetic.working_precision import bits_of, working_precision

Scalar = Any  # one number: an arb or an mpf, of which mpmath has no types


class ObjectArithmetic(Arithmetic[ObjectArray, IntegerArray]):  # type: ignore[type-var]  # numpy lists shapes one by one
    """Definitions over numpy arrays of numbers; subclasses say what a number is."""

    native = np

    @abstractmethod
    def number(self, value: float) -> Scalar:
        """The exact number equal to a float."""

    @property
    @abstractmethod
    def pi(self) -> Scalar: ...
    @abstractmethod
    def value(self, function: str, x: Scalar) -> Scalar:
        """An elementary function of a number."""

    @abstractmethod
    def larger(self, x: Scalar, y: Scalar) -> Scalar: ...
    @abstractmethod
    def ends(self, value: Scalar) -> Ends | None:
        """The least and the largest that a number may be, as exact fractions; None where it is none."""

    @abstractmethod
    def between(self, least: float, most: float) -> Scalar:
        """The number that lies between two floats."""

    def apply(self, name: str, x: ObjectArray) -> ObjectArray:
        return each(lambda value: self.value(name, value), x)

    def exact(self, values: object) -> ObjectArray:
        array = values.double().numpy() if hasattr(values, "double") else np.asarray(values, dtype=np.float64)
        return each(self.number, array)

    def integers(self, values: object) -> IntegerArray:
        return np.asarray(values).astype(np.int64)

    def constant(self, formula: Formula) -> ObjectArray:
        value = np.empty((), dtype=object).view(Numbers)
        value[()] = formula(lambda number: self.value("sqrt", self.number(number)), self.pi)
        return value

    def sigmoid(self, x: ObjectArray) -> ObjectArray:
        return 1 / (1 + self.exp(-x))

    def rsqrt(self, x: ObjectArray) -> ObjectArray:
        return 1 / self.apply("sqrt", x)

    def function(self, name: str, x: ObjectArray) -> ObjectArray:
        """The limits at the infinities, of which Arb often knows nothing, stand in a table."""
        least, most = LIMITS[name]
        below, above = self._is_minus_infinity(x), self._is_minus_infinity(-x)
        finite = self.where(below | above, self.exact(np.ones(())), x)
        y = BY_OTHERS[name](self, finite) if name in BY_OTHERS else self.apply(name, finite)
        return self.where(~below, self.where(~above, y, most), least)

    def maximum(self, x: ObjectArray, y: ObjectArray) -> ObjectArray:
        return each(self.larger, x, y)

    def where(self, mask: IntegerArray, x: ObjectArray, y: ObjectArray | float) -> ObjectArray:
        other = y if isinstance(y, np.ndarray) else self.number(float(y))
        return np.where(np.asarray(mask), x, other)

    def above(self, x: ObjectArray, bound: float) -> IntegerArray:
        return each(lambda value: bool(value > bound), x).astype(bool)

    def sum(self, x: ObjectArray, axis: int = -1, *, rescaled: bool = False) -> ObjectArray:
        return self.exact(np.zeros(1)).reshape((1,) * x.ndim) + x.sum(axis=axis, keepdims=True)

    def max(self, x: ObjectArray) -> ObjectArray:
        largest = self.exact(np.full((*x.shape[:-1], 1), -np.inf))
        for column in range(x.shape[-1]):
            largest = self.maximum(largest, x[..., column : column + 1])
        return largest

    def matmul(self, a: ObjectArray, b: ObjectArray, plus: ObjectArray | None = None) -> ObjectArray:
        product = (
            np.matmul(a, b)
            if a.shape[-1]
            else self.exact(np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])))
        )
        return product if plus is None else product + plus

    def enclosure(self, x: ObjectArray) -> tuple[torch.Tensor, torch.Tensor]:
        least, most = (np.empty(x.shape) for _ in range(2))
        for index in np.ndindex(x.shape):
            least[index], most[index] = self.floats(x[index])
        return torch.from_numpy(least), torch.from_numpy(most)

    def floats(self, value: Scalar) -> tuple[float, float]:
        """The floats about a number; itself where it is one."""
        ends = self.ends(value)
        if ends is None:
            near = float(value.mid()) if hasattr(value, "mid") else float(value)
            infinite = math.isinf(near)
            return (near, near) if infinite or not hasattr(value, "mid") else (-math.inf, math.inf)
        return float_below(ends[0]), -float_below(-ends[1])

    def interval(self, least: torch.Tensor, most: torch.Tensor) -> ObjectArray:
        return each(self.hull_of, least.numpy(), most.numpy())

    def hull_of(self, least: float, most: float) -> Scalar:
        """The number that lies between two floats, which may be one."""
        return self.number(float(least)) if least == most or least != least else self.between(float(least), float(most))

    def topk_index(self, x: ObjectArray, k: int) -> IntegerArray:
        return np.argsort(-x.astype(np.float64), axis=-1, stable=True)[..., :k]

    def power_of_two(self, x: ObjectArray, *, above: bool) -> ObjectArray:
        def power(value: Scalar) -> Scalar:
            ends = self.ends(value)
            return self.number(math.nan) if ends is None else self.between(*(power_of_two(end, above) for end in ends))

        return each(power, x)

    def quantize(
        self,
        x: ObjectArray,
        scale: ObjectArray,
        format: str,
        zero: ObjectArray | None = None,
        stored: ObjectArray | None = None,
    ) -> ObjectArray:
        target = format_named(format)

        def code(value: Scalar, step: Scalar, point: Scalar) -> Scalar:
            quotient = self.ends(value * 0 if step == 0 else value / step)
            points = (point, point) if isinstance(point, int) else self.ends(point)
            if quotient is None or points is None:
                return self.number(math.nan)
            return self.between(*map(float, hull_of_codes(quotient, None if zero is None else points, target)))

        points = np.zeros((), dtype=np.int64) if zero is None else zero
        return each(code, x, scale, points.astype(object))

    def exp_shifted(self, x: ObjectArray, shift: ObjectArray) -> ObjectArray:
        hidden = self._is_minus_infinity(x) & ~self._is_minus_infinity(shift)
        return self.where(hidden, self.exact(np.zeros(())), self.exp(self.where(hidden, shift * 0, x - shift)))

    def logsumexp(self, x: ObjectArray) -> ObjectArray:
        largest = self.max(x)
        infinite = self._is_minus_infinity(largest) | self._is_minus_infinity(-largest)
        shift = self.where(infinite, self.exact(np.zeros(())), largest)
        total = self.where(infinite, self.exact(np.ones(())), self.sum(self.exp_shifted(x, shift)))
        return self.where(infinite, largest, shift + self.log(total))

    def gate_mul(self, x: ObjectArray, gate: ObjectArray) -> ObjectArray:
        limit = self.where(self._is_minus_infinity(x), self.exact(np.zeros(())), x)
        return self.where(self._is_minus_infinity(x) | self._is_minus_infinity(-x), limit, x * gate)

    def _is_minus_infinity(self, x: ObjectArray) -> IntegerArray:
        least = self.number(-np.inf)
        return each(lambda value: bool(value == least), x).astype(bool)

    def attend(
        self, scores: ObjectArray, visible: IntegerArray, values: ObjectArray, sinks: ObjectArray | None
    ) -> tuple[ObjectArray, ObjectArray]:
        visible = np.broadcast_to(np.asarray(visible), scores.shape)
        zero = self.exact(np.zeros(()))
        largest = self.max(self.where(visible, scores, -np.inf))
        if sinks is not None:
            largest = self.maximum(largest, sinks)
        shift = self.where(self._is_minus_infinity(largest), zero, largest)
        weights = self.where(visible, self.exp(self.where(visible, scores, zero) - shift), zero)
        if sinks is None:  # a key seen alone has weight one, which a ball less itself would hide
            alone = (visible.sum(-1, keepdims=True) == 1) & visible & (scores * 0 == 0)
            weights = self.where(alone, self.exact(np.ones(())), weights)
        total = self.sum(weights)
        if sinks is not None:
            total = total + self.exp(sinks - shift)
        sees = np.any(visible, -1, keepdims=True)
        empty = ~np.asarray(sees) if sinks is None else np.zeros((1,) * scores.ndim, dtype=bool)
        safe = self.where(empty, self.exact(np.ones(())), total)
        lse = self.where(~empty, shift + self.log(safe), -np.inf)
        terms = (weights / safe)[..., None] * values[..., None, :, :]
        return self.sum(self.where(visible[..., None], terms, zero), axis=-2)[..., 0, :], lse


class Arb(ObjectArithmetic):
    """Real balls with proven enclosures (python-flint), at ``digits`` decimal digits of working precision."""

    def __init__(self, digits: int = 50) -> None:
        import flint  # loaded on first use

        self.flint = flint
        self.digits = digits

    def precision(self) -> AbstractContextManager[None]:
        """flint's working precision, which is the process's and all threads': one evaluation at a time, then restored.

        Operators between numbers take it too, so a whole evaluation is to be run in it.
        """
        return working_precision(bits_of(self.digits))

    def number(self, value: float) -> Scalar:
        return self.flint.arb(value)

    @property
    def pi(self) -> Scalar:
        return self.flint.arb.pi()

    def constant(self, formula: Formula) -> ObjectArray:
        with self.precision():
            return super().constant(formula)

    def apply(self, name: str, x: ObjectArray) -> ObjectArray:
        with self.precision():
            return super().apply(name, x)

    def value(self, function: str, x: Scalar) -> Scalar:
        return 1 / x if function == "reciprocal" else getattr(x, function)()

    def larger(self, x: Scalar, y: Scalar) -> Scalar:
        return x.max(y)

    def ends(self, value: Scalar) -> Ends | None:
        if not value.is_finite():
            return None
        (least, low), (most, high) = (map(int, end.man_exp()) for end in (value.lower(), value.upper()))
        return least * Fraction(2) ** low, most * Fraction(2) ** high

    def special(self, function: Callable[..., Any], *numbers: ObjectArray) -> ObjectArray:
        return each(function, *numbers)

    def between(self, least: float, most: float) -> Scalar:
        return self.flint.arb((least + most) / 2, (most - least) / 2)

    def hull(self, x: ObjectArray, y: ObjectArray) -> ObjectArray:
        return each(lambda a, b: a.union(b), x, y)


class Multiprecision(ObjectArithmetic):
    """mpmath at ``digits`` decimal digits, in a context of its own; not proven, but independent of the rest."""

    def __init__(self, digits: int = 50) -> None:
        import mpmath  # loaded on first use

        self.context = mpmath.MPContext()
        self.context.dps = digits
        self.rational = mpmath.libmp.to_rational

    def number(self, value: float) -> Scalar:
        return self.context.mpf(value)

    @property
    def pi(self) -> Scalar:
        return +self.context.pi

    def value(self, function: str, x: Scalar) -> Scalar:
        """A real value, NaN where mpmath leaves the real numbers."""
        if function == "reciprocal":
            return 1 / x if x else self.context.nan
        found = getattr(self.context, {"lgamma": "loggamma"}.get(function, function))(x)
        return found if isinstance(found, self.context.mpf) else self.context.nan

    def larger(self, x: Scalar, y: Scalar) -> Scalar:
        return max(x, y)

    def ends(self, value: Scalar) -> Ends | None:
        if not self.context.isfinite(value):
            return None
        exact = Fraction(*map(int, self.rational(value._mpf_)))
        return exact, exact

    def special(self, function: Callable[..., Any], *numbers: ObjectArray) -> ObjectArray:
        """By Arb, at these digits: of such functions it is no second witness."""
        arb = Arb(self.context.dps)

        def value(*given: Scalar) -> Scalar:
            ends = [self.ends(number) for number in given]
            exact = [
                v if e is None else arb.flint.fmpq(*e[0].as_integer_ratio()) for v, e in zip(given, ends, strict=True)
            ]
            found = function(*map(arb.flint.arb, exact))
            return self.context.mpf(found.mid().str(self.context.dps, radius=False))

        with arb.precision():
            return each(value, *numbers)

    def between(self, least: float, most: float) -> Scalar:
        return self.number(least)

    def hull(self, x: ObjectArray, y: ObjectArray) -> ObjectArray:
        return each(lambda a, b: a, x, y)
