"""Shrinking: the smallest case that fails in the same way, by greedy steps.

First come sizes (by bisection) and simplifications of protocol, memory, options, layouts and distributions. Inputs are
functions of (seed, tensor, coordinates): cutting a dimension leaves the remaining elements unchanged, which makes
greedy shrinking work.

Then each tensor becomes zeros, or ones, except for the fewest elements that the failure needs, found by halving (delta
debugging: A. Zeller & R. Hildebrandt, *Simplifying and isolating failure-inducing input*, IEEE TSE 28 (2002) 183);
their values become one, or numbers of few bits, if that still fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from assay.golden.inputs.distributions import names_of
from assay.golden.signature import TensorSpec
from assay.runtime.deadline import CpuLimit, thread_clock
from assay.verify.cases.case import Case, Edit, contents, layout_of
from assay.verify.cases.layouts import tied_axes
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.cases.sequences import shorter
from assay.verify.findings import Failure

MOST = 1024
"""The most elements of a tensor that is reduced element by element: halving tries each several times."""
READABLE = 8
"""The most elements that a report lists one by one; a tensor that needs more keeps its distribution."""
_BITS = (1, 2, 4)  # lengths of the significands that are tried instead of an element's own

Fails = Callable[[Case], bool]


@dataclass
class _Tensor:
    """A tensor being reduced: the case as it is, and the elements of this tensor that aren't as ``fill`` has them."""

    case: Case
    spec: TensorSpec
    fill: str
    elements: dict[tuple[int, ...], float]

    def written(self, elements: dict[tuple[int, ...], float]) -> Case:
        """Return the case with these elements, and the distribution ``fill`` elsewhere."""
        name = self.spec.name
        others = tuple(edit for edit in self.case.edits if edit[0] != name)
        own: tuple[Edit, ...] = tuple((name, index, value) for index, value in elements.items())
        return replace(self.case, values={**self.case.values, name: self.fill}, edits=(*others, *own))

    def may_be(self, value: float) -> bool:
        """Whether an element may have this value."""
        return self.spec.interval is None or value in self.spec.interval


def with_few_elements(case: Case, fails: Fails) -> Case:
    """Return the case with as few elements as ``fails`` needs; the same case if no tensor gets shorter to write
    down."""
    for tensor in case.signature.tensors:
        fill = next((name for name in _CONSTANT if name in names_of(tensor)), "")
        if tensor.role in ("real", "in") and fill and 0 < math.prod(case.shape(tensor)) <= MOST:
            case = _reduced(case, tensor, fill, fails)
    return case


_CONSTANT = ("zeros", "ones", "constant")
"""Distributions of equal elements, the simplest first; "constant" is that of an interval without zero and one."""


def _reduced(case: Case, tensor: TensorSpec, fill: str, fails: Fails) -> Case:
    others = tuple(edit for edit in case.edits if edit[0] != tensor.name)
    for kind in _CONSTANT:
        if case.values.get(tensor.name) == kind and len(others) == len(case.edits):
            return case
        if kind in names_of(tensor):
            plain = replace(case, values={**case.values, tensor.name: kind}, edits=others)
            if fails(plain):
                return plain
    result = _Tensor(case, tensor, fill, _elements(case, tensor, fill))
    fewest = _fewest(result, fails)
    if len(fewest) > READABLE:
        return case
    return _of_few_bits(_with(result, fewest), fails)


def _with(result: _Tensor, elements: dict[tuple[int, ...], float]) -> _Tensor:
    return _Tensor(result.written(elements), result.spec, result.fill, elements)


def _elements(case: Case, tensor: TensorSpec, fill: str) -> dict[tuple[int, ...], float]:
    """Return the elements by index that the distribution ``fill`` would change; where a layout makes some equal, the
    first."""
    values, tied = contents(case, tensor).double(), _tied(case, tensor)
    filled = contents(replace(case, values={**case.values, tensor.name: fill}, edits=()), tensor).double()
    indices = (values != filled) | (values.signbit() != filled.signbit())
    results = {}
    for row in indices.nonzero().tolist():
        index = tuple(0 if axis in tied else position for axis, position in enumerate(row))
        results[index] = float(values[index])
    return results


