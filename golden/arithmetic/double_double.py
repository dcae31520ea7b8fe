"""Double-double numbers: unevaluated sums of two float64, with a radius that certifies them.

u = 2^-53. Bounds are derived where they are used; they hold for round to nearest and normalised operands, |low| <= u
|high|, which every operation here returns. Sources: T. J. Dekker, *A floating-point technique for extending the
available precision*, Numer. Math. 18 (1971); D. E. Knuth, TAOCP 2, 4.2.2; M. Joldes, J.-M. Muller, V. Popescu, *Tight
and rigorous error bounds for basic building blocks of double-word arithmetic*, ACM TOMS 44 (2017); T. Ogita, S. M.
Rump, S. Oishi, *Accurate sum and dot product*, SISC 26 (2005), for underflow.

torch's operations round once each; operations that may be fused (addcmul) are used only where the bound covers both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

U2 = 2.0**-106
_SUM = 3.01 * U2
_PRODUCT = 8.01 * U2
_QUOTIENT = 12.1 * U2
_ROOT = 4.5 * U2
TINY = 2.0**-1000
"""A bound on one operation's error by underflow: TwoProduct loses at most 5 * 2^-1074 (Ogita, Rump & Oishi).

It is a normal number, since processors add subnormal ones ten times slower.
"""
_PRODUCT_SAFE = 2.0**-900  # products at or above are split without underflow
_QUOTIENT_SAFE = 2.0**-400  # quotients and divisors at or above are far from underflow
_SPLITTER = 2.0**27 + 1


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b rounded to float64, and its error, exactly (Knuth)."""
    total = a + b
    part = total - a
    rest = a - (total - part)
    return total, rest.add_(b - part)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `two_sum`, for |a| >= |b| or a = 0 (Dekker)."""
    total = a + b
    return total, b - (total - a)


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return halves of at most 26 bits (Veltkamp); NaN beyond 2^996."""
    big = a * _SPLITTER
    high = big - (big - a)
    return high, a - high


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a b rounded to float64, and its error (Dekker): exact, except for at most `TINY` in case of underflow."""
    product, excess = product_and_excess(a, b)
    return product, excess.neg_()


def product_and_excess(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a b rounded to float64, and by how much that exceeds the product."""
    product = a * b
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    # Products of halves, and these differences, are exact, so that fused and separate operations agree.
    excess = torch.addcmul(product, a_high, b_high, value=-1)
    excess = excess.addcmul_(a_high, b_low, value=-1).addcmul_(a_low, b_high, value=-1)
    return product, excess.addcmul_(a_low, b_low, value=-1)


