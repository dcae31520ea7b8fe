"""Fewer elements: a tensor of zeros, or ones, but for the few elements that a failure needs.

In: a failing case whose sizes are small by now, and a way to ask whether another fails likewise. Out: the case with the
same sizes and the fewest elements other than zero that halving finds (delta debugging: A. Zeller & R. Hildebrandt,
*Simplifying and isolating failure-inducing input*, IEEE TSE 28 (2002) 183), their values ones or of few bits where that
does as well. Called by `shrink`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from assay.golden.inputs.distributions import names_of
from assay.golden.signature import TensorSpec
from assay.verify.cases.case import Case, Edit, contents
from assay.verify.cases.layouts import tied_axes

MOST = 1024
"""Tensors with more elements than this stay as they are."""
READABLE = 8
"""Elements that are told one by one; a tensor that needs more of its own stays as it was drawn."""
_BITS = (1, 2, 4)  # of a significand that is tried in place of an element's own

Fails = Callable[[Case], bool]


@dataclass
class _Tensor:
    """A tensor under reduction: the case as it is, and the elements of this tensor that aren't zero."""

    case: Case
    name: str
    kept: dict[tuple[int, ...], float]

    def written(self, kept: dict[tuple[int, ...], float]) -> Case:
        """The case with these elements, and zeros elsewhere."""
        others = tuple(edit for edit in self.case.edits if edit[0] != self.name)
        own: tuple[Edit, ...] = tuple((self.name, index, value) for index, value in kept.items())
        return replace(self.case, values={**self.case.values, self.name: "zeros"}, edits=(*others, *own))


def with_few_elements(case: Case, fails: Fails) -> Case:
    """The case with as few elements as ``fails`` needs; the same where no tensor can be told in fewer words."""
    for tensor in case.signature.tensors:
        if tensor.role == "real" and "zeros" in names_of(tensor) and 0 < math.prod(case.shape(tensor)) <= MOST:
            case = _reduced(case, tensor, fails)
    return case


def _reduced(case: Case, tensor: TensorSpec, fails: Fails) -> Case:
    others = tuple(edit for edit in case.edits if edit[0] != tensor.name)
    for kind in ("zeros", "ones"):
        if case.values.get(tensor.name) == kind and len(others) == len(case.edits):
            return case
        if kind in names_of(tensor):
            plain = replace(case, values={**case.values, tensor.name: kind}, edits=others)
            if fails(plain):
                return plain
    result = _Tensor(case, tensor.name, _elements(case, tensor))
    fewest = _fewest(result, fails)
    if len(fewest) > READABLE:
        return case
    return _of_few_bits(_with(result, fewest), fails)


def _with(result: _Tensor, kept: dict[tuple[int, ...], float]) -> _Tensor:
    """The same tensor with other elements."""
    return _Tensor(result.written(kept), result.name, kept)


def _elements(case: Case, tensor: TensorSpec) -> dict[tuple[int, ...], float]:
    """The elements other than zero by their places, of those that a layout makes equal the first."""
    values, tied = contents(case, tensor).double(), _tied(case, tensor)
    indices = (values != 0) | values.signbit()
    results = {}
    for row in indices.nonzero().tolist():
        index = tuple(0 if axis in tied else position for axis, position in enumerate(row))
        results[index] = float(values[index])
    return results


def _tied(case: Case, tensor: TensorSpec) -> tuple[int, ...]:
    return tied_axes(case.layouts.get(tensor.name, "contiguous"), case.shape(tensor))


def _fewest(tensor: _Tensor, fails: Fails) -> dict[tuple[int, ...], float]:
    """The elements without those that halving, and halving again, shows to play no part."""
    kept, pieces = dict(tensor.kept), 1
    if kept and not fails(tensor.written(kept)):  # what is written differs in some way: nothing is known of it
        return kept
    while kept:
        step, gone = -(-len(kept) // pieces), False
        for first in range(0, len(kept), step):
            indices = list(kept)
            fewer = {index: kept[index] for index in (*indices[:first], *indices[first + step :])}
            if len(fewer) < len(kept) and fails(tensor.written(fewer)):
                kept, gone, pieces = fewer, True, min(pieces, max(1, len(fewer)))
                break
        if not gone:
            if step == 1:
                break
            pieces = min(2 * pieces, len(kept))
    return kept


def _of_few_bits(tensor: _Tensor, fails: Fails) -> Case:
    """Ones where they do as well; else each element of as few bits as does."""
    ones = dict.fromkeys(tensor.kept, 1.0)
    if any(not math.isfinite(value) for value in tensor.kept.values()) or ones == tensor.kept:
        return tensor.case
    if fails(tensor.written(ones)):
        return tensor.written(ones)
    for index, value in list(tensor.kept.items()):
        for simple in _simpler(value):
            other = {**tensor.kept, index: simple}
            if fails(tensor.written(other)):
                tensor = _with(tensor, other)
                break
    return tensor.case


def _simpler(value: float) -> Iterator[float]:
    """One, then the number itself with few bits."""
    if value and math.isfinite(value):
        shown = {1.0: None, **{_rounded(value, bits): None for bits in _BITS}}
        yield from itertools.takewhile(lambda simple: simple != value, shown)


def _rounded(value: float, bits: int) -> float:
    significand, exponent = math.frexp(value)
    return math.ldexp(math.trunc(significand * 2**bits), exponent - bits)  # never beyond the format's range


def without_place(case: Case, symbol: str, position: int) -> Case | None:
    """The case with one place along a symbol taken out; None where elements that count lie there.

    Of tensors that are zeros or ones but for single elements nothing else changes.
    """
    dims = {tensor.name: tensor.dims for tensor in case.signature.tensors}
    edits = []
    for name, index, value in case.edits:
        at = [where for dim, where in zip(dims[name], index, strict=True) if dim == symbol]
        if position in at:
            return None
        moved = tuple(
            where - (dim == symbol and where > position) for dim, where in zip(dims[name], index, strict=True)
        )
        edits.append((name, moved, value))
    return replace(case, sizes={**case.sizes, symbol: case.sizes[symbol] - 1}, edits=tuple(edits))
