"""Numbers of a domain: intervals, shares that add up to one, sorted rows, symmetric positive definite matrices.

What is drawn belongs to its domain after the rounding to its dtype, in every format and size. Sums of shares are
exactly one, since shares are differences of whole numbers of one power of two. Matrices are diagonally dominant, or
exact multiples of ones that are known to be definite, so that no rounding makes them indefinite. Times a power of two
they stay definite: that is how they have amplitudes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from assay.formats.codes import all_values
from assay.formats.format import Format
from assay.golden.errors import RecipeError
from assay.golden.inputs.random_bits import integers, uniform
from assay.golden.signature import Interval, TensorSpec

Array = npt.NDArray[Any]
_FINEST = 44  # bits after the point of shares: cumulative sums in float64 have a few more
_MOST_AMPLIFIED = 60  # the most bits of a matrix's amplitude: float64 evaluates products of some too
_PLAIN = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)  # what an interval's plainest number may be


def plain_number(interval: Interval) -> float:
    """Return a simple number of an interval: one, a power of two near one, or near an end or the middle."""
    near = [interval.low + 1, interval.high - 1, (interval.low + interval.high) / 2, interval.low, interval.high]
    return next((value for value in (0.0, *_PLAIN, *near) if value in interval), interval.low)


def names_in_domain(tensor: TensorSpec, real: Iterable[str]) -> tuple[str, ...]:
    """Return the distributions of a tensor with a domain, the plainest first; ``real`` are those of real numbers."""
    if tensor.role == "simplex":
        return tuple(_SHARES)
    if tensor.role == "spd":
        return tuple(_MATRICES)
    interval = tensor.interval
    if interval is None:
        return tuple(real)
    left_out = {name for name, value in (("zeros", 0.0), ("ones", 1.0)) if value not in interval}
    constant = ("constant",) if len(left_out) == 2 else ()
    return (*(name for name in real if name not in left_out), "ends", *constant)


def drawn_in_domain(tensor: TensorSpec, draws: Any, name: str, real: Callable[[Any], Array] | None) -> Array:
    """Return float64 numbers of the domain, numbers of the draws' format; ``real`` is a distribution of real numbers.

    Raises `RecipeError` if the format has no number of an interval.
    """
    if tensor.role == "simplex":
        return _shares(_SHARES[name](draws), draws.format)
    if tensor.role == "spd":
        return _MATRICES[name](draws)
    if tensor.interval is None:
        assert real is not None
        return np.sort(real(draws), axis=-1) if draws.shape else real(draws)
    ends = ends_of(tensor.name, tensor.interval, draws.format)
    if name == "ends":
        middle = plain_number(tensor.interval)
        return np.asarray([*ends, middle])[integers(draws.bits("ends"), 3)].clip(*ends)
    values = (
        np.full(draws.shape, plain_number(tensor.interval)) if real is None else _folded(real(draws), tensor.interval)
    )
    return values.clip(*ends)


def _folded(values: Array, interval: Interval) -> Array:
    """Return the numbers, reflected at the finite ends of an interval until inside; NaN becomes its plainest."""
    low, high = interval.low, interval.high
    values = np.where(np.isnan(values), plain_number(interval), values)
    if math.isinf(low) and math.isinf(high):
        return values
    if math.isinf(high):
        return low + abs(values) if low else abs(values)
    if math.isinf(low):
        return high - abs(values) if high else -abs(values)
    width = high - low
    if not width:
        return np.full(values.shape, low)
    return low + abs(width - np.fmod(abs(values - low), 2 * width))


@lru_cache(maxsize=256)
def ends_of(name: str, interval: Interval, format: Format) -> tuple[float, float]:
    """Return the least and the greatest number of a format in an interval. Raises `RecipeError` if there is none."""
    if format.bits <= 16:
        values = all_values(format).numpy()
        inside = [value for value in values[np.isfinite(values)].tolist() if value in interval]
        if inside:
            return min(inside), max(inside)
    else:
        kind: Any = np.float64 if format.bits == 64 else np.float32
        with np.errstate(over="ignore"):
            low, high = (kind(min(max(end, -format.largest), format.largest)) for end in (interval.low, interval.high))
        low = low if float(low) in interval else np.nextafter(low, kind(np.inf))
        high = high if float(high) in interval else np.nextafter(high, kind(-np.inf))
        if float(low) in interval and float(high) in interval:
            return float(low), float(high)
    raise RecipeError(f"{name}: no number of {format} is in{interval}; expected an interval that holds some")


def into_domain(tensor: TensorSpec, values: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the numbers, those outside of the tensor's interval replaced by its plainest one."""
    if tensor.interval is None:
        return values
    low, high = ends_of(tensor.name, tensor.interval, format)
    inside = (values >= low) & (values <= high)
    return torch.where(inside, values, min(max(plain_number(tensor.interval), low), high))