def full_where(mask: Tensor, value: float) -> Tensor:
    """Return a float64 tensor with ``value`` where the mask holds, else zero."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(mask, value)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent for integers, clamped to float64's normal range."""
    return ((exponent.to(torch.int64).clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


@dataclass(frozen=True, eq=False)
class DoubleDouble:
    """Numbers with |high + low - exact| <= rad for each element; ``low`` and ``rad``: None for zero, else
    broadcastable.

    Where ``high`` is not finite only the class of the number is known, and ``rad`` is infinite.
    """

    high: Tensor
    low: Tensor | None = None
    rad: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.high.shape)

    @property
    def rest(self) -> Tensor:
        """Return ``low`` as a tensor."""
        return torch.zeros_like(self.high) if self.low is None else torch.broadcast_to(self.low, self.high.shape)

    @property
    def radius(self) -> Tensor:
        """Return ``rad`` as a tensor."""
        return torch.zeros_like(self.high) if self.rad is None else torch.broadcast_to(self.rad, self.high.shape)

    def map(self, change: Callable[[Tensor], Tensor]) -> DoubleDouble:
        """Apply the same rearrangement to all parts."""
        low = None if self.low is None else change(self.rest)
        return DoubleDouble(change(self.high), low, None if self.rad is None else change(self.radius))

    def __getitem__(self, key: object) -> DoubleDouble:
        return self.map(lambda part: part[key])  # type: ignore[index]  # whatever torch takes

    def reshape(self, *shape: int | tuple[int, ...]) -> DoubleDouble:
        return self.map(lambda part: part.reshape(*shape))  # type: ignore[arg-type]  # torch takes both forms

    def __neg__(self) -> DoubleDouble:
        return DoubleDouble(-self.high, None if self.low is None else -self.low, self.rad)

    def __add__(self, other: DoubleDouble | float) -> DoubleDouble:
        """Add: exact on float64 operands, else Joldes, Muller & Popescu's algorithm 6, relative error 3 u^2 / (1 -
        4u)."""
        x, y = self, as_pair(other)
        rad = add_radii(x.rad, y.rad)
        high, rest = two_sum(x.high, y.high)
        if x.low is None and y.low is None:
            return _exact(high, rest, rad)
        if x.low is None or y.low is None:
            carried, last = (y.low if x.low is None else x.low), None
        else:
            carried, last = two_sum(x.low, y.low)
        assert carried is not None
        high, rest = fast_two_sum(high, rest + carried)
        high, low = fast_two_sum(high, rest if last is None else rest.add_(last))
        return normalised(high, low, relative(rad, high, _SUM))

    def __sub__(self, other: DoubleDouble | float) -> DoubleDouble:
        return self + (-as_pair(other))

    def __mul__(self, other: DoubleDouble | float) -> DoubleDouble:
        """Multiply. With P = |x.high y.high|: the products of a high and a low word lose u^2 P each, their sum 2 u^2 P,
        adding the rest of the main product 3 u^2 P, omitting the product of the low words u^2 P: together 8 u^2 P.
        """
        x, y = self, as_pair(other)
        high, rest = two_product(x.high, y.high)
        rad = None
        if x.rad is not None:
            rad = x.rad * y.high.abs()
        if y.rad is not None:
            rad = add_radii(rad, y.rad * x.high.abs())
            rad = rad if x.rad is None else add_radii(rad, x.rad * y.rad)
        if rad is not None:
            rad = guard_underflow(rad * (1 + 2.0**-50), x, y)  # only high words were multiplied
        if x.low is None and y.low is None:
            vanishing = (high.abs() < _PRODUCT_SAFE) & (x.high != 0) & (y.high != 0)
            if rad is not None or bool(vanishing.any()):
                rad = add_radii(rad, full_where(vanishing, TINY))
            return _exact(high, rest, rad)
        if x.low is not None:
            rest = rest + x.low * y.high if y.low is None else rest + (x.low * y.high).add_(x.high * y.low)
        else:
            assert y.low is not None
            rest = rest + x.high * y.low
        size = high.abs()
        underflow = None
        if size.numel() and not size.amin().item() >= _PRODUCT_SAFE:
            underflow = full_where((size < _PRODUCT_SAFE) & (x.high != 0) & (y.high != 0), TINY)
        return normalised(*fast_two_sum(high, rest), add_radii(add_radii(rad, size.mul_(_PRODUCT)), underflow))

    def __truediv__(self, other: DoubleDouble | float) -> DoubleDouble:
        """Divide. With X = |x.high|, q = x.high / y.high rounded: x.high - q y.high, at most u X, is computed exactly.

        The remainder x - q y, of at most 3 u X, has an error of (1 + 2 + 3) u^2 X; dividing it by y.high instead of y
        adds 3 u^2 X, rounding 3 u^2 X: together 12 u^2 |q|.
        """
        x, y = self, as_pair(other)
        quotient = x.high / y.high
        product, excess = product_and_excess(quotient, y.high)
        remainder = (x.high - product).add_(excess)
        is_exact = x.low is None and y.low is None and x.rad is None and y.rad is None
        own, divisor = quotient.abs(), y.high.abs()
        if own.numel() and not min(own.amin().item(), divisor.amin().item()) >= _QUOTIENT_SAFE:
            underflow = (TINY + TINY / divisor).masked_fill(x.high == 0, 0.0)
            own = own.mul_(_QUOTIENT).add_(underflow)
        else:
            own = own.mul_(_QUOTIENT)
        if is_exact:
            own = torch.where((remainder == 0) & ((product.abs() >= _PRODUCT_SAFE) | (x.high == 0)), 0.0, own)
        if y.low is not None:
            remainder = remainder - (quotient * y.low if x.low is None else (quotient * y.low).sub_(x.low))
        elif x.low is not None:
            remainder = remainder + x.low
        high, low = fast_two_sum(quotient, remainder / y.high)
        if is_exact:
            return normalised(high, low, own if bool(own.any()) else None)
        rad = x.rad
        if y.rad is not None:
            rad = add_radii(rad, quotient.abs() * y.rad)
            assert rad is not None
            least = divisor - y.rad
            rad = torch.where(least > 0, rad / least, math.inf)
        elif rad is not None:
            rad = rad / divisor
        if rad is not None:
            own = own.add_(guard_underflow(rad, x, y), alpha=1 + 2.0**-40)
        return normalised(high, low, own)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> DoubleDouble:
        return as_pair(other) - self

    def __rtruediv__(self, other: float) -> DoubleDouble:
        return as_pair(other) / self


def as_pair(value: DoubleDouble | float) -> DoubleDouble:
    """Return a number as it is, or convert a Python float exactly."""
    return value if isinstance(value, DoubleDouble) else DoubleDouble(torch.tensor(float(value), dtype=torch.float64))


def where(mask: Tensor, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
    """Return x where the mask holds, else y."""
    low = None if x.low is None and y.low is None else torch.where(mask, x.rest, y.rest)
    rad = None if x.rad is None and y.rad is None else torch.where(mask, x.radius, y.radius)
    return DoubleDouble(torch.where(mask, x.high, y.high), low, rad)


def scattered(x: DoubleDouble, mask: Tensor, y: DoubleDouble) -> DoubleDouble:
    """Return x with its masked elements replaced by the numbers of y, in order."""
    high, low, rad = x.high.clone(), x.rest.clone(), x.radius.clone()
    high[mask], low[mask], rad[mask] = y.high, y.rest, y.radius
    return DoubleDouble(high, low, rad)


def add_radii(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of radii; None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def guard_underflow(rad: Tensor, x: DoubleDouble, y: DoubleDouble) -> Tensor:
    """Return ``rad``, products with the radii of x and y, made positive where they underflowed to zero."""
    if not rad.numel() or rad.amin().item() > TINY:
        return rad
    for one, other in ((x, y), (y, x)):
        if one.rad is not None:
            nonzero = (other.high != 0) if other.rad is None else (other.high != 0) | (other.rad > 0)
            rad = rad + full_where((one.rad > 0) & nonzero, 2.0**-1072)
    return rad


def relative(rad: Tensor | None, size: Tensor, factor: float) -> Tensor:
    """Return ``rad`` + ``factor`` |size|."""
    own = size.abs().mul_(factor)
    return own if rad is None else own + rad


def normalised(high: Tensor, low: Tensor, rad: Tensor | None) -> DoubleDouble:
    """Return a number from its parts, with an infinite radius where an operation overflowed or was undefined.

    In every operation of this module ``low`` is not finite where ``high`` is not.
    """
    if math.isfinite(low.sum().item()):
        return DoubleDouble(high, low, rad)
    lost = ~torch.isfinite(low)
    radius = torch.where(lost, math.inf, torch.zeros_like(high) if rad is None else rad)
    return DoubleDouble(high, torch.where(lost, 0.0, low), radius)


def _exact(high: Tensor, rest: Tensor, rad: Tensor | None) -> DoubleDouble:
    """Return the result of an error-free transform; without a low word if all errors are zero."""
    return normalised(high, rest, rad) if bool(rest.any()) else DoubleDouble(high, None, rad)


def square_root(x: DoubleDouble) -> DoubleDouble:
    """Return sqrt x. With s = sqrt(x.high) rounded, x.high - s^2 is exact; (x - s^2) / 2s has an error of 4.2 u^2 s.

    The remainder, at most 3 u x, is rounded (3 u^2 x, divided by 2s), divided by 2s instead of s + sqrt(x) (1.2 u^2 s)
    and rounded again (1.5 u^2 s). A radius r of x adds r / s; infinite where x may be negative.
    """
    root = torch.sqrt(x.high)
    product, lost = two_product(root, root)
    remainder = (x.high - product).sub_(lost)
    own = root * _ROOT + full_where(x.high < _PRODUCT_SAFE, TINY * 2.0**540)
    if x.low is None and x.rad is None:
        own = torch.where((remainder == 0) & ((x.high >= _PRODUCT_SAFE) | (x.high == 0)), 0.0, own)
    elif x.low is not None:
        remainder = remainder + x.low
    low = torch.where(root == 0, 0.0, remainder / (2 * root))
    if x.rad is not None:
        own = own + torch.where(x.rad == 0, 0.0, torch.where(x.high > x.rad, x.rad * (1 + 2.0**-40) / root, math.inf))
    return normalised(*fast_two_sum(root, low), own)
