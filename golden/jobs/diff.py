"""The difference of two stores: records of one only, other digits, other versions, other values.

Two goldens of one recipe can both be right only if their balls meet; otherwise one of them is wrong.
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
    """A record that differs: the kind of difference, and a description."""

    kind: str
    key: str
    recipe: str
    message: str


def differences(a: Store, b: Store) -> Iterator[Difference]:
    """Yield every difference between two stores, by key.

    Raises `StoreError` where one of them isn't there.
    """
    a.require()
    b.require()
    in_a, in_b = set(a.keys()), set(b.keys())
    for key in sorted(in_a & in_b):
        yield from _of_pair(key, key, a, b)
    by_recipe: dict[str, list[str]] = {}
    for key in sorted(in_b - in_a):
        record = b.read(key)
        if isinstance(record, StoreError):
            yield from _of_single(ONLY_B, key, record)
        else:
            by_recipe.setdefault(record.recipe.key, []).append(key)
    for key in sorted(in_a - in_b):
        record = a.read(key)
        partners = [] if isinstance(record, StoreError) else by_recipe.pop(record.recipe.key, [])
        for partner in partners:
            yield from _of_pair(key, partner, a, b)
        if not partners:
            yield from _of_single(ONLY_A, key, record)
    for key in sorted(key for keys in by_recipe.values() for key in keys):
        yield from _of_single(ONLY_B, key, b.read(key))


def _of_single(kind: str, key: str, record: Record | StoreError) -> Iterator[Difference]:
    if isinstance(record, Record):
        yield Difference(kind, key, str(record.recipe), kind)
    elif not isinstance(record, MissingRecord):  # removed since it was listed
        yield Difference(FORMAT if isinstance(record, OtherFormat) else DAMAGED, key, "", str(record))


def _of_pair(key_a: str, key_b: str, a: Store, b: Store) -> Iterator[Difference]:
    """Yield the difference of two records of one recipe."""
    first, second = a.read(key_a), b.read(key_b)
    if isinstance(first, StoreError):
        yield from _of_single(ONLY_B, key_a, first)
        return
    if isinstance(second, StoreError):
        yield from _of_single(ONLY_A, key_b, second)
        return
    recipe = str(first.recipe)
    changed = [
        name
        for name in sorted({*first.versions, *second.versions})
        if first.versions.get(name) != second.versions.get(name)
    ]
    changes = [f"{name} {first.versions.get(name)} -> {second.versions.get(name)}" for name in changed]
    comparable = not {"definition", "inputs"} & set(changed)
    if comparable and first.inputs != second.inputs:
        message = "the inputs came out differently where the two were made; one of the machines is wrong"
        yield Difference(CONTRADICTION, key_a, recipe, message)
        return
    words = [[(golden.value, golden.radius, golden.rest) for golden in record.goldens] for record in (first, second)]
    same = len(words[0]) == len(words[1]) and all(
        x.shape == y.shape and torch.equal(_bits(x), _bits(y))
        for one, two in zip(*words, strict=True)
        for x, y in zip(one, two, strict=True)
    )
    if comparable and same and first.digits == second.digits:
        if changes:
            yield Difference(LIBRARIES, key_a, recipe, ", ".join(changes))
        return
    comparisons = [compare(one, two) for one, two in zip(first.goldens, second.goldens, strict=False)]
    contradictions = [text for text, meet in comparisons if not meet]
    worst = next(iter(contradictions), next((text for text, _ in comparisons if text), ""))
    kind = VALUES if first.digits == second.digits else DIGITS
    if not comparable:
        kind = DEFINITION
    elif contradictions or len(first.goldens) != len(second.goldens):
        kind = CONTRADICTION
    if first.digits != second.digits:
        changes.insert(0, f"digits {first.digits or 'float64'} -> {second.digits or 'float64'}")
    yield Difference(kind, key_a, recipe, "; ".join(filter(None, (worst, ", ".join(changes)))))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int64) if x.dtype == torch.float64 else x


def compare(one: Golden, two: Golden) -> tuple[str, bool]:
    """Describe the largest change; the second result is whether all balls meet, and NaN and infinities agree."""
    if one.value.shape != two.value.shape:
        return f"shape {tuple(one.value.shape)} -> {tuple(two.value.shape)}", False
    x, y = one.value.double(), two.value.double()
    change = ((x - y) + (one.rest - two.rest)).abs()
    equal = (x == y) | (x.isnan() & y.isnan())
    change = torch.where(equal & ~(x.isfinite()), 0.0, change).nan_to_num(nan=torch.inf)
    reach = one.radius + two.radius
    # The difference was rounded twice in float64, which matters for goldens of more digits than float64 holds.
    slack = 2.0**-52 * ((x - y).abs() + one.rest.abs() + two.rest.abs()).nan_to_num()
    disjoint = (change > reach + slack) & ~(reach.isinf() & x.isfinite() & y.isfinite())
    if not change.any():
        return ("the radii changed" if not torch.equal(one.radius, two.radius) else ""), True
    ulp = torch.exp2(torch.frexp(x.abs().clamp(min=2.0**-1022)).exponent.double() - 53)
    meet = not bool(disjoint.any())
    flat = int((change / ulp if meet else torch.where(disjoint, change, -1.0)).argmax())
    index = [int(i) for i in np.unravel_index(flat, tuple(x.shape))]
    step, size = float(change.flatten()[flat]), float(reach.flatten()[flat])
    radii = f"{step / size:.3g} times both radii together" if size else "both exact"
    text = (
        f"largest change at {index}: {float(x.flatten()[flat])!r} -> {float(y.flatten()[flat])!r}, "
        f"{step / float(ulp.flatten()[flat]):.3g} ulps of float64, {radii}"
    )
    return text + ("" if meet else "; the balls don't meet, so one of them is wrong"), meet
