"""Where a failure begins: the size from which on a kernel is wrong, or the multiples at which it isn't; the same of
options, of layouts, of the numbers' magnitude, of indices of an output, and of calls in a series.

Nothing else changes with the size, the option and so on, and what is said holds on two further draws of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from assay.golden.inputs.distributions import names_of
from assay.golden.signature import TensorSpec
from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case, contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, real_tensors, with_values
from assay.verify.comparison.error_map import period_of
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.fault_tolerance import Observation
from assay.verify.findings import Fact, Failure
from assay.verify.harness.runner import KernelHarness

_STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # tiles, vectors and groups of kernels
_LEAST = 2  # sizes of each kind that show a pattern of multiples


def beginning(
    right: Sequence[int],
    wrong: Sequence[int],
    is_wrong: Callable[[int, int], bool | None],
    shown: Callable[[int], str] = "{:,}".format,
    margin: int = 0,
) -> str:
    """Return in words, after the name of a size, where calls are wrong; empty if there is no simple rule.

    ``right`` and ``wrong`` are sizes that were tried. ``is_wrong(size, draw)`` tries another one, or one with other
    data; None: it can't be tried. A boundary is bisected, and both sides of it are tried with two further draws.
    ``shown`` is a size in words; ``margin``: how far a boundary depends on the data to either side.
    """
    if not right or not wrong:
        return ""
    if max(right) < min(wrong) or max(wrong) < min(right):
        rising = max(right) < min(wrong)
        ends = (max(right), min(wrong)) if rising else (max(wrong), min(right))
        boundary = _bisected(*ends, lambda size: None if (it := is_wrong(size, 0)) is None else it == rising)
        if boundary is None:
            return ""
        below, above = (boundary[0] - margin, boundary[1] + margin)
        draws = [(is_wrong(below, draw), is_wrong(above, draw)) for draw in (1, 2)]
        if any(pair != (not rising, rising) for pair in draws):
            return ""
        first, second = ("right", "wrong") if rising else ("wrong", "right")
        return f"{first} up to {shown(below)}, {second} from {shown(above)} on"
    if min(len(right), len(wrong)) < _LEAST:
        return ""
    for step in _STEPS:
        multiples = {size % step == 0 for size in right}
        if len(multiples) == 1 and {size % step == 0 for size in wrong} == {not next(iter(multiples))}:
            return f"wrong where it is {'no' if True in multiples else 'a'} multiple of {step}"
    return ""


def _bisected(low: int, high: int, is_above: Callable[[int], bool | None]) -> tuple[int, int] | None:
    """Return the neighbouring sizes between which the answer changes; None if one can't be tried."""
    while high - low > 1:
        middle = (low + high) // 2
        above = is_above(middle)
        if above is None:
            return None
        low, high = (low, middle) if above else (middle, high)
    return low, high


_DRAWS = (1, 2)  # further ones, by which a rule is confirmed
_POWERS = range(-24, 25, 4)  # of two, by which numbers are multiplied
_MARGIN = 2  # powers of two between numbers that are surely right and surely wrong: the largest differ by the draw
_MOST_SCALED = 4096  # elements of a tensor that are multiplied
_IN_SERIES = 24  # calls
_MOST_STEP = _IN_SERIES // 4  # between wrong calls of a series: at least four of them are seen
_LEAST_INDICES = 4  # right ones, and wrong ones, in all calls together
_MOST_NAMED = 6  # values of an option


def beginnings(
    harness: KernelHarness,
    failure: Failure,
    first: Case,
    sampler: Sampler,
    observations: Sequence[Observation],
    aspect: str,
    budget: FaultBudget,
) -> list[Fact]:
    """Return at which options, layouts, magnitudes and indices a shrunk ``failure`` is there and at which not.

    ``observations`` are calls that show it, and ``first`` its case before shrinking. What isn't measured in time is
    left out.
    """
    words = [_of_indices([seen for seen in observations if not seen.case.edits])]
    words += (_rule(harness, axis, budget) for axis in _axes(failure.case, first, sampler))
    return [Fact("begins", each, aspect) for each in words if each]


@dataclass(frozen=True)
class _Axis:
    """One thing that is varied: its ``name``, its ``values``, and the case of a value under the data of a draw.

    ``exponents`` if the values are those of powers of two, between which others can be tried.
    """

    name: str
    values: Sequence[Any]
    case: Callable[[Any, int], Case]
    exponents: bool = False


def _axes(case: Case, first: Case, sampler: Sampler) -> Iterator[_Axis]:
    """Yield what can be varied in a case by itself; in the ``first`` one where small sizes hide it."""
    large = replace(first, protocol="once", layouts=case.layouts)
    for name, values in sampler.options.items():
        alike = [
            value for value in values if case.definition.signature({**case.options, name: value}) == case.signature
        ]
        yield _Axis(f"option {name}", alike, partial(_with_option, case, name))
    for name, layout in case.layouts.items():
        if layout != LAYOUTS[0]:
            yield _Axis(f"layout of {name}", sampler.layouts, partial(_with_layout, large, name))
    large = large if all(math.prod(large.shape(each)) <= _MOST_SCALED for each in large.signature.tensors) else case
    for tensor in real_tensors(large.signature):
        if "normal" in names_of(tensor) and 0 < math.prod(large.shape(tensor)) <= _MOST_SCALED:
            words = f"normal numbers in {tensor.name} times a power of two"
            yield _Axis(words, _POWERS, partial(_scaled, large, tensor), exponents=True)


