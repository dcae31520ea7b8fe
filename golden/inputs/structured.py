"""Numbers that hang together: midpoints between codes, offsets of ragged batches, places in sparse groups."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.golden.inputs.distributions import Draws, power_of_two
from assay.golden.inputs.random_bits import integers, uniform

Integers = npt.NDArray[np.int64]

_E4M3, _INT8 = format_named("float8_e4m3fn"), format_named("int8")


def midpoints(draws: Draws, largest: int) -> npt.NDArray[np.float64]:
    """Midpoints between codes up to ``largest``, times a power of two that a quantiser finds as its scale.

    Every eighth number, from the first on, is as large as the largest code, so that it may be found in any group; of
    codes 0 to 15 every eighth from the fifth on lies at the other end of their range.
    """
    everywhere = range(len(draws.shape))
    power = power_of_two(np.asarray([0, -3, 5])[integers(draws.bits("step", ignore=everywhere), 3)])
    place = draws.position() % 8
    if largest == _E4M3.largest:
        codes = all_values(_E4M3).numpy()
        codes = np.sort(abs(codes[codes >= 0]))  # of zeros of both signs a sort by vector units keeps any
        between = draws.sign() * ((codes[:-1] + codes[1:]) / 2)[integers(draws.bits(), len(codes) - 1)]
        return np.where(place == 0, draws.sign() * largest, between) * power
    if largest == _INT8.largest:
        between = integers(draws.bits(), 2 * largest) - largest + 0.5
        return np.where(place == 0, draws.sign() * largest, between) * power
    ends = np.asarray([(8, -7), (15, 0), (0, -15), (7, -7)])[integers(draws.bits("ends", ignore=everywhere), 4)]
    top, bottom = ends[..., 0], ends[..., 1]
    between = np.floor(draws.uniform() * (top - bottom)) + bottom + 0.5
    return np.where(place == 0, top, np.where(place == 4, bottom, between)) * power


def every_value(draws: Draws) -> npt.NDArray[np.float64]:
    """The value of each bit pattern in turn, 256 a row, from the pattern ``seed`` on."""
    values = all_values(draws.format).numpy()
    place = draws.position(-2) * 256 + draws.position() if len(draws.shape) > 1 else draws.position()
    return values[(place.astype(np.int64) + draws.seed) % len(values)]


def label_values(draws: Draws, name: str, below: int, none: int) -> Integers:
    """Integers below ``below``: "uniform", "first", "last"; "mixed" (a quarter ``none``), or all of them "none"."""
    drawn = integers(draws.bits(), below)
    if name in ("first", "last"):
        return np.full(draws.shape, 0 if name == "first" else below - 1, dtype=np.int64)
    share = {"mixed": 0.25, "none": 1.0}.get(name, 0.0)
    return np.where(uniform(draws.bits("none")) < share, none, drawn)


def offset_values(draws: Draws, name: str, total: int) -> Integers:
    """Where each part of ``total`` begins, and at last ``total``: "mixed" (parts of none, few and many, the last the
    rest), "even", "uniform" (cut anywhere), or "one" (a single part has all)."""
    parts = draws.shape[0] - 1
    number = np.arange(parts + 1)
    if name == "even":
        found = number * total // max(parts, 1)
    elif name == "uniform":
        found = np.sort(integers(draws.bits(), total + 1))
    elif name == "one":
        owner = integers(draws.bits("owner", ignore=[0]), max(parts, 1))
        found = np.where(number > owner, total, 0)
    else:
        lengths = np.asarray([0, 1, 2, 3, 5, 17, 33, 64])[integers(draws.bits(), 8)]
        found = np.minimum(np.cumsum(lengths) - lengths[0], total)
    found[0], found[-1] = 0, total
    return found.astype(np.int64)


def pair_values(draws: Draws, name: str, below: int) -> Integers:
    """Neighbours along the last axis are two places below ``below``, ascending: "uniform", "first", or "last"; or each
    is "any" place, so that some descend and some are one place twice."""
    if name == "any":
        return integers(draws.bits(), below)
    every = np.asarray(list(combinations(range(below), 2)))
    drawn = integers(draws.bits()[..., ::2], len(every))
    chosen = {"first": np.zeros_like(drawn), "last": np.full_like(drawn, len(every) - 1)}.get(name, drawn)
    pairs: Any = every[chosen]
    return pairs.reshape(*draws.shape).astype(np.int64)
