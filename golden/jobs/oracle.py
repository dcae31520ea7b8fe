"""The independent oracle of a stored record: its elements derived again by mpmath, a part of them if it is large.

A record is cut along symbols in which results don't depend on each other (rows, columns of a product, heads). The cut
inputs are evaluated by `Multiprecision`, which shares nothing with float64's balls but the definition; each element
must be within the stored radius.
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
_PROOF_DIGITS = 400  # to confirm a contradiction: cancellation may have eaten fifty digits
_MAX_UNCUT_STEPS = 4_000  # of mpmath; larger records are cut
_MAX_STEPS = 400_000  # larger parts take too long


@dataclass(frozen=True)
class Derived:
    """The number of elements that were derived (none if the record is too large), and the first fault."""

    elements: int
    fault: str = ""


def derive(record: Record, digits: int = DIGITS) -> Derived:
    """Derive ``record`` again, or the part of it that its key chooses."""
    recipe, op = record.recipe, record.recipe.definition
    signature = recipe.signature
    cut = cut_of(op, signature, recipe.sizes, recipe.options, random.Random(record.key))
    sizes = {**recipe.sizes, **{symbol: count for group in cut for symbol, (_, count) in group.items()}}
    if _steps(op, signature, sizes) > _MAX_STEPS:
        return Derived(0)
    values = inputs_of(recipe)
    parts = [values[tensor.name][slices_of(tensor.dims, recipe.sizes, cut)] for tensor in signature.tensors]
    elements, fault = 0, ""
    for precision in (max(digits, (record.digits or 0) + 20), _PROOF_DIGITS):
        results = _evaluate(op, signature, parts, recipe.options, precision)
        elements, fault = 0, ""
        for returned, golden, result in zip(signature.returns, record.goldens, results, strict=True):
            if all(group.keys() & set(returned.dims) for group in cut):  # else it may be a sum over what was cut
                part = _part(golden, slices_of(returned.dims, recipe.sizes, cut))
                elements += part.value.numel()
                fault = fault or contradiction(returned.name, part, result)
        if not fault:
            return Derived(elements)
    return Derived(elements, fault)


def inputs_of(recipe: Recipe) -> dict[str, Any]:
    """Return the tensors of a recipe by name."""
    names = [tensor.name for tensor in recipe.signature.tensors if not tensor.keyword]
    return dict(zip(names, recipe.tensors(), strict=True)) | recipe.keywords()


def _evaluate(
    op: Spec, signature: Signature, values: Sequence[Any], options: Mapping[str, Any], digits: int
) -> tuple[Any, ...]:
    tensors = [value for tensor, value in zip(signature.tensors, values, strict=True) if not tensor.keyword]
    keywords = {tensor.name: value for tensor, value in zip(signature.tensors, values, strict=True) if tensor.keyword}
    with np.errstate(invalid="ignore"):  # NaN is a valid element
        return run(op, Multiprecision(digits), tensors, {**options, **keywords})


def contradiction(name: str, golden: Golden, result: Any) -> str:
    """Describe the first element of the oracle's ``result`` outside the golden; empty if there is none.

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
    if not hasattr(exact, "context"):  # integers, such as a choice
        return value == float(exact)
    context = exact.context
    if context.isnan(exact):
        return True
    if context.isinf(exact) or not math.isfinite(value):
        return value == float(exact)
    return bool(abs(context.mpf(value) + context.mpf(low) - exact) <= context.mpf(radius))


Cut = list[dict[str, tuple[int, int]]]  # groups of symbols that are cut together: the first index, and the count


def cut_of(
    op: Spec, signature: Signature, sizes: Mapping[str, int], options: Mapping[str, Any], rng: random.Random
) -> Cut:
    """Choose one index along each symbol whose results are independent, if all of them would take too long."""
    if _steps(op, signature, sizes) <= _MAX_UNCUT_STEPS:
        return []
    symbols = {*op.axes.independent, op.row_axis(options) or "", op.axes.columns or ""}
    symbols |= set(signature.returns[0].dims) if op.axes.elementwise else set()
    cut: Cut = []
    for symbol in sorted(symbols & set(signature.symbols)):
        step, count = _granularity(signature, symbol)
        if sizes[symbol] > count:
            first = rng.randrange(-(-sizes[symbol] // step)) * step
            cut.append({symbol: (first, min(count, sizes[symbol] - first))})
    for symbol, groups in op.axes.groups.items():
        if sizes[groups] > 1:
            group_size, first = sizes[symbol] // sizes[groups], rng.randrange(sizes[groups])
            cut.append({groups: (first, 1), symbol: (first * group_size, group_size)})
    for symbol, rule in op.axes.tiling.items():
        ends = (sizes[symbol] - 1, 0) if all(symbol in tensor.dims for tensor in signature.returns) else ()
        tiles = (rule(first, 1, sizes, options, {}) for first in ends if sizes[symbol] > 1)
        alone = [tile for tile in filter(None, tiles) if tile.ranges.keys() == {symbol} and tile.options == options]
        cut += [dict(tile.ranges) for tile in alone[:1]]
    return cut


def _granularity(signature: Signature, symbol: str) -> tuple[int, int]:
    """Return the step of a cut's first index along ``symbol``, and the least count of indices."""
    texts = [text for tensor in (*signature.tensors, *signature.returns) for text in tensor.dims]
    divisors = [(int(number), "ceil" in text) for text in texts for number in re.findall(rf"\b{symbol}/(\d+)", text)]
    return math.lcm(*(number for number, _ in divisors)), math.lcm(*(number for number, up in divisors if not up))


def slices_of(dims: Sequence[str], sizes: Mapping[str, int], cut: Cut) -> tuple[slice, ...]:
    """Return the part of a tensor with dimensions ``dims``."""
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


def _steps(op: Spec, signature: Signature, sizes: Mapping[str, int]) -> int:
    """Estimate the operations on numbers of mpmath that an evaluation takes, or its numbers if they are more."""
    return max(op.cost(sizes), sum(math.prod(tensor.shape(sizes)) for tensor in signature.tensors))
