"""The independent witness of a stored record: its elements derived again by mpmath, a part of them where it is large.

A record is cut along symbols in which results don't depend on each other (rows, columns of a product, heads). The cut
inputs are evaluated by `Multiprecision`, which shares nothing with float64's balls but the definition; each element
must lie within the stored radius.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.golden.arithmetic import Multiprecision
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.recipe import Recipe
from assay.golden.registry import Spec
from assay.golden.signature import Signature, dimension
from assay.golden.store import Record

DIGITS = 50
_PROOF = 400  # digits with which a contradiction is looked at again: cancellation may have eaten fifty
_WHOLE = 4_000  # steps up to which a record is derived whole
_MOST = 400_000  # steps beyond which even a part takes too long


@dataclass(frozen=True)
class Derived:
    """What the witness found: how many elements it derived (none if the record is too large), and the first fault."""

    elements: int
    fault: str = ""


def derive(record: Record, digits: int = DIGITS) -> Derived:
    """Derive ``record`` again, or the part of it that its key chooses."""
    recipe, definition = record.recipe, record.recipe.definition
    signature = recipe.signature
    cut = cut_of(definition, signature, recipe.sizes, recipe.options, random.Random(record.key))
    sizes = {**recipe.sizes, **{symbol: count for group in cut for symbol, (_, count) in group.items()}}
    if _steps(definition, signature, sizes) > _MOST:
        return Derived(0)
    values = drawn(recipe)
    parts = [values[tensor.name][slices_of(tensor.dims, recipe.sizes, cut)] for tensor in signature.tensors]
    elements, fault = 0, ""
    for precision in (max(digits, (record.digits or 0) + 20), _PROOF):
        results = _run(definition, signature, parts, recipe.options, precision)
        elements, fault = 0, ""
        for returned, golden, result in zip(signature.returns, record.goldens, results, strict=True):
            if all(group.keys() & set(returned.dims) for group in cut):  # else it may be a sum over what was cut
                part = _part(golden, slices_of(returned.dims, recipe.sizes, cut))
                elements += part.value.numel()
                fault = fault or outside(returned.name, part, result)
        if not fault:
            return Derived(elements)
    return Derived(elements, fault)


def drawn(recipe: Recipe) -> dict[str, Any]:
    """The tensors of a recipe by name."""
    names = [tensor.name for tensor in recipe.signature.tensors if not tensor.keyword]
    return dict(zip(names, recipe.tensors(), strict=True)) | recipe.keywords()


def _run(
    definition: Spec, signature: Signature, values: Sequence[Any], options: Mapping[str, Any], digits: int
) -> tuple[Any, ...]:
    tensors = [value for tensor, value in zip(signature.tensors, values, strict=True) if not tensor.keyword]
    keywords = {tensor.name: value for tensor, value in zip(signature.tensors, values, strict=True) if tensor.keyword}
    with np.errstate(invalid="ignore"):  # NaN is a number here
        return run(definition, Multiprecision(digits), tensors, {**options, **keywords})


def outside(name: str, golden: Golden, result: Any) -> str:
    """The first element of a witness's ``result`` that the golden doesn't hold, in words; empty if it holds all.

    A radius of infinity claims nothing, and where mpmath has no number (0/0) there is nothing to compare.
    """
    if tuple(result.shape) != tuple(golden.value.shape):
        return f"{name} has the shape {tuple(golden.value.shape)}, and mpmath's {tuple(result.shape)}"
    values, lows, radii = (part.double().numpy() for part in (golden.value, golden.rest, golden.radius))
    for index in np.ndindex(values.shape):
        value, low, radius = float(values[index]), float(lows[index]), float(radii[index])
        if radius != radius or radius < 0 or low != low:
            return f"{name}{list(index)} has the radius {radius!r}"
        if not (radius == math.inf and math.isfinite(value)) and not _holds(value, low, radius, result[index]):
            shown = f"{value!r} + {low!r}" if low else repr(value)
            return f"{name}{list(index)} is {shown} ± {radius:.3g}, but mpmath has {result[index]!s:.40}"
    return ""


def _holds(value: float, low: float, radius: float, exact: Any) -> bool:
    if not hasattr(exact, "context"):  # a choice: integers
        return value == float(exact)
    context = exact.context
    if context.isnan(exact):
        return True
    if context.isinf(exact) or not math.isfinite(value):
        return value == float(exact)
    return bool(abs(context.mpf(value) + context.mpf(low) - exact) <= context.mpf(radius))


# Cutting.

Cut = list[dict[str, tuple[int, int]]]  # groups of symbols that are cut together: the first place, and how many


def cut_of(
    definition: Spec, signature: Signature, sizes: Mapping[str, int], options: Mapping[str, Any], chance: random.Random
) -> Cut:
    """One place along each symbol whose results are independent, where the whole takes too long."""
    if _steps(definition, signature, sizes) <= _WHOLE:
        return []
    symbols = {*definition.axes.independent, definition.row_axis(options) or "", definition.axes.columns or ""}
    symbols |= set(signature.returns[0].dims) if definition.axes.elementwise else set()
    cut: Cut = []
    for symbol in sorted(symbols & set(signature.symbols)):
        step, count = _grain(signature, symbol)
        if sizes[symbol] > count:
            first = chance.randrange(-(-sizes[symbol] // step)) * step
            cut.append({symbol: (first, min(count, sizes[symbol] - first))})
    for symbol, groups in definition.axes.groups.items():
        if sizes[groups] > 1:
            shared, first = sizes[symbol] // sizes[groups], chance.randrange(sizes[groups])
            cut.append({groups: (first, 1), symbol: (first * shared, shared)})
    for symbol, rule in definition.axes.tiling.items():
        ends = (sizes[symbol] - 1, 0) if all(symbol in tensor.dims for tensor in signature.returns) else ()
        tiles = (rule(first, 1, sizes, options, {}) for first in ends if sizes[symbol] > 1)
        alone = [one for one in filter(None, tiles) if one.ranges.keys() == {symbol} and one.options == options]
        cut += [dict(one.ranges) for one in alone[:1]]
    return cut


def _grain(signature: Signature, symbol: str) -> tuple[int, int]:
    """Of what a cut's first place along ``symbol`` must be a multiple, and how many places it must hold at least."""
    texts = [text for tensor in (*signature.tensors, *signature.returns) for text in tensor.dims]
    divisors = [(int(number), "ceil" in text) for text in texts for number in re.findall(rf"\b{symbol}/(\d+)", text)]
    return math.lcm(*(number for number, _ in divisors)), math.lcm(*(number for number, up in divisors if not up))


def slices_of(dims: Sequence[str], sizes: Mapping[str, int], cut: Cut) -> tuple[slice, ...]:
    """The part of a tensor with dimensions ``dims``."""
    firsts = {**sizes, **{symbol: first for group in cut for symbol, (first, _) in group.items()}}
    counts = {**sizes, **{symbol: count for group in cut for symbol, (_, count) in group.items()}}
    slices = []
    for text in dims:
        first = dimension(text, firsts) if dimension(text, counts) != dimension(text, sizes) else 0
        slices.append(slice(first, first + dimension(text, counts)))
    return tuple(slices)


def _part(golden: Golden, slices: tuple[slice, ...]) -> Golden:
    low = None if golden.low is None else golden.low[slices]
    return Golden(golden.value[slices], golden.radius[slices], low)


def _steps(definition: Spec, signature: Signature, sizes: Mapping[str, int]) -> int:
    """About how many operations on numbers of mpmath an evaluation takes, and how many it must make first."""
    return max(definition.cost(sizes), sum(math.prod(tensor.shape(sizes)) for tensor in signature.tensors))
