"""Relations between a kernel's outputs and the goldens, measured on several calls.

A relation is a function of the golden that gives every wrong element of an output within the contract's tolerance: a
factor, an offset, a constant, a saturation, fewer digits, the value of another index. It is reported if it holds in
each call that shows the fault, and in two at least, so that it can't be wrong of these; a relation that would fit
anything, because the tolerance is wide, isn't one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, mul, sub, xor
from typing import Any

import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to, ulp
from assay.golden.signature import INTEGERS, TensorSpec
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import judge
from assay.verify.explanation.fault_models.fault_tolerance import Observation
from assay.verify.findings import Fact, Picture

Tensor = torch.Tensor

_LEAST_CALLS = 2
_LEAST_ELEMENTS = 6  # wrong ones, in all calls together: fewer may fit by chance
_LEAST_TELLING = 3  # wrong elements of a call whose goldens are far enough from zero for a quotient
_SURE = math.log(1e6)  # evidence that an index is another's, and not by chance
_NARROW = 0.05  # relative half-width of an interval of factors that still says something
_SLACK = 1.5  # times the tolerance before the store: a wrong kernel's own roundings are of other numbers
_STORE = 0.75  # of the spacing: half of it, and some slack
_MOST_PAIRS = 2**22  # comparisons of elements for one axis
_LEAST_DISTINCT = 8  # numbers of a narrow format: fewer may be so by chance
_MOST_UNITS = 64  # by which repeated roundings to it may be off
_POINTS = 100  # of a picture
_NARROWER = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_CONSTANTS = {
    "2": 2.0,
    "1/2": 0.5,
    "4": 4.0,
    "1/4": 0.25,
    "ln 2": math.log(2),
    "1 / ln 2": 1 / math.log(2),
    "sqrt(2)": math.sqrt(2),
    "1 / sqrt(2)": 1 / math.sqrt(2),
    "ln 10": math.log(10),
    "pi": math.pi,
}


@dataclass(frozen=True)
class Wrong:
    """The wrong elements of one output in one call, float64 [elements]; ``whole`` if none is right but near zero.

    ``mask`` [shape of the output] marks them in ``got`` and ``golden`` of that shape. The tolerance is made of
    ``inner``, that of the golden before its store, and ``store``, the spacing of the output's format at ``got``.
    """

    case: Case
    got: Tensor
    golden: Tensor
    inner: Tensor
    store: Tensor
    mask: Tensor
    judged: Tensor

    @property
    def whole(self) -> bool:
        """Whether every judged element is wrong, but for those near zero."""
        return bool((self.mask | ~self.judged | (self.golden.abs() <= 8 * self.radius)).all())

    @property
    def radius(self) -> Tensor:
        """The tolerance of a result as large as the golden."""
        return _SLACK * self.inner + _STORE * self.store

    @property
    def elements(self) -> tuple[Tensor, Tensor, Tensor]:
        """The wrong elements: what came, the golden, and the tolerance."""
        return self.got[self.mask], self.golden[self.mask], self.radius[self.mask]


def relations(observations: Sequence[Observation], aspect: str) -> list[Fact]:
    """Return the relation of each output that has one, the simplest that holds in all calls that show the fault."""
    facts = []
    for index, tensor in enumerate(observations[0].case.signature.returns if observations else ()):
        if tensor.is_integer or tensor.name in observations[0].case.definition.outputs.chosen:
            continue
        calls = [wrong for observation in observations if (wrong := _wrong_elements(observation, index)) is not None]
        if len(calls) < _LEAST_CALLS or sum(int(call.mask.sum()) for call in calls) < _LEAST_ELEMENTS:
            continue
        words = next(filter(None, (relation(calls, tensor) for relation in _RELATIONS)), "")
        if words:
            which = "all elements" if all(call.whole for call in calls) else "the wrong elements"
            told = f"{which} of {tensor.name} {words} ({len(calls)} calls)"
            facts.append(Fact("relation", told, aspect, _picture(calls, tensor)))
    return facts


def _picture(calls: Sequence[Wrong], tensor: TensorSpec) -> Picture | None:
    """Return a few wrong elements over the right ones; None if hardly any are finite."""
    got, golden = (torch.cat([call.elements[part] for call in calls]) for part in (0, 1))
    known = got.isfinite() & golden.isfinite()
    points = sorted(zip(golden[known].tolist(), got[known].tolist(), strict=True))
    few = tuple(points[:: -(-len(points) // _POINTS) or 1])
    if len(few) < _LEAST_TELLING:
        return None
    return Picture(f"right {tensor.name}", f"{tensor.name} of the kernel", few, diagonal="right")


def _wrong_elements(observation: Observation, index: int) -> Wrong | None:
    limits, got = observation.limits[index], observation.outputs[index]
    judgement = judge(got, limits)
    if not bool(judgement.broken.any()):
        return None
    values = got.double()
    store = ulp(values.nan_to_num().clamp(-limits.out.largest, limits.out.largest), limits.out)
    inner = limits.pre_store_radius
    return Wrong(observation.case, values, limits.golden, inner, store, judgement.broken, limits.judged)


def _constant(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """All wrong elements are one number, or no number."""
    got = torch.cat([call.elements[0] for call in calls])
    golden = torch.cat([call.elements[1] for call in calls])
    if bool(got.isnan().all()):
        return "are NaN"
    if bool(got.isinf().all()):
        return "are infinite"
    first = float(got[0])
    if bool((got == first).all()) and _distinct(golden) > 1:
        return f"are {first:g}"
    size = got.abs()
    alike = bool((size == size[0]).all()) and math.isfinite(first) and bool((got.sign() == golden.sign()).all())
    if alike and bool((golden.abs() >= size).all()):
        return f"stay at {abs(first):g} in magnitude, where the right ones are larger"
    return ""


def _factor(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """All wrong elements are the right ones times one factor, of the problem's numbers or not."""
    intervals = [_quotients(call) for call in calls]
    if not all(intervals):
        return ""
    bounds = [interval for interval in intervals if interval is not None]
    if any(low <= 1 <= high for low, high in bounds):
        return ""
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    if _is_narrow(low, high):
        if low <= -1 <= high:
            return "have the opposite sign"
        return f"are {_number(low, high, calls)} times the right ones"
    named = _of_sizes(calls, bounds)
    return f"are {named} times the right ones" if named else ""