def _with_option(case: Case, name: str, value: Any, draw: int) -> Case:
    return replace(case, options={**case.options, name: value}, seed=case.seed + 31 * draw)


def _with_layout(case: Case, name: str, layout: str, draw: int) -> Case:
    return replace(case, layouts={**case.layouts, name: layout}, seed=case.seed + 31 * draw)


def _scaled(case: Case, tensor: TensorSpec, power: int, draw: int) -> Case:
    """Return the case with normal numbers, those of one tensor multiplied by a power of two."""
    plain = with_values(case, "normal", edits=(), seed=case.seed + 31 * draw)
    numbers = contents(plain, tensor).double() * 2.0**power
    edits = ((tensor.name, tuple(index), float(numbers[tuple(index)])) for index in numbers.nonzero().tolist())
    return replace(plain, edits=tuple(edits))


def _rule(harness: KernelHarness, axis: _Axis, budget: FaultBudget) -> str:
    """Return in words at which values of an axis the kernel is right and at which wrong; empty if there is no rule."""

    def is_wrong(value: Any, draw: int) -> bool | None:
        result = None
        with suppress(AssayError):  # the reference refuses it
            result = None if budget.is_over() else harness.try_case(axis.case(value, draw))
        known = result is not None and (result.failure is not None or result.judged)
        return result.failure is not None if result is not None and known else None

    tried = {value: is_wrong(value, 0) for value in axis.values}
    right, wrong = ([value for value, answer in tried.items() if answer is it] for it in (False, True))
    if not right or not wrong:
        return ""
    if axis.exponents:
        words = beginning(right, wrong, is_wrong, "2^{}".format, _MARGIN)
    elif any(is_wrong(value, draw) is not answer for value, answer in tried.items() for draw in _DRAWS):
        words = ""
    else:
        named = (", ".join(map(str, some[:_MOST_NAMED])) for some in (right, wrong))
        words = "right for {}, wrong for {}".format(*named)
    return f"{axis.name}: {words}" if words else ""


def _of_indices(observations: Sequence[Observation]) -> str:
    """Return in words at which indices of an output elements are wrong in all calls: from one on, the last, or one in
    several; empty if there is no such rule."""
    for number, tensor in enumerate(observations[0].case.signature.returns if observations else ()):
        for axis, name in enumerate(tensor.dims):
            marks = [_marks(observation, number, axis) for observation in observations]
            counts = [(len(wrong), len(right)) for wrong, right, _ in marks]
            if any(sum(count) < _LEAST_INDICES for count in zip(*counts, strict=True)):
                continue
            if words := _shared_rule(marks):
                return f"index along {name} of {tensor.name}: {words}"
    return ""


def _marks(observation: Observation, number: int, axis: int) -> tuple[set[int], set[int], int]:
    """Return the indices along a dimension that have a wrong element, those of which all judged are right, and how many
    there are."""
    broken, judged = observation.broken[number], observation.limits[number].judged
    wrong, known = (mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1) for mask in (broken, judged))
    size = len(wrong)
    return (
        {index for index in range(size) if wrong[index]},
        {index for index in range(size) if known[index] and not wrong[index]},
        size,
    )


def _shared_rule(calls: Sequence[tuple[set[int], set[int], int]]) -> str:
    """Return the rule of indices that holds in all calls, the plainest first; empty if there is none."""
    wrong = set[int]().union(*(some for some, _, _ in calls))
    right = set[int]().union(*(some for _, some, _ in calls))
    if not wrong or not right:
        return ""
    if max(right) < min(wrong):
        return f"right up to {max(right)}, wrong from {min(wrong)} on"
    if max(wrong) < min(right):
        return f"wrong up to {max(wrong)}, right from {min(right)} on"
    last = max(size - min(some) for some, _, size in calls if some)
    if not any(max(sure, default=-1) >= size - last for _, sure, size in calls):
        return f"only the last {last} are wrong" if last > 1 else "only the last is wrong"
    for step in _STEPS:
        rests = {index % step for index in wrong}
        if len(rests) == 1 and not any(index % step in rests for index in right):
            rest = rests.pop()
            return f"wrong where it is {f'{rest} more than ' if rest else ''}a multiple of {step}"
    return ""


def calls_in_words(harness: KernelHarness, case: Case, budget: FaultBudget) -> str:
    """Return in words which calls of a series with the same inputs are wrong, if it is one in several."""
    wrong = list[bool]()
    while len(wrong) < _IN_SERIES:
        if budget.is_over():
            return ""
        wrong.append(harness.try_case(replace(case, protocol="once", before=())).failure is not None)
    step = period_of(wrong)
    if sum(wrong[:step]) != 1 or not 1 < step <= _MOST_STEP:
        return ""
    return f"calls with the same inputs: one in {step} is wrong (of {_IN_SERIES})"
