"""Distributions: what the numbers of a tensor look like. Each is made to reveal a family of faults.

Only operations that are exact, or rounded as IEEE 754 says, may stand here: the same seed means the same bits on every
platform. `np.exp2`, `np.log` and the like differ between libraries and between vector units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.formats.codes import all_values
from assay.formats.format import Format, format_named
from assay.golden.inputs.domains import names_in_domain
from assay.golden.inputs.random_bits import bits, integers, normal, uniform
from assay.golden.signature import DOMAINS, TensorSpec

Integers = npt.NDArray[np.int64]
_E4M3, _INT8 = format_named("float8_e4m3fn"), format_named("int8")
Array = npt.NDArray[Any]


class Draws:
    """The random bits of one tensor, by stream.

    Elements along the axes in ``tied`` are equal; the first element has the coordinates ``start``.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        shape: Sequence[int],
        format: Format,
        *,
        start: Sequence[int] = (),
        tied: Sequence[int] = (),
    ) -> None:
        self.seed, self.name, self.shape, self.format = seed, name, tuple(shape), format
        self.start, self.tied = tuple(start) or (0,) * len(shape), tuple(tied)

    def bits(self, stream: str = "", ignore: Sequence[int] = ()) -> npt.NDArray[np.uint64]:
        """Fresh bits per element, equal along ``ignore`` and the tied axes."""
        axes = {axis % max(len(self.shape), 1) for axis in ignore} | set(self.tied)
        return bits(self.seed, self.name + stream, self.shape, start=self.start, ignore=sorted(axes))

    def position(self, axis: int = -1) -> Array:
        """Each element's coordinate along ``axis`` (0 for a scalar and along a tied axis)."""
        if not self.shape or axis % len(self.shape) in self.tied:
            return np.zeros(self.shape)
        shape = [-1 if i == axis % len(self.shape) else 1 for i in range(len(self.shape))]
        first = self.start[axis]
        coordinate = np.arange(first, first + self.shape[axis], dtype=np.float64)
        return np.broadcast_to(coordinate.reshape(shape), self.shape)

    def normal(self) -> Array:
        return normal(self.bits())

    def uniform(self) -> Array:
        return uniform(self.bits())

    def row_choice(self, *values: float) -> Array:
        """One of ``values`` for each row."""
        return np.asarray(values)[integers(self.bits("row", ignore=[-1]), len(values))]

    def column_choice(self, *values: float) -> Array:
        """One of ``values`` for each column."""
        axes = range(max(len(self.shape) - 1, 0))
        return np.asarray(values)[integers(self.bits("column", ignore=list(axes)), len(values))]

    def sign(self) -> Array:
        return 1.0 - 2.0 * integers(self.bits("sign"), 2)


def power_of_two(exponent: Array) -> Array:
    """2^exponent for whole numbers, exactly."""
    return np.ldexp(1.0, exponent.astype(np.int32))


def _patterns(draws: Draws) -> Array:
    """Any finite bit pattern of a format of at most 16 bits; else any sign, exponent and mantissa near one."""
    if draws.format.bits > 16:
        return draws.sign() * power_of_two(integers(draws.bits("exponent"), 41) - 20) * (1 + draws.uniform())
    values = all_values(draws.format).numpy()
    finite = values[np.isfinite(values)]
    return finite[integers(draws.bits(), len(finite))]


def _end_scales(draws: Draws) -> Array:
    """Scales near the ends of e8m0, whose products with codes bfloat16 still holds, and of other formats near one."""
    ends = (-6, -5, 4, 0) if draws.format.has_zero else (-112, -111, 112, 0)
    return power_of_two(np.asarray(ends)[integers(draws.bits(), len(ends))])


def _least_scales(draws: Draws) -> Array:
    """The least scales that a format of 8 bits holds, of wider ones 2^-24, beside large ones and one."""
    ends = {"float8_e8m0fnu": (-127, 112, 0), "float8_e4m3fn": (-9, 8, 0)}.get(draws.format.name, (-24, 8, 0))
    return power_of_two(np.asarray(ends)[integers(draws.bits(), len(ends))])


def _cycled_scales(draws: Draws) -> Array:
    """Negative, zero and positive scales in turn along every axis, from the ``seed``'s on; in e8m0 all are positive."""
    if not draws.format.signed:
        return 2.0**-4 * (0.5 + draws.uniform())
    total = sum((draws.position(axis) for axis in range(len(draws.shape))), np.full(draws.shape, float(draws.seed)))
    return (total % 3 - 1.0) * 2.0**-4 * (0.5 + draws.uniform())