def _shares(weights: Array, format: Format) -> Array:
    """Return nonnegative numbers of the format, in proportion to positive weights, whose rows add up to exactly one.

    Cumulative sums are rounded to whole numbers of 2^-k, the last of which is 2^k. A weight below 2^-m becomes at most
    2^(k-m) + 1 of these, and k = m + p - 1 lets a significand of p bits hold every one.
    """
    if not weights.size:
        return weights
    sums = np.cumsum(weights, axis=-1)
    sums /= sums[..., -1:]
    most = np.diff(sums, axis=-1, prepend=0.0).max(axis=-1, keepdims=True)
    magnitude = -np.frexp(most)[1].clip(None, 0)
    least = 1 - np.frexp(format.smallest_subnormal)[1] if format.kind == "float" else 0
    digits = np.minimum(magnitude + max(format.precision - 1, 0), min(least, _FINEST)).astype(np.int32)
    whole = np.rint(np.ldexp(sums, digits))
    return np.ldexp(np.diff(whole, axis=-1, prepend=0.0), -digits)


def _power(exponent: Array) -> Array:
    return np.ldexp(1.0, exponent.astype(np.int32))


def _one_share(draws: Any) -> Array:
    count = draws.shape[-1]
    owner = integers(draws.bits("owner", ignore=[-1]), max(count, 1))
    return np.where(draws.position() - draws.start[-1] == owner, 1.0, 0.0)


def _few_shares(draws: Any) -> Array:
    """Three elements of a row or fewer, beside zeros."""
    count = draws.shape[-1]
    owners = [integers(draws.bits(f"owner{index}", ignore=[-1]), max(count, 1)) for index in range(3)]
    number = draws.position() - draws.start[-1]
    return np.where(np.any([number == owner for owner in owners], axis=0), 0.5 + draws.uniform(), 0.0)


_SHARES: dict[str, Callable[[Any], Array]] = {
    "plain": lambda d: d.uniform() + 2.0**-10,
    "flat": lambda d: np.ones(d.shape),
    "peaked": lambda d: d.uniform() + 2.0**-10 + 64.0 * (integers(d.bits("peak"), 11) == 0),
    "uneven": lambda d: _power(-integers(d.bits("exponent"), 13)) * (1 + d.uniform()),
    "few": _few_shares,
    "one_hot": _one_share,
}


def _is_diagonal(draws: Any) -> Array:
    return draws.position(-1) - draws.start[-1] == draws.position(-2) - draws.start[-2]


def _per_matrix(draws: Any, stream: str, count: int) -> Array:
    return integers(draws.bits(stream, ignore=[-1, -2]), count)


def _dominant(draws: Any) -> Array:
    """Off the diagonal at most half of what would make rows as large as it is: rounding at most doubles a number."""
    count = max(draws.shape[-1], 1)
    lower = np.tril(draws.sign() * draws.uniform(), -1) * 2.0 ** -((count - 1).bit_length() + 1)
    return np.where(
        _is_diagonal(draws), 1.25 + 0.5 * uniform(draws.bits("diagonal")), lower + np.swapaxes(lower, -1, -2)
    )


def _correlated(draws: Any) -> Array:
    """(1 - c) I + c 1 1', whose eigenvalues are 1 - c and 1 + (n - 1) c."""
    correlation = np.asarray([0.5, 0.75, 0.875])[_per_matrix(draws, "correlation", 3)]
    return np.where(_is_diagonal(draws), 1.0, correlation)


def _difference(draws: Any) -> Array:
    """The second difference with fixed ends, whose smallest eigenvalue is 4 sin(pi / (2n + 2))^2."""
    distance = abs((draws.position(-1) - draws.start[-1]) - (draws.position(-2) - draws.start[-2]))
    return np.where(distance == 0, 2.0, np.where(distance == 1, -1.0, 0.0))


def _scaled(draws: Any) -> Array:
    """D C D of a correlated C with c = 1/2, and powers of two D from 1/4 to 4: exact, and as definite."""
    rows = integers(draws.bits("scale", ignore=[-1]), 5) - 2
    exponents = rows + np.swapaxes(rows, -1, -2)
    return _power(exponents) * np.where(_is_diagonal(draws), 1.0, 0.5)


def _amplified(draws: Any, sign: int) -> Array:
    """A diagonally dominant matrix times a power of two, as definite: the dominance holds after any rounding.

    The exponents are a quarter, a half and all of half the format's, so that a product of two such matrices may just
    overflow or underflow.
    """
    half = min(int(np.frexp(draws.format.largest)[1]) // 2, _MOST_AMPLIFIED)
    exponent = np.asarray([half // 4, half // 2, half])[_per_matrix(draws, "amplitude", 3)]
    return _dominant(draws) * _power(sign * exponent)


_MATRICES: dict[str, Callable[[Any], Array]] = {
    "plain": _dominant,
    "identity": lambda d: np.where(_is_diagonal(d), 1.0, 0.0),
    "diagonal": lambda d: np.where(_is_diagonal(d), _power(integers(d.bits(), 9) - 4), 0.0),
    "correlated": _correlated,
    "difference": _difference,
    "scaled": _scaled,
    "loud": lambda d: _amplified(d, 1),
    "small": lambda d: _amplified(d, -1),
}
