"""Aspects: which ones a case shows, the same case without one of them, and the aspect that a failure is attributed to.

A case shows several: a strided call with subnormals and a size of 33 shows `layouts`, `subnormals` and `shapes`. A
failure is attributed to the first aspect whose removal makes its case pass. Later cases are tried without the broken
aspects, so that one fault doesn't hide another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from assay.golden.inputs.distributions import EVERY, EXTREME
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.findings import Failure

_OF_KINDS = {  # the aspect that a failure of this kind shows, whatever its case
    "bias": "bias",
    "nondeterministic": "determinism",
    "batch_variant": "determinism",
    "out_of_bounds_write": "memory",
    "input_mutated": "memory",
}
_OF_PROTOCOLS = {
    "bias": "bias",
    "outside": "conduct",
    "after_refill": "determinism",
    "after_many": "determinism",
    "after_other": "determinism",
    "repeat": "determinism",
    "alone": "determinism",
    "emitted": "numbers",
}
_AS_IN_BENCHMARKS = ("after_refill", "after_many")  # series in which a kernel may think that it is timed
_WHOLE = {"numbers", "shapes", "memory"}  # aspects that a case at a production size shows
_SUBNORMAL = {"subnormal", "least"}
_UNUSUAL = {"special", "range", "subnormals"}
_PLAIN_SIZES = (64, 16)  # whole tiles of most kernels, the larger first: a fault of ragged sizes is gone there
_LONGEST = 131  # the largest of `sampler.TILE`; longer sizes need several blocks, and count as `shapes`
_ORDER = ("conduct", "determinism", "memory", "layouts", "special", "subnormals", "range", "shapes")
"""The order in which aspects are removed from a failing case: first those whose faults also show as others."""


def aspects_of(case: Case) -> set[str]:
    """Return the aspects that a case shows to be kept if it passes."""
    if case.protocol in ("bias", "outside"):
        return {_OF_PROTOCOLS[case.protocol]}
    if case.protocol == AT:
        return set(_WHOLE)
    result = {_OF_PROTOCOLS[case.protocol]} if case.protocol != "once" else set[str]()
    if case.protocol in _AS_IN_BENCHMARKS:
        result.add("conduct")
    if case.memory != "plain" or case.unused != "plain":
        result.add("memory")
    if any(layout != LAYOUTS[0] for layout in case.layouts.values()):
        result.add("layouts")
    if any(not math.isfinite(value) or _is_minus_zero(value) for _, _, value in case.edits):
        result.add("special")
    distributions = set(case.values.values())
    if distributions & _SUBNORMAL:
        result.add("subnormals")
    if distributions & (EXTREME - _SUBNORMAL):
        result.add("range")
    if any(size < 2 or size > _LONGEST or size % _PLAIN_SIZES[1] for size in case.sizes.values()):
        result.add("shapes")
    return result if result & _UNUSUAL else result | {"numbers"}


def _is_minus_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


def without_aspect(aspect: str, case: Case, sampler: Sampler) -> Case:
    """Return the case changed so that it doesn't show this aspect; the same case if that isn't possible."""
    if aspect == _OF_PROTOCOLS.get(case.protocol):
        return replace(case, protocol="once", before=())
    match aspect:
        case "memory":
            return replace(case, memory="plain", unused="plain")
        case "layouts":
            return replace(case, layouts={})
        case "special":
            return replace(case, edits=())
        case "range" | "subnormals" if aspect in aspects_of(case):
            return with_values(case, "normal")
        case "shapes":
            return _of_plain_sizes(case, sampler)
    return case


def _of_plain_sizes(case: Case, sampler: Sampler) -> Case:
    """Return the case with whole tiles along every symbol of free size, as large as fits, and 2 along grid symbols."""
    grid = case.definition.axes.grid
    for size in _PLAIN_SIZES:
        sizes = {symbol: 2 if symbol in grid else size for symbol in sampler.free_symbols(case)}
        if sampler.fits(sizes := {**case.sizes, **sizes}):
            return replace(
                case, sizes=sizes, edits=tuple(edit for edit in case.edits if _lies_in(edit[0], edit[1], case, sizes))
            )
    return case


def _lies_in(name: str, index: Iterable[int], case: Case, sizes: dict[str, int]) -> bool:
    tensor = next(tensor for tensor in case.signature.tensors if tensor.name == name)
    return all(position < size for position, size in zip(index, tensor.shape(sizes), strict=True))


def attributed_to(failure: Failure, attempt: Callable[[Case], Failure | None], sampler: Sampler) -> str:
    """Return the aspect that causes a failure: the first whose removal makes the case pass, or `numbers`.

    A wrong number that isn't wrong when tried again is attributed to `determinism`, the loss of the device to
    `memory`. ``attempt`` tries a case. A call that didn't return isn't repeated: its failure goes to the first aspect
    that its case shows and that isn't a mere warning. What overflows in long rows of growing numbers, and not in those
    of ordinary ones, is attributed to `range`.
    """
    case = failure.case
    if failure.aspect or failure.kind in _OF_KINDS:
        return failure.aspect or _OF_KINDS[failure.kind]
    shown = [aspect for aspect in _ORDER if aspect in aspects_of(case)]
    if failure.device_lost:
        return "memory"
    if failure.kind == "timeout":
        return next((aspect for aspect in shown if aspect not in ("special", "subnormals")), "numbers")

    def fails(simpler: Case) -> bool:
        result = attempt(simpler)
        return result is not None and _group(result) == _group(failure)

    if failure.golden is not None and not fails(case):
        return "determinism"
    plainest = case
    for aspect in shown:
        plainest = without_aspect(aspect, plainest, sampler)
    if fails(plainest):
        return "numbers"
    for aspect in shown:
        simpler = without_aspect(aspect, case, sampler)
        if simpler != case and not fails(simpler):
            if aspect == "shapes" and failure.kind == "nonfinite" and not fails(with_values(case, "normal")):
                return "range"
            return _kind_of_numbers(failure) if EVERY in case.values.values() else aspect
        case = simpler
    return _kind_of_numbers(failure) if EVERY in case.values.values() else "numbers"


def _group(failure: Failure) -> str:
    """Return the kind of a failure, with "exact" and "contract" as one: the same fault can show as either."""
    return "contract" if failure.kind == "exact" else failure.kind


def _kind_of_numbers(failure: Failure) -> str:
    """Return the aspect of the failing element's input, in a case that holds every number of a format (elementwise
    ops)."""
    case = failure.case
    tensor = case.signature.tensors[0]
    value = float(all_contents(case)[tensor.name][failure.index])
    if not math.isfinite(value) or _is_minus_zero(value):
        return "special"
    return "numbers"
