"""The independent oracle of a stored record: its elements derived again by mpmath, a part of them if it is large.

A record is cut along symbols in which results don't depend on each other (rows, columns of a product, heads). The cut
inputs are evaluated by `Multiprecision`, which shares nothing with float64's balls but the definition; each element
must be within the stored radius.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Multiprecision
from assay.golden.evaluation.call import run
from assay.golden.evaluation.cutting import Cut, axes_of, cut
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.recipe import Recipe
from assay.golden.registry import Spec
from assay.golden.signature import Signature
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
    signature, values = recipe.signature, recipe.named()
    part, options = part_of(recipe, values, random.Random(record.key))
    tensors, sizes = part.inputs(op, signature, values)
    if _steps(op, signature, {**recipe.sizes, **sizes}) > _MAX_STEPS:
        return Derived(0)
    keywords = {tensor.name: tensors.pop(tensor.name) for tensor in signature.tensors if tensor.keyword}
    elements, fault = 0, ""
    for precision in (max(digits, (record.digits or 0) + 20), _PROOF_DIGITS):
        with np.errstate(invalid="ignore"):  # NaN is a valid element
            results = run(op, Multiprecision(precision), [*tensors.values()], {**options, **keywords})
        elements, fault = 0, ""
        for returned, golden, result in zip(signature.returns, record.goldens, results, strict=True):
            if part.is_complete(returned):
                value, radius, rest = (part.of(returned, word) for word in (golden.value, golden.radius, golden.rest))
                elements += value.numel()
                fault = fault or contradiction(returned.name, Golden(value, radius, rest), result)
        if not fault:
            break
    return Derived(elements, fault)


def part_of(recipe: Recipe, values: Mapping[str, Any], rng: random.Random) -> tuple[Cut, Mapping[str, Any]]:
    """Choose one block of each axis along which results are independent, if all results would take too long.

    Returns the cut and the options of a call of its tensors.
    """
    op, signature, sizes, options = recipe.definition, recipe.signature, recipe.sizes, recipe.options
    if _steps(op, signature, sizes) <= _MAX_UNCUT_STEPS:
        return Cut(), options
    axes = axes_of(op, signature, sizes, op.row_axis(options))
    blocks = {axis: torch.tensor([rng.randrange(axis.blocks)]) for axis in axes if axis.symbol not in op.axes.reduced}
    tile = None
    for symbol, rule in op.axes.tiling.items():
        if sizes[symbol] > 1 and all(symbol in returned.dims for returned in signature.returns):
            ends = (rule(first, 1, sizes, options, values) for first in (sizes[symbol] - 1, 0))
            tile = next(filter(None, ends), None)
    return cut(op, signature, sizes, blocks, tile), options if tile is None else tile.options


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


def _steps(op: Spec, signature: Signature, sizes: Mapping[str, int]) -> int:
    """Estimate the operations on numbers of mpmath that an evaluation takes, or its numbers if they are more."""
    return max(op.cost(sizes), sum(math.prod(tensor.shape(sizes)) for tensor in signature.tensors))