def _quotients(call: Wrong) -> tuple[float, float] | None:
    """Return the factors that every wrong element of a call admits; None if there are none."""
    got, golden, _ = call.elements
    inner, store = _SLACK * call.inner[call.mask], _STORE * call.store[call.mask]
    telling = golden.isfinite() & (golden.abs() > 8 * inner) & (got.abs() > 8 * store)
    if int(telling.sum()) < min(_LEAST_TELLING, len(got)) or not bool(got.isfinite().all()):
        return None
    got, golden, inner, store = (part[telling] for part in (got, golden, inner, store))
    width = inner * (got / golden).abs() + store
    ends = torch.stack([(got - width) / golden, (got + width) / golden])
    low, high = float(ends.min(0).values.max()), float(ends.max(0).values.min())
    return (low, high) if low <= high else None


def _offset(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """All wrong elements are the right ones plus one number."""
    low, high = -math.inf, math.inf
    for call in calls:
        got, golden, radius = call.elements
        if not bool((got.isfinite() & golden.isfinite()).all()):
            return ""
        low = max(low, float((got - golden - radius).max()))
        high = min(high, float((got - golden + radius).min()))
    goldens = _distinct(torch.cat([call.elements[1] for call in calls]))
    if low <= 0 <= high or goldens < _LEAST_TELLING or not _is_narrow(low, high):
        return ""
    sign, (least, most) = ("plus", (low, high)) if low > 0 else ("minus", (-high, -low))
    return f"are the right ones {sign} {_number(least, most, calls)}"


def _number(low: float, high: float, calls: Sequence[Wrong]) -> str:
    """Return a number of an interval in as few digits as tell it, with its name if only one of the problem's fits."""
    middle = (low + high) / 2
    value = next(text for digits in range(1, 17) if low <= float(text := f"{middle:.{digits}g}") <= high)
    names = [name for name, constant in _CONSTANTS.items() if low <= constant <= high]
    names += _options(calls, low, high)
    return f"{value} ({names[0]})" if len(names) == 1 and names[0] != value else value


def _options(calls: Sequence[Wrong], low: float, high: float) -> list[str]:
    """Return the options that all calls have with one value in the interval, and those whose reciprocal is in it."""
    names, first = [], calls[0].case.definition.complete(calls[0].case.options)
    for name, value in first.items():
        same = all(call.case.definition.complete(call.case.options)[name] == value for call in calls)
        if same and isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            names += [name] if low <= value <= high else [f"1 / {name}"] if low <= 1 / value <= high else []
    return names


def _of_sizes(calls: Sequence[Wrong], bounds: Sequence[tuple[float, float]]) -> str:
    """Return the expression of a size or an option that is in the interval of each call, and differs between them."""
    for name, values in _expressions(calls):
        fits = all(low <= value <= high for value, (low, high) in zip(values, bounds, strict=True))
        if fits and len(set(values)) > 1 and all(_is_narrow(low, high) for low, high in bounds):
            return name
    return ""


def _is_narrow(low: float, high: float) -> bool:
    """Return whether an interval says something about a number in it."""
    return low <= high and high - low <= _NARROW * abs(low + high)


_OF_A_NUMBER: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("{}", lambda n: n),
    ("1/{}", lambda n: 1 / n),
    ("sqrt({})", math.sqrt),
    ("1/sqrt({})", lambda n: 1 / math.sqrt(n)),
    ("({0} - 1)/{0}", lambda n: (n - 1) / n),
    ("{0}/({0} - 1)", lambda n: n / (n - 1) if n != 1 else math.nan),
    ("sqrt({0}/({0} - 1))", lambda n: math.sqrt(n / (n - 1)) if n > 1 else math.nan),
    ("sqrt(({0} - 1)/{0})", lambda n: math.sqrt((n - 1) / n) if n >= 1 else math.nan),
)


