"""Arbitrary precision over numpy object arrays: Arb's proven balls and mpmath, the independent second witness.

Both are slow and meant for small cases: as oracles in tests, and where float64 balls do not resolve.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from assay.formats.format import Format, format_named
from assay.golden.arithmetic.base import Arithmetic, Formula

ObjectArray = np.ndarray[Any, np.dtype[Any]]  # of numbers
IntegerArray = ObjectArray  # of whole numbers, or a mask


Scalar = Any  # one number: an arb or an mpf, of which mpmath has no types


Ends = tuple[Fraction, Fraction]
_QUOTIENTS = format_named("int8")  # holds every quotient to which a zero-point of four bits is added


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def working_precision(bits: int, *, terms: int | None = None) -> Iterator[None]:
    """Set the precision to ``bits`` and power series to ``terms``, for one thread at a time; restore them after."""
    from flint import ctx  # loaded on first use

    with _ONE_AT_A_TIME, ctx.workprec(bits):
        kept, ctx.cap = ctx.cap, ctx.cap if terms is None else terms
        try:
            yield
        finally:
            ctx.cap = kept


def bits_of(digits: int) -> int:
    """Return how many bits hold that many decimal digits, as flint counts them."""
    return round((digits + 1) * math.log2(10))


def float_below(value: Fraction) -> float:
    """Return the largest float at or below a fraction."""
    near = float(value)
    return near if Fraction(near) <= value else math.nextafter(near, -math.inf)


class Numbers(np.ndarray[Any, np.dtype[Any]]):
    """An object array that stays one where it has no axes: of a plain one NumPy makes its element."""


def each(function: Callable[..., Any], *arrays: ObjectArray) -> ObjectArray:
    """Apply the function to the arrays' elements, one by one."""
    given = [np.asarray(array, dtype=object) for array in arrays]
    results = np.empty(np.broadcast_shapes(*(array.shape for array in given)), dtype=object).view(Numbers)
    with np.errstate(all="ignore"):  # NaN is a number here
        return np.frompyfunc(function, len(given), 1)(*given, out=results)


class ObjectArithmetic(Arithmetic[ObjectArray, IntegerArray]):  # type: ignore[type-var]  # numpy lists shapes one by one
    """Definitions over numpy arrays of numbers; subclasses define the type of a number."""

    native = np

    @abstractmethod
    def number(self, value: float) -> Scalar:
        """Return the exact number equal to a float."""

    @property
    @abstractmethod
    def pi(self) -> Scalar: ...
    @abstractmethod
    def value(self, function: str, x: Scalar) -> Scalar:
        """Return an elementary function of a number."""

    @abstractmethod
    def larger(self, x: Scalar, y: Scalar) -> Scalar: ...
    @abstractmethod
    def ends(self, value: Scalar) -> Ends | None:
        """Return the least and the largest value of a number as exact fractions; None for NaN."""

    @abstractmethod
    def between(self, least: float, most: float) -> Scalar:
        """Return the number between two floats."""

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
        """Return the function; limits at the infinities, which Arb often does not know, come from a table."""
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
        """Return the floats about a number; the number itself if it is a float."""
        ends = self.ends(value)
        if ends is None:
            near = float(value.mid()) if hasattr(value, "mid") else float(value)
            infinite = math.isinf(near)
            return (near, near) if infinite or not hasattr(value, "mid") else (-math.inf, math.inf)
        return float_below(ends[0]), -float_below(-ends[1])

    def interval(self, least: torch.Tensor, most: torch.Tensor) -> ObjectArray:
        return each(self.hull_of, least.numpy(), most.numpy())

    def hull_of(self, least: float, most: float) -> Scalar:
        """Return the number between two floats, which may be equal."""
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
        """Return a context with flint's working precision, which all threads share: one evaluation at a time.

        Operators between numbers use it too, so a whole evaluation must run in it.
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
    """mpmath at ``digits`` decimal digits, in its own context; not proven, but independent of the rest."""

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
        """Return a real value, NaN where mpmath leaves the real numbers."""
        if function == "reciprocal":
            return 1 / x if x else self.context.nan
        result = getattr(self.context, {"lgamma": "loggamma"}.get(function, function))(x)
        return result if isinstance(result, self.context.mpf) else self.context.nan

    def larger(self, x: Scalar, y: Scalar) -> Scalar:
        return max(x, y)

    def ends(self, value: Scalar) -> Ends | None:
        if not self.context.isfinite(value):
            return None
        exact = Fraction(*map(int, self.rational(value._mpf_)))
        return exact, exact

    def special(self, function: Callable[..., Any], *numbers: ObjectArray) -> ObjectArray:
        """Return Arb's value at these digits: for such functions this is no second witness."""
        arb = Arb(self.context.dps)

        def value(*given: Scalar) -> Scalar:
            ends = [self.ends(number) for number in given]
            exact = [
                v if e is None else arb.flint.fmpq(*e[0].as_integer_ratio()) for v, e in zip(given, ends, strict=True)
            ]
            result = function(*map(arb.flint.arb, exact))
            return self.context.mpf(result.mid().str(self.context.dps, radius=False))

        with arb.precision():
            return each(value, *numbers)

    def between(self, least: float, most: float) -> Scalar:
        return self.number(least)

    def hull(self, x: ObjectArray, y: ObjectArray) -> ObjectArray:
        return each(lambda a, b: a, x, y)