def _far_scales(draws: Draws) -> Array:
    """Scales far from one: to 2^40 in e8m0, in other formats of 8 bits to the largest, in wide ones from 2^-14."""
    if not draws.format.has_zero:
        return power_of_two(integers(draws.bits(), 81) - 40)
    exponent = integers(draws.bits("exponent"), 15 if draws.format.bits <= 8 else 19)
    low = -6 if draws.format.bits <= 8 else -14
    return power_of_two(exponent + low) * (1 + draws.uniform())


_ENDS = (-126, -100, -60, -25, -24, -15, -14, -9, -6, 0, 8, 9, 15, 16, 17, 40, 64, 100, 126)
"""Exponents at and beyond the ends of float8_e4m3fn, float16 and float8_e5m2, and at those of bfloat16 and float32."""


def _vast(draws: Draws) -> Array:
    """Positive numbers over the whole range of the format, most beside an end of a narrower one."""
    if not draws.format.has_zero:
        ends = np.asarray([-127, *_ENDS, 127])
        return power_of_two(ends[integers(draws.bits("exponent"), len(ends))])
    low, high = (np.frexp(end)[1] - 1 for end in (draws.format.smallest_normal, draws.format.largest))
    ends = np.asarray([low, *(end for end in _ENDS if low < end < high), high])
    return power_of_two(ends[integers(draws.bits("exponent"), len(ends))]) * (1 + 0.75 * draws.uniform())


def _is_own_column(draws: Draws) -> Array:
    """Where the column is the row's number modulo 61."""
    row: Array = draws.position(-2) if len(draws.shape) > 1 else np.zeros(draws.shape)
    mask: Array = draws.position() == row % 61
    return mask


def _one_peak(draws: Draws) -> Array:
    """Rows whose peak is in the same column of every tensor, above a tail of another depth in each: as logits they are
    nearly equal distributions whose logarithms differ."""
    return np.where(_is_own_column(draws), 0.0, draws.normal() - draws.row_choice(9.0, 12.0, 16.0, 24.0))


