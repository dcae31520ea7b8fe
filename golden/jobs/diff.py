"""What changed between two stores: records of one only, other digits, other versions, other values.

Two goldens of one recipe are both right only if their balls meet; where they don't, one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from assay.golden.errors import MissingRecord, OtherFormat, StoreError
from assay.golden.evaluation.golden import Golden
from assay.golden.store import Record, Store

ONLY_A, ONLY_B, VALUES, DIGITS, DEFINITION, LIBRARIES, FORMAT, DAMAGED, CONTRADICTION = (
    "only in A",
    "only in B",
    "other values",
    "other digits",
    "other definition or inputs",
    "other libraries, same values",
    "other format",
    "damaged",
    "contradiction",
)
WRONG = (CONTRADICTION, DAMAGED)


@dataclass(frozen=True)
class Difference:
    """One record that isn't the same: what kind of difference, and in words."""

    kind: str
    key: str
    recipe: str
    message: str


def differences(a: Store, b: Store) -> Iterator[Difference]:
    """Every difference between two stores, by key; what is the same in both gives none.

    Raises `StoreError` where one of them isn't there.
    """
    a.require()
    b.require()
    here, there = set(a.keys()), set(b.keys())
    for key in sorted(here & there):
        yield from _pair(key, key, a, b)
    elsewhere: dict[str, list[str]] = {}
    for key in sorted(there - here):
        record = b.read(key)
        if isinstance(record, StoreError):
            yield from _alone(ONLY_B, key, record)
        else:
            elsewhere.setdefault(record.recipe.key, []).append(key)
    for key in sorted(here - there):
        record = a.read(key)
        partners = [] if isinstance(record, StoreError) else elsewhere.pop(record.recipe.key, [])
        for partner in partners:
            yield from _pair(key, partner, a, b)
        if not partners:
            yield from _alone(ONLY_A, key, record)
    for key in sorted(key for keys in elsewhere.values() for key in keys):
        yield from _alone(ONLY_B, key, b.read(key))


def _alone(kind: str, key: str, record: Record | StoreError) -> Iterator[Difference]:
    if isinstance(record, Record):
        yield Difference(kind, key, str(record.recipe), kind)
    elif not isinstance(record, MissingRecord):  # one removed since it was listed is no difference
        yield Difference(FORMAT if isinstance(record, OtherFormat) else DAMAGED, key, "", str(record))


def _pair(key: str, other: str, a: Store, b: Store) -> Iterator[Difference]:
    """Two records of one recipe."""
    first, second = a.read(key), b.read(other)
    if isinstance(first, StoreError):
        yield from _alone(ONLY_B, key, first)
        return
    if isinstance(second, StoreError):
        yield from _alone(ONLY_A, other, second)
        return
    changes = [
        f"{name} {first.versions.get(name)} -> {second.versions.get(name)}"
        for name in sorted({*first.versions, *second.versions})
        if first.versions.get(name) != second.versions.get(name)
    ]
    comparable = all(first.versions.get(name) == second.versions.get(name) for name in ("definition", "inputs"))
    if comparable and first.inputs != second.inputs:
        message = "the inputs came out differently where the two were made; one of the machines is wrong"
        yield Difference(CONTRADICTION, key, str(first.recipe), message)
        return
    same = len(first.goldens) == len(second.goldens) and all(map(_same, first.goldens, second.goldens))
    if comparable and same and first.digits == second.digits:
        if changes:
            yield Difference(LIBRARIES, key, str(first.recipe), ", ".join(changes))
        return
    words = [compare(one, two) for one, two in zip(first.goldens, second.goldens, strict=False)]
    worst = next((text for text, meets in words if not meets), next((text for text, _ in words if text), ""))
    kind = VALUES if first.digits == second.digits else DIGITS
    if not comparable:
        kind = DEFINITION
    elif not all(meets for _, meets in words) or len(first.goldens) != len(second.goldens):
        kind = CONTRADICTION
    if first.digits != second.digits:
        changes.insert(0, f"digits {first.digits or 'float64'} -> {second.digits or 'float64'}")
    yield Difference(kind, key, str(first.recipe), "; ".join(filter(None, (worst, ", ".join(changes)))))


def _same(one: Golden, two: Golden) -> bool:
    """Whether all bits of value and radius agree (NaN with NaN)."""
    pairs = ((one.value, two.value), (one.radius, two.radius), (one.rest, two.rest))
    return all(x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int64) if x.dtype == torch.float64 else x


def compare(one: Golden, two: Golden) -> tuple[str, bool]:
    """The largest change in words, and whether every two balls meet (where both are numbers; classes must agree)."""
    if one.value.shape != two.value.shape:
        return f"shape {tuple(one.value.shape)} -> {tuple(two.value.shape)}", False
    x, y = one.value.double(), two.value.double()
    change = ((x - y) + (one.rest - two.rest)).abs()
    alike = (x == y) | (x.isnan() & y.isnan())
    change = torch.where(alike & ~(x.isfinite()), 0.0, change).nan_to_num(nan=torch.inf)
    reach = one.radius + two.radius
    # The difference was rounded twice in float64, which is all that is left of digits beyond its own.
    slack = 2.0**-52 * ((x - y).abs() + one.rest.abs() + two.rest.abs()).nan_to_num()
    apart = (change > reach + slack) & ~(reach.isinf() & x.isfinite() & y.isfinite())
    if not change.any():
        return ("the radii changed" if not torch.equal(one.radius, two.radius) else ""), True
    ulp = torch.exp2(torch.frexp(x.abs().clamp(min=2.0**-1022)).exponent.double() - 53)
    where = int(torch.where(apart, change / reach.clamp(min=2.0**-1074), change / ulp).argmax())
    if apart.any():
        where = int(torch.where(apart, change, -1.0).argmax())
    index = [int(place) for place in np.unravel_index(where, tuple(x.shape))]
    step, size = float(change.flatten()[where]), float(reach.flatten()[where])
    radii = f"{step / size:.3g} times both radii together" if size else "both exact"
    text = (
        f"largest change at {index}: {float(x.flatten()[where])!r} -> {float(y.flatten()[where])!r}, "
        f"{step / float(ulp.flatten()[where]):.3g} ulps of float64, {radii}"
    )
    return text + ("; the balls don't meet, so one of them is wrong" if apart.any() else ""), not bool(apart.any())