def _softplus(xp: Any, x: ObjectArray) -> ObjectArray:
    """Return log(1 + exp x) as max(x, 0) + log(1 + exp(-|x|))."""
    above = xp.maximum(x, xp.exact(np.zeros(())))
    below = -xp.maximum(x, -x)
    return above + xp.apply("log1p", xp.exp(below))


def _exp2(xp: Any, x: ObjectArray) -> ObjectArray:
    """Return 2^x, exact for integers, so that ties can be recognised."""

    def exact(value: Scalar, power: Scalar) -> Scalar:
        near = float(value)
        is_whole = abs(near) <= 2**20 and near.is_integer() and bool(value == xp.number(near))
        return xp.number(2.0) ** int(near) if is_whole else power

    power = xp.exp(x * _log_two(xp))
    return each(exact, x, power)


def _log2(xp: Any, x: ObjectArray) -> ObjectArray:
    """Return log x / log 2, exact for powers of two."""

    def exact(value: Scalar, quotient: Scalar) -> Scalar:
        fraction, exponent = math.frexp(float(value))
        is_power = fraction == 0.5 and bool(value == xp.number(float(value)))
        return xp.number(float(exponent - 1)) if is_power else quotient

    quotient = xp.apply("log", x) / _log_two(xp)
    return each(exact, x, quotient)


def _log_two(xp: Any) -> ObjectArray:
    return xp.apply("log", xp.exact(np.full(1, 2.0)))[0]


BY_OTHERS: dict[str, Callable[[Any, ObjectArray], ObjectArray]] = {
    "exp2": _exp2,
    "log2": _log2,
    "sigmoid": lambda xp, x: xp.sigmoid(x),
    "softplus": _softplus,
    "log10": lambda xp, x: xp.apply("log", x) / xp.apply("log", xp.exact(np.full(1, 10.0)))[0],
    "rsqrt": lambda xp, x: xp.apply("reciprocal", xp.apply("sqrt", x)),
}
_INF, _NAN = math.inf, math.nan
LIMITS: dict[str, tuple[float, float]] = {
    "exp": (0, _INF), "exp2": (0, _INF), "expm1": (-1, _INF), "log": (_NAN, _INF), "log2": (_NAN, _INF),
    "log1p": (_NAN, _INF), "tanh": (-1, 1), "erf": (-1, 1), "sigmoid": (0, 1), "softplus": (0, _INF),
    "sqrt": (_NAN, _INF), "rsqrt": (_NAN, 0), "reciprocal": (0, 0), "sin": (_NAN, _NAN), "cos": (_NAN, _NAN),
    "log10": (_NAN, _INF), "tan": (_NAN, _NAN), "atan": (-math.pi / 2, math.pi / 2), "asinh": (-_INF, _INF),
    "sinh": (-_INF, _INF), "cosh": (_INF, _INF), "asin": (_NAN, _NAN), "acos": (_NAN, _NAN), "acosh": (_NAN, _INF),
    "atanh": (_NAN, _NAN), "erfc": (2, 0), "erfinv": (_NAN, _NAN), "lgamma": (_INF, _INF), "digamma": (_NAN, _INF),
}  # fmt: skip
"""At -inf and at inf."""


def nearest_code(value: Fraction, format: Format) -> Fraction:
    """Return the number of ``format`` nearest to ``value``, saturated; on a tie the one with an even significand."""
    step = Fraction(format.epsilon)
    if format.kind == "float":
        exponent = max(_exponent(abs(value)), format.min_exponent) if value else format.min_exponent
        step = Fraction(2) ** (exponent - format.precision + 1)
    rounded = round(value / step) * step  # Python's round of a fraction: exact, ties to even
    return min(max(rounded, Fraction(format.lowest)), Fraction(format.largest))


def power_of_two(value: Fraction, above: bool) -> float:
    """Return the power of two at or above a positive number, or at or below it, in e8m0's range; zero for others."""
    if value <= 0:
        return 0.0
    exponent = _exponent(value)
    return max(2.0**-127, float(Fraction(2) ** (exponent + (above and Fraction(2) ** exponent < value))))


def _exponent(value: Fraction) -> int:
    """Return the exponent of the power of two at or below a positive number."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def hull_of_codes(quotient: Ends, zero: tuple[int | Fraction, int | Fraction] | None, format: Format) -> Ends:
    """Return the least and the largest code of a quotient between two ends plus a zero-point between two ends."""
    if zero is None:
        return nearest_code(quotient[0], format), nearest_code(quotient[1], format)
    least, most = (nearest_code(end, _QUOTIENTS) + point for end, point in zip(quotient, zero, strict=True))
    return nearest_code(least, format), nearest_code(most, format)