# Of real numbers, by the names that recipes store. A row is the last axis.
REAL: dict[str, Callable[[Draws], Array]] = {
    "normal": lambda d: d.normal(),
    "positive": lambda d: d.uniform() + 2.0**-10,
    "lognormal": lambda d: d.sign() * power_of_two(np.rint(2.5 * normal(d.bits("exponent")))) * (1 + d.uniform()),
    "outliers": lambda d: d.normal() * d.column_choice(*[1.0] * 15, 64.0),  # outlier channels
    "loud_rows": lambda d: d.normal() * d.row_choice(*[1.0] * 7, 512.0),  # outlier tokens
    # Neighbours of opposite sign and nearly equal size, so that sums lose most of their digits.
    "cancelling": lambda d: (1.0 - 2.0 * (d.position() % 2)) * (1.0 + d.uniform() * 2.0**-6),
    "constant_rows": lambda d: normal(d.bits("value", ignore=[-1])) * d.row_choice(1.0, 30.0, 1000.0),
    "ascending": lambda d: d.position() * 0.125 + 0.25 * d.uniform(),  # the largest number of a row comes last
    "descending": lambda d: 16.0 - d.position() * 0.25 + 0.25 * d.uniform(),  # and first
    "large_mean": lambda d: d.normal() + d.row_choice(64.0, -256.0, 1024.0, -4096.0),
    "small": lambda d: d.normal() * d.row_choice(2.0**-6, 2.0**-10, 2.0**-13),
    "wide": lambda d: d.normal() * 6.0,  # logits of a standard deviation of 6
    "peaked": lambda d: d.normal() + 24.0 * (integers(d.bits("peak"), 11) == 0),  # few logits far above the others
    "ties": lambda d: integers(d.bits(), 3) - 1.0,
    # Blocks of 32 whose magnitudes differ by powers of two.
    "blocks": lambda d: d.normal() * power_of_two(np.asarray([0, 4, -6, 8])[(d.position() // 32 % 4).astype(np.int64)]),
    "extremes": lambda d: d.row_choice(1.0, -1.0) * (d.format.largest if d.format.bits <= 8 else 3.0),
    "patterns": _patterns,
    # Every sum and product of these is exact in float32: no tolerance at all.
    "integers": lambda d: integers(d.bits(), 9) - 4.0,
    "powers": lambda d: d.sign() * power_of_two(integers(d.bits(), 5) - 2),
    # One element of each row is one, in the column of the row's number modulo 61.
    "one_hot": lambda d: _is_own_column(d).astype(np.float64),
    # Blocks of 64 of either sign in turn: partial sums grow and vanish again.
    "seesaw": lambda d: (1.0 - 2.0 * (d.position() // 64 % 2)) * (64.0 + integers(d.bits(), 4)),
    # The range of the format, and what lies beyond.
    "steep": lambda d: d.normal() * 64.0,  # logits of a standard deviation of 64
    "above": lambda d: 89.0 + 8.0 * d.uniform() + d.row_choice(0.0, 100.0, 1000.0),  # float32's exp overflows
    "below": lambda d: -89.0 - 40.0 * d.uniform() - d.row_choice(0.0, 100.0, 1000.0),  # and underflows
    "remote": lambda d: d.normal() + d.row_choice(-1.2e4, -6e4, -1e31),  # a large negative offset
    "loud": lambda d: d.normal() * d.row_choice(2.0**14, 2.0**17, 2.0**20),  # magnitudes at float16's end, 65504
    "near_overflow": lambda d: d.sign() * (0.5 + 0.5 * d.uniform()) * d.format.largest,
    "lowest": lambda d: -(0.5 + 0.5 * d.uniform()) * d.format.largest,
    # Multiples of the smallest subnormal, up to a few times the smallest normal.
    "subnormal": lambda d: (
        d.sign()
        * np.floor(d.uniform() * (4 * d.format.smallest_normal / d.format.smallest_subnormal))
        * d.format.smallest_subnormal
    ),
    # Nearly the same numbers in all tensors, so that differences between them lose most digits.
    "alike": lambda d: normal(bits(d.seed, "alike", d.shape, start=d.start, ignore=d.tied)) + 2.0**-8 * d.normal(),
    "one_peak": _one_peak,
    # Rows about the square root of an epsilon, or an epsilon itself, of 1e-8 to 1e-3.
    "faint": lambda d: d.normal() * power_of_two(-8 - integers(d.bits("row", ignore=[-1]), 21)),
    "sparse": lambda d: d.normal() * (integers(d.bits("sparse"), 16) == 0),
    "zeros": lambda d: np.zeros(d.shape),
    "ones": lambda d: np.ones(d.shape),
}
KINDS = {
    "ordinary": ("normal", "positive", "blocks"),
    "exact": ("integers", "powers", "one_hot", "ones"),
    "tied": ("ties", "constant_rows", "midpoints"),
    "cancelling": ("cancelling", "seesaw"),
    "of a large mean": ("large_mean", "above", "below", "remote"),
    "large": ("loud", "extremes", "near_overflow", "lowest"),
    "small": ("small", "subnormal", "faint"),
    "of a wide range": ("wide", "steep", "peaked", "lognormal", "patterns", "outliers", "loud_rows"),
    "sorted": ("ascending", "descending"),
    "alike": ("alike",),
    "of one peak": ("one_peak",),
    "sparse": ("sparse", "zeros"),
}
"""Kinds of `REAL`'s distributions, each of which reveals much the same faults."""
GENERAL = tuple(name for name in REAL if name not in {"zeros", "ones", "faint"})
EXACT = ("integers", "powers", "one_hot", "ties", "seesaw")
RELATIVE = ("patterns", "near_overflow", "lowest", "subnormal")  # made to the measure of the format
RANGE = (
    "steep",
    "above",
    "below",
    "remote",
    "loud",
    "near_overflow",
    "lowest",
    "subnormal",
    "small",
    "patterns",
    "zeros",
)
EXTREME = frozenset(RANGE) | {
    "lognormal", "outliers", "loud_rows", "cancelling", "constant_rows", "large_mean", "peaked", "seesaw",
    "far", "ends", "large", "deep", "vast", "faint",
}  # fmt: skip
"""Far from one, or cancelling; what isn't among these is ordinary."""
ROLES: dict[str, dict[str, Callable[[Draws], Array]]] = {
    "real": REAL,
    "scale": {
        "plain": lambda d: 2.0**-4 * (0.5 + d.uniform()),
        "one": lambda d: np.ones(d.shape),
        "powers": lambda d: power_of_two(integers(d.bits(), 9) - 6),
        "uneven": lambda d: power_of_two(integers(d.bits("exponent"), 13) - 8) * (1 + d.uniform()),
        "far": _far_scales,
        "ends": _end_scales,
        "least": _least_scales,
        # Scales of either sign; e8m0 has none.
        "signed": lambda d: (d.sign() if d.format.signed else 1.0) * 2.0**-4 * (0.5 + d.uniform()),
        "cycled": _cycled_scales,
        "vast": _vast,
    },
    "weight": {
        "plain": lambda d: d.uniform(),
        "one": lambda d: np.ones(d.shape),
        "powers": lambda d: power_of_two(-1 - integers(d.bits(), 3)),
        "vast": _vast,
    },
    "angle": {
        "plain": lambda d: 2.0 * d.uniform() - 1.0,
        "powers": lambda d: d.sign() * power_of_two(-integers(d.bits(), 3)),
        "ties": lambda d: integers(d.bits(), 3) - 1.0,
    },
    "lse": {
        "plain": lambda d: np.where(integers(d.bits("empty"), 8) == 0, -np.inf, 4.0 * d.normal()),
        "near": lambda d: normal(bits(d.seed, "near", d.shape, start=d.start, ignore=d.tied)) + 2.0**-6 * d.uniform(),
        "far": lambda d: 64.0 * d.normal(),
        "large": lambda d: 3000.0 + 0.5 * d.normal(),
        "empty": lambda d: np.where(integers(d.bits("empty"), 2) == 0, -np.inf, d.normal()),
        "deep": lambda d: d.row_choice(-6e4, -1e5, -1e30) * (1 + 2.0**-10 * d.uniform()),
    },
    "slope": {
        "plain": lambda d: power_of_two(-1 - integers(d.bits("exponent"), 8)) * (1 + d.uniform()),
        "powers": lambda d: power_of_two(-1 - d.position() % 8),
        "vast": _vast,
    },
}


def integer_values(draws: Draws, name: str, below: int) -> npt.NDArray[np.int64]:
    """Codes or indices in 0..below-1: "uniform", "first" (all zero), "last", or "skewed" (mostly one value)."""
    if name == "first":
        return np.zeros(draws.shape, dtype=np.int64)
    if name == "last":
        return np.full(draws.shape, below - 1, dtype=np.int64)
    drawn = integers(draws.bits(), below)
    if name == "skewed":
        return np.where(integers(draws.bits("skew"), 8) == 0, drawn, below // 2)
    return drawn


INTEGERS = ("uniform", "first", "last", "skewed")


def length_values(draws: Draws, name: str, most: int, unit: int) -> npt.NDArray[np.int64]:
    """Lengths in 0..most: "mixed" (a third each: any, next to or at a multiple of ``unit``, an end), "uniform", "full",
    or "short" (at most ``unit`` + 1)."""
    if name == "full":
        return np.full(draws.shape, most, dtype=np.int64)
    drawn = integers(draws.bits(), most + 1)
    if name == "uniform":
        return drawn
    if name == "short":
        return np.minimum(integers(draws.bits(), unit + 2), most)
    beside = integers(draws.bits("multiple"), most // max(unit, 1) + 1) * unit + integers(draws.bits("side"), 3) - 1
    ends = np.asarray([most, most, 0, 1])[integers(draws.bits("end"), 4)]
    third = integers(draws.bits("third"), 3)
    return np.clip(np.where(third == 0, drawn, np.where(third == 1, beside, ends)), 0, most)


LENGTHS = ("mixed", "uniform", "full", "short")
MIDPOINTS = "midpoints"  # of numbers that are going to be codes
EVERY = "every"  # number of a format of 16 bits or fewer
TILED = "tiled"  # ordinary numbers, so many times over as a large tensor needs
STRUCTURED = {
    "label": ("mixed", "uniform", "first", "last", "none"),
    "offsets": ("mixed", "even", "uniform", "one"),
    "pair": ("uniform", "first", "last", "any"),
}


def names_of(tensor: TensorSpec) -> tuple[str, ...]:
    """The distributions that a tensor's elements may have, the plainest first."""
    if tensor.inputs:
        return tuple(tensor.inputs)
    if tensor.role in DOMAINS:
        return names_in_domain(tensor, REAL)
    if tensor.role in STRUCTURED:
        return STRUCTURED[tensor.role]
    if tensor.role == "length":
        return LENGTHS
    names = INTEGERS if tensor.is_integer else tuple(ROLES[tensor.role])
    return (*names, MIDPOINTS) if tensor.role == "real" and tensor.bound else names


def own_names_of(tensor: TensorSpec) -> tuple[str, ...]:
    """The distributions but the plainest that a tensor has of its own, beside those of real numbers in general."""
    known = () if tensor.inputs else REAL
    return tuple(
        name for name in names_of(tensor)[1:] if name not in known and name not in (MIDPOINTS, "vast", "cycled")
    )


def kinds_of(tensor: TensorSpec) -> dict[str, tuple[str, ...]]:
    """The distributions that a tensor's elements may have, by kind; of few, each is a kind of its own."""
    names = names_of(tensor)
    if tensor.inputs or tensor.is_integer or tensor.role != "real":
        return {name: (name,) for name in names}
    known = {kind: tuple(name for name in some if name in names) for kind, some in KINDS.items()}
    return {kind: some for kind, some in known.items() if some}


def midpoints(draws: Draws, largest: int) -> npt.NDArray[np.float64]:
    """Return midpoints between codes up to ``largest``, times a power of two that a quantiser computes as its scale.

    Every eighth number, from the first, is the largest code, so that each group contains it; for codes 0 to 15 every
    eighth from the fifth is the other end of their range.
    """
    everywhere = range(len(draws.shape))
    power = power_of_two(np.asarray([0, -3, 5])[integers(draws.bits("step", ignore=everywhere), 3)])
    index = draws.position() % 8
    if largest == _E4M3.largest:
        codes = all_values(_E4M3).numpy()
        codes = np.sort(abs(codes[codes >= 0]))  # of zeros of both signs a sort by vector units keeps any
        between = draws.sign() * ((codes[:-1] + codes[1:]) / 2)[integers(draws.bits(), len(codes) - 1)]
        return np.where(index == 0, draws.sign() * largest, between) * power
    if largest == _INT8.largest:
        between = integers(draws.bits(), 2 * largest) - largest + 0.5
        return np.where(index == 0, draws.sign() * largest, between) * power
    ends = np.asarray([(8, -7), (15, 0), (0, -15), (7, -7)])[integers(draws.bits("ends", ignore=everywhere), 4)]
    top, bottom = ends[..., 0], ends[..., 1]
    between = np.floor(draws.uniform() * (top - bottom)) + bottom + 0.5
    return np.where(index == 0, top, np.where(index == 4, bottom, between)) * power


def every_value(draws: Draws) -> npt.NDArray[np.float64]:
    """Return the value of each bit pattern in order, 256 per row, beginning with the pattern ``seed``."""
    values = all_values(draws.format).numpy()
    number = draws.position(-2) * 256 + draws.position() if len(draws.shape) > 1 else draws.position()
    return values[(number.astype(np.int64) + draws.seed) % len(values)]


def label_values(draws: Draws, name: str, below: int, none: int) -> Integers:
    """Return integers below ``below``: "uniform", "first", "last"; "mixed" (a quarter ``none``), or all of them
    "none"."""
    drawn = integers(draws.bits(), below)
    if name in ("first", "last"):
        return np.full(draws.shape, 0 if name == "first" else below - 1, dtype=np.int64)
    share = {"mixed": 0.25, "none": 1.0}.get(name, 0.0)
    return np.where(uniform(draws.bits("none")) < share, none, drawn)


def offset_values(draws: Draws, name: str, total: int) -> Integers:
    """Return where each part of ``total`` begins, and ``total`` at the end: "mixed" (parts of none, few and many, the
    last the
    rest), "even", "uniform" (cut anywhere), or "one" (a single part has all)."""
    parts = draws.shape[0] - 1
    number = np.arange(parts + 1)
    if name == "even":
        offsets = number * total // max(parts, 1)
    elif name == "uniform":
        offsets = np.sort(integers(draws.bits(), total + 1))
    elif name == "one":
        owner = integers(draws.bits("owner", ignore=[0]), max(parts, 1))
        offsets = np.where(number > owner, total, 0)
    else:
        lengths = np.asarray([0, 1, 2, 3, 5, 17, 33, 64])[integers(draws.bits(), 8)]
        offsets = np.minimum(np.cumsum(lengths) - lengths[0], total)
    offsets[0], offsets[-1] = 0, total
    return offsets.astype(np.int64)


def pair_values(draws: Draws, name: str, below: int) -> Integers:
    """Return pairs of neighbours along the last axis, two indices below ``below``, ascending: "uniform", "first",
    "last";
    or "any" indices, of which some descend and some are equal."""
    if name == "any":
        return integers(draws.bits(), below)
    every = np.asarray(list(combinations(range(below), 2)))
    drawn = integers(draws.bits()[..., ::2], len(every))
    chosen = {"first": np.zeros_like(drawn), "last": np.full_like(drawn, len(every) - 1)}.get(name, drawn)
    pairs: Any = every[chosen]
    return pairs.reshape(*draws.shape).astype(np.int64)