def _tied(case: Case, tensor: TensorSpec) -> tuple[int, ...]:
    return tied_axes(layout_of(case, tensor), case.shape(tensor))


def _fewest(tensor: _Tensor, fails: Fails) -> dict[tuple[int, ...], float]:
    """Return the elements that remain after halving, again and again, has removed those that the failure doesn't
    need."""
    elements, pieces = dict(tensor.elements), 1
    if elements and not fails(tensor.written(elements)):  # what is written differs in some way: nothing is known of it
        return elements
    while elements:
        step, gone = -(-len(elements) // pieces), False
        for first in range(0, len(elements), step):
            indices = list(elements)
            fewer = {index: elements[index] for index in (*indices[:first], *indices[first + step :])}
            if len(fewer) < len(elements) and fails(tensor.written(fewer)):
                elements, gone, pieces = fewer, True, min(pieces, max(1, len(fewer)))
                break
        if not gone:
            if step == 1:
                break
            pieces = min(2 * pieces, len(elements))
    return elements


def _of_few_bits(tensor: _Tensor, fails: Fails) -> Case:
    """Return the case with ones if it still fails; else with each element rounded to as few bits as still fail."""
    ones = dict.fromkeys(tensor.elements, 1.0)
    if any(not math.isfinite(value) for value in tensor.elements.values()) or ones == tensor.elements:
        return tensor.case
    if tensor.may_be(1.0) and fails(tensor.written(ones)):
        return tensor.written(ones)
    for index, value in list(tensor.elements.items()):
        for simple in filter(tensor.may_be, _simpler_edits(value)):
            other = {**tensor.elements, index: simple}
            if fails(tensor.written(other)):
                tensor = _with(tensor, other)
                break
    return tensor.case


def _simpler_edits(value: float) -> Iterator[float]:
    """Yield 1, then the value truncated to few bits."""
    if value and math.isfinite(value):
        shown = {1.0: None, **{_rounded(value, bits): None for bits in _BITS}}
        yield from itertools.takewhile(lambda simple: simple != value, shown)


def _rounded(value: float, bits: int) -> float:
    significand, exponent = math.frexp(value)
    return math.ldexp(math.trunc(significand * 2**bits), exponent - bits)  # never beyond the format's range


def without_index(case: Case, symbol: str, position: int) -> Case | None:
    """Return the case without one index along a symbol; None if an edited element is there.

    Only for tensors that are constant apart from their edits: nothing else changes then.
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


_NUMBERS = {"contract", "exact", "nonfinite"}  # kinds of wrong numbers, which shrinking may turn into each other
_SIMPLE = ("integers", "ties", "powers", "one_hot", "normal")
_FEW_SEEDS = 8
_FEW_POSITIONS = 16  # the longest axis whose indices are removed one by one; each costs a trial


def shrink(
    failure: Failure,
    attempt: Callable[[Case], Failure | None],
    sampler: Sampler,
    *,
    trials: int = 400,
    seconds: float = 20.0,
) -> Failure:
    """Return the smallest failure of the same kind that greedy steps reach.

    The search stops after ``trials`` trials, or ``seconds`` of processor time, which a busy machine doesn't shorten.
    """
    search = _Search(failure, attempt, sampler, trials, CpuLimit(seconds, thread_clock))
    if failure.is_of_count:  # without ties a number may be wrong by itself, which says more
        seeds = range(failure.case.seed, failure.case.seed + _FEW_SEEDS)
        any(search.fails(with_values(failure.case, "normal", edits=(), seed=seed)) for seed in seeds)
    while search.smaller_sizes() | search.simpler():
        pass
    while search.fewer_elements() and search.smaller_sizes() | search.fewer_positions():
        pass
    return search.failure


def is_alike(result: Failure, failure: Failure) -> bool:
    """Whether two failures are of one kind; all wrong numbers are, but of a wrong count each number may be right."""
    if result.is_of_count and not failure.is_of_count:
        return False
    return result.kind == failure.kind or {result.kind, failure.kind} <= _NUMBERS


@dataclass
class _Search:
    """A greedy search in progress: the smallest failure so far, and the remaining budget."""

    failure: Failure
    attempt: Callable[[Case], Failure | None]
    sampler: Sampler
    trials: int
    limit: CpuLimit

    def fails(self, case: Case) -> bool:
        """Whether ``case`` fails in the same way. If so, its failure becomes the smallest."""
        if self.trials == 0 or self.limit.is_over():
            return False
        self.trials -= 1
        result = self.attempt(self.sampler.tied(case))
        if result is None or not is_alike(result, self.failure):
            return False
        self.failure = result
        return True

    def smaller_sizes(self) -> bool:
        """Reduce each size, the largest first, to the smallest allowed one that fails, by bisection. Return whether any
        shrank."""
        progress = False
        for symbol in sorted(self.failure.case.sizes, key=lambda name: -self.failure.case.sizes[name]):
            sizes = self._allowed(symbol)
            least, most = 0, len(sizes)  # sizes[:least] do not fail; the present size stands behind the last
            if sizes and self._cut(symbol, sizes[0]):
                progress = True
                continue
            least = 1
            while least < most:
                middle = (least + most) // 2
                if self._cut(symbol, sizes[middle]):
                    most, progress = middle, True
                else:
                    least = middle + 1
        return progress

    def _allowed(self, symbol: str) -> Sequence[int]:
        """Return the sizes below the present one that a symbol may take, ascending."""
        case, definition = self.failure.case, self.sampler.definition
        if symbol in self.sampler.ties:  # it goes with another
            return ()
        size, step = case.sizes[symbol], definition.step(case.signature, symbol, case.sizes)
        restricted = self.sampler.shapes.get(symbol) or definition.sizes.allowed.get(symbol)
        least = int(case.options[definition.sizes.minimum[symbol]]) if symbol in definition.sizes.minimum else 1
        if restricted is not None:
            return sorted({s for s in restricted if least <= s < size and s % step == 0})
        return range(-(-least // step) * step, size, step)

    def _cut(self, symbol: str, smaller: int) -> bool:
        """Whether the case fails with the symbol cut to a smaller size: at the end, at the front, or at both, where
        the first edit stays."""
        case, definition = self.failure.case, self.sampler.definition
        size, multiples = case.sizes[symbol], definition.sizes.multiples
        sizes = {**case.sizes, symbol: smaller}
        for name, groups in definition.axes.groups.items():
            if groups == symbol and name in sizes:
                sizes[name] = max(1, sizes[name] // size) * smaller
        if any(sizes[name] % max(sizes[p], 1) for name, p in multiples.items() if name in sizes and p in sizes):
            return False
        if self.fails(replace(case, sizes=sizes, edits=_edits_within(case, symbol, 0, smaller))):
            return True
        if symbol in multiples.values():
            return False
        front = size - smaller
        firsts = dict.fromkeys([front, *(min(first, front) for first in _edited(case, symbol)[:1])])
        return any(self.fails(self._cut_from(first, symbol, sizes)) for first in firsts if first)

    def _cut_from(self, first: int, symbol: str, sizes: Mapping[str, int]) -> Case:
        """Return the case with these sizes, of a symbol the indices from ``first`` on."""
        case = self.failure.case
        origin = {**case.origin, symbol: case.origin.get(symbol, 0) + first}
        return replace(case, sizes=sizes, origin=origin, edits=_edits_within(case, symbol, first, sizes[symbol]))

    def simpler(self) -> bool:
        """Apply the first simplification (other than of sizes) that still fails. Return whether there is one."""
        return any(self.fails(candidate) for candidate in _simpler(self.failure, self.sampler))

    def fewer_elements(self) -> bool:
        """Reduce tensors to constants with few edits. Return whether the case changed."""
        before = self.failure.case
        result = with_few_elements(before, self.fails)
        if result != self.failure.case and not self.fails(result):  # the search may have ended on the way
            return False
        return self.failure.case != before

    def fewer_positions(self) -> bool:
        """Remove each index along a symbol that holds no edit. Return whether any could be removed."""
        progress = False
        for symbol in self.failure.case.sizes:
            for index in reversed(range(self.failure.case.sizes[symbol]) if self._may_lose_one(symbol) else ()):
                if self.failure.case.sizes[symbol] - 1 not in self._allowed(symbol):
                    break
                fewer = without_index(self.failure.case, symbol, index)
                progress |= fewer is not None and self.fails(fewer)
        return progress

    def _may_lose_one(self, symbol: str) -> bool:
        """Whether a symbol is short, and no other symbol's size depends on it."""
        multiples = self.sampler.definition.sizes.multiples
        return self.failure.case.sizes[symbol] <= _FEW_POSITIONS and symbol not in (*multiples, *multiples.values())


def _edited(case: Case, symbol: str) -> list[int]:
    """Return the indices along a symbol that have edits, ascending."""
    dims = {tensor.name: tensor.dims for tensor in case.signature.tensors}
    pairs = [pair for name, index, _ in case.edits for pair in zip(dims[name], index, strict=True)]
    return sorted({position for dim, position in pairs if dim == symbol})


def _edits_within(case: Case, symbol: str, first: int, size: int) -> tuple[Edit, ...]:
    """Return the edits that remain when ``size`` indices along a symbol are kept, from ``first`` on."""
    dims = {tensor.name: tensor.dims for tensor in case.signature.tensors}
    elements = []
    for name, index, value in case.edits:
        moved = tuple(position - first * (dim == symbol) for dim, position in zip(dims[name], index, strict=True))
        if all(0 <= position < size for dim, position in zip(dims[name], moved, strict=True) if dim == symbol):
            elements.append((name, moved, value))
    return tuple(elements)


def _simpler(failure: Failure, sampler: Sampler) -> Iterator[Case]:
    """Yield simpler cases of the same sizes: protocol, memory, options, layouts, distributions, single elements."""
    case = failure.case
    if case.protocol != "once":
        yield replace(case, protocol="once", before=())
    yield from shorter(case)
    if case.memory != "plain":
        yield replace(case, memory="plain")
    if case.unused != "plain":
        yield replace(case, unused="plain")
    yield from _simpler_options(case, sampler)
    for name, layout in case.layouts.items():
        if layout != "contiguous":
            yield replace(case, layouts={**case.layouts, name: "contiguous"})
    yield from _simpler_values(case)


def _simpler_options(case: Case, sampler: Sampler) -> Iterator[Case]:
    signature = case.definition.signature_text
    for name, values in sampler.options.items():
        if case.options[name] != values[0] and isinstance(signature, str):
            simpler = replace(case, options={**case.options, name: values[0]})
            steps = {symbol: case.definition.step(simpler.signature, symbol, case.sizes) for symbol in case.sizes}
            if not any(size % steps[symbol] for symbol, size in case.sizes.items()):
                yield simpler


def _simpler_values(case: Case) -> Iterator[Case]:
    for tensor in case.signature.tensors:
        names = names_of(tensor)
        is_real = tensor.role in ("real", "in", "sorted")
        simple = tuple(name for name in _SIMPLE if name in names) if is_real else names[:1]
        now = case.values.get(tensor.name, names[0])
        if now in _CONSTANT:  # nothing is simpler
            continue
        for name in simple:
            if name == now:
                break
            yield replace(case, values={**case.values, tensor.name: name})