def _expressions(calls: Sequence[Wrong]) -> Iterator[tuple[str, list[float]]]:
    """Yield the expressions of each size and each positive option, and their values in the calls."""
    numbers: dict[str, list[Any]] = {
        symbol: [call.case.sizes[symbol] for call in calls]
        for symbol in calls[0].case.sizes
        if all(call.case.sizes.get(symbol, 0) > 0 for call in calls)
    }
    options = [call.case.definition.complete(call.case.options) for call in calls]
    for name in options[0]:
        values = [each.get(name) for each in options]
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values):
            numbers[name] = values
    for name, values in numbers.items():
        for words, function in _OF_A_NUMBER:
            yield words.format(name), [function(value) for value in values]


def _other_index(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """The wrong elements are the right ones of another index along one dimension."""
    for axis, name in enumerate(tensor.dims):
        patterns = [_patterns(call, axis) for call in calls if call.golden.shape[axis] > 1]
        if len(patterns) < _LEAST_CALLS:
            continue
        shared = set.intersection(*(set(evidence) for evidence in patterns))
        evidence = {words: sum(pattern[words] for pattern in patterns) for words in shared}
        surest = min(evidence, key=lambda words: (-round(evidence[words], 6), len(words), words), default="")
        if surest and evidence[surest] > _SURE:
            return surest.format(name)
    return ""


def _patterns(call: Wrong, axis: int) -> dict[str, float]:
    """Return each dependence of the index of the values on that of the wrong elements that the call admits.

    ``{}`` in the words is the dimension's name. The evidence is the negative logarithm of the chance that values taken
    from random indices fit as well: for each index the share of the other indices whose values would fit.
    """
    got, golden, radius, mask = (
        part.movedim(axis, 0).reshape(part.shape[axis], -1) for part in (call.got, call.golden, call.radius, call.mask)
    )
    size, width = got.shape
    wrong = mask.any(1).nonzero()[:, 0]
    if len(wrong) * size * width > _MOST_PAIRS:
        return {}
    off = (got[wrong, None, :] - golden[None, :, :]).abs() <= radius[wrong, None, :]
    fits = (off | ~mask[wrong, None, :]).all(2)  # [wrong indices, indices whose values may have come]
    if not bool(fits.any(1).all()):
        return {}
    surprise = -(fits.double().sum(1) / size).clamp(min=1 / size).log()
    results: dict[str, float] = {}
    for words, source in _index_functions(size):
        sources = [source(index) for index in wrong.tolist()]
        known = [(row, index) for row, index in enumerate(sources) if 0 <= index < size]
        if len(known) * 2 > len(sources) and all(bool(fits[row, index]) for row, index in known):
            results[words] = float(sum(surprise[row] for row, _ in known)) - math.log(8 * size)
    return results


def _index_functions(size: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yield the words and the function of each dependence of one index on another, of a dimension of this size."""
    for by in (*range(1, min(size, 9)), *(power for power in (16, 32, 64, 128) if power < size)):
        yield f"are the right ones {by} earlier along {{}}", partial(add, -by)
        yield f"are the right ones {by} later along {{}}", partial(add, by)
        yield f"are the right ones rolled by {by} along {{}}", partial(_rolled, size, by)
    yield "are the right ones in reverse order along {}", partial(sub, size - 1)
    yield "are the right ones of the first {}", partial(mul, 0)
    yield "are the right ones of the last {}", partial(max, size - 1)
    yield "are the right ones with neighbours along {} exchanged", partial(xor, 1)
    for by in range(2, size):
        yield f"are the right ones of index // {by} along {{}}", partial(_quotient, by)
        yield f"are the right ones of index % {by} along {{}}", partial(_remainder, by)


def _rolled(size: int, by: int, index: int) -> int:
    return (index - by) % size


def _quotient(by: int, index: int) -> int:
    return index // by


def _remainder(by: int, index: int) -> int:
    return index % by


def _transposed(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """The output is the right one with two dimensions exchanged."""
    for first in range(len(tensor.dims)):
        for second in range(first + 1, len(tensor.dims)):
            square = [call for call in calls if call.golden.shape[first] == call.golden.shape[second] > 1]
            if len(square) == len(calls) and all(_is(call, call.golden.transpose(first, second)) for call in square):
                return f"are the right ones with {tensor.dims[first]} and {tensor.dims[second]} exchanged"
    return ""


def _distinct(numbers: Tensor) -> int:
    """Return how many different numbers there are; each NaN is one."""
    return len(set(numbers.tolist()))


def _is(call: Wrong, predicted: Tensor) -> bool:
    """Whether the wrong elements are within the tolerance of other numbers."""
    got, _, radius = call.elements
    return bool(((got - predicted[call.mask]).abs() <= radius).all())


def _digits(calls: Sequence[Wrong], tensor: TensorSpec) -> str:
    """The outputs are numbers of a narrower format than their own, next to the right ones."""
    case = calls[0].case
    dtype = case.result_dtypes[[each.name for each in case.signature.returns].index(tensor.name)]
    if dtype in INTEGERS:
        return ""
    out = format_named(dtype)
    got = torch.cat([call.elements[0] for call in calls])
    golden = torch.cat([call.elements[1] for call in calls])
    radius = torch.cat([call.elements[2] for call in calls])
    if len(got) < 32 or not bool(got.isfinite().all()):
        return ""
    fits = []
    for name in _NARROWER:
        narrow = format_named(name)
        if narrow.precision >= out.precision or float(got.abs().max()) > narrow.largest:
            continue
        spacing = torch.ldexp(torch.ones_like(got), got.abs().clamp(min=narrow.smallest_normal).log2().floor().int())
        spacing = spacing * 2.0 ** (1 - narrow.precision)
        if not bool((round_to(got, narrow) == got).all()) or _distinct(got) < _LEAST_DISTINCT:
            continue
        beside = bool(((got - golden).abs() <= radius + spacing).all())
        most = math.ceil(float(((got - golden).abs() / spacing).max()))
        where = "beside the right ones" if beside else f"up to {most:,} of their units off"
        if beside or most <= _MOST_UNITS:
            words = f"have {narrow.precision} significant bits, as {name} has, {where}"
            fits.append((not beside, narrow.precision, words))
    return min(fits)[-1] if fits else ""


_RELATIONS: tuple[Callable[[Sequence[Wrong], TensorSpec], str], ...] = (
    _constant,
    _factor,
    _offset,
    _other_index,
    _transposed,
    _digits,
)
